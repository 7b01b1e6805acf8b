"""The trace settings as they cross the network: names, texts of numbers, and what is refused.

For: the endpoints of HTTP and gRPC. Does not know: how requests are sampled. Invariant: a change is understood as a
whole before any of it is made; fields that nobody knows are ignored, and so are levels, as in Triton (golden 41).
Source: Triton's HandleTrace and its gRPC TraceSetting, whose texts differ in one space.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from llmbackend.core.errors import invalid_argument, unsupported
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.tracing.settings import LEAST_COUNT, TraceChanges, TraceField, TraceLevel, TraceSettings

from .json_reader import as_array, as_string

_INT32_MAX: Final = (1 << 31) - 1
_UINT32_MAX: Final = (1 << 32) - 1
_NUMBER: Final = re.compile(r"\s*([+-]?\d+)")
"""What std::stoi reads; what follows the digits is ignored."""
_NUMBERS: Final[Mapping[str, TraceField]] = {
    "trace_rate": "rate",
    "trace_count": "count",
    "log_frequency": "log_frequency",
}


def check_model(server: InferenceServer, model_name: str) -> None:
    """Raises TritonError INVALID_ARG for a model that is not ready. May take a second."""
    if model_name and not server.model_is_ready(model_name):
        raise invalid_argument(f"Request for unknown model : {model_name}")


def changes_from_json(document: Any) -> TraceChanges:
    """The changes that a POST asks for. Raises TritonError naming what is wrong."""
    fields: Mapping[str, Any] = document if isinstance(document, dict) else {}
    _refuse_file(fields)
    levels = fields.get("trace_level")
    values = {"trace_level": None if levels is None else [as_string(level) for level in as_array(levels)]}
    values |= {key: None if fields.get(key) is None else [as_string(fields[key])] for key in _NUMBERS}
    return _changes(fields, values, got="got:")


def changes_from_proto(settings: Mapping[str, Any]) -> TraceChanges:
    """As `changes_from_json`, of a TraceSettingRequest; a setting without a value is taken back."""
    _refuse_file(settings)
    values = {key: list(setting.value) or None for key, setting in settings.items()}
    for key in _NUMBERS:
        if len(values.get(key) or ()) > 1:
            raise invalid_argument(f"expect only 1 value for '{key}'")
    return _changes(settings, values, got="got: ")


def _refuse_file(given: Mapping[str, Any]) -> None:
    if "trace_file" in given:
        raise unsupported("trace file location can not be updated through network protocol")


def _changes(given: Mapping[str, Any], values: Mapping[str, Sequence[str] | None], got: str) -> TraceChanges:
    changes: dict[TraceField, TraceLevel | int | None] = {}
    if "trace_level" in given:
        levels = values["trace_level"]
        level = None if levels is None else _level(levels)
        if levels is None or level is not None:
            changes["level"] = level
    for key, field in _NUMBERS.items():
        if key in given:
            texts = values[key]
            changes[field] = None if texts is None else _number(key, texts[0], got)
    return changes


def _level(names: Sequence[str]) -> TraceLevel | None:
    """None = no name that is known, and so no change."""
    if "OFF" in names:
        if len(names) > 1:
            raise invalid_argument("Expect only one trace level 'OFF' is specified")
        return TraceLevel.OFF
    level = TraceLevel.OFF
    for name in names:
        if name in ("TIMESTAMPS", "TENSORS"):
            level |= TraceLevel[name]
    return level or None


def _number(key: str, text: str, got: str) -> int:
    match = _NUMBER.match(text)
    if match is None:
        raise invalid_argument(f"Unable to parse '{key}', got: {text}")
    value = int(match[1])
    least, most = (LEAST_COUNT, _INT32_MAX) if key == "trace_count" else (0, _UINT32_MAX)
    if key == "trace_count" and -_INT32_MAX <= value < LEAST_COUNT:
        raise invalid_argument(f"Unable to parse '{key}'. Expecting value >= {LEAST_COUNT}, {got}{text}")
    if not least <= value <= _INT32_MAX:
        raise invalid_argument(f"Unable to parse '{key}', value is out of range [ {least}, {most} ], got: {text}")
    return value


def shown(settings: TraceSettings) -> dict[str, list[str]]:
    """Every setting with its values, in Triton's order."""
    shown = {
        "trace_level": settings.level.names,
        "trace_rate": [str(settings.rate)],
        "trace_count": [str(settings.count)],
    }
    if settings.mode == "triton":
        shown |= {"log_frequency": [str(settings.log_frequency)], "trace_file": [settings.file]}
    shown["trace_mode"] = [settings.mode]
    if settings.mode == "opentelemetry":
        shown |= {key: [value] for key, value in settings.open_telemetry.shown().items()}
    return shown


def updated(server: InferenceServer, model_name: str, changes: Callable[[], TraceChanges] | None) -> TraceSettings:
    """The settings of a model, or of the server for the empty name, after `changes`. May take a second."""
    check_model(server, model_name)
    if changes is not None:
        server.tracing.update(model_name, changes())
    return server.tracing.settings(model_name)
