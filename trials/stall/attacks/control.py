"""Repository, trace and log settings: bodies that only operators send."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

from .attack import Attack, HttpSent, Sent, numbered

_UNKNOWN = '"k%d":"v"'


def _load(parameters: Callable[[int], dict[str, str]]) -> Callable[[int], list[Sent]]:
    def make(size: int) -> list[Sent]:
        body = json.dumps({"parameters": parameters(size - 1000)}).encode()
        return [HttpSent("/v2/repository/models/overridden/load", body)]

    return make


def _config(size: int) -> dict[str, str]:
    parameter = '"p%d":{"string_value":"v"}'
    return {"config": f'{{"backend":"echo","parameters":{{{numbered(parameter, size * 2 // 3)}}}}}'}


def _file(size: int) -> dict[str, str]:
    config = json.dumps({"backend": "missing"})
    return {"config": config, "file:1/weights.bin": base64.b64encode(bytes(size // 4 * 3)).decode()}


def _settings(path: str) -> Callable[[int], list[Sent]]:
    return lambda size: [HttpSent(path, f"{{{numbered(_UNKNOWN, size - 1000)}}}".encode())]


CONTROL_ATTACKS = (
    Attack("load with a large config", _load(_config)),
    Attack("load with a large file", _load(_file)),
    Attack("trace settings", _settings("/v2/trace/setting")),
    Attack("log settings", _settings("/v2/logging")),
    Attack("repository index", _settings("/v2/repository/index")),
)
