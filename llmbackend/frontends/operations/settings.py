"""The log and trace settings over HTTP and gRPC.

Independent of how requests are logged or sampled. Invariant: a change is validated as a whole before any part is
applied; unknown fields and trace levels are ignored, as in Triton (golden 41). Sources: Triton's HandleLogging and
HandleTrace, and its gRPC LogSettings and TraceSetting, whose texts and code for an unknown format differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from llmbackend.core.errors import TritonError, invalid_argument, unavailable, unsupported
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_log import LOG_FORMATS, LogField, LogSettings
from llmbackend.core.tracing.trace import UNLIMITED_COUNT, TraceChanges, TraceField, TraceLevel, TraceSettings

from ..http.json_reader import as_array, as_bool, as_string, as_unsigned

_LOG_FIELDS: Final[Mapping[str, tuple[LogField, Callable[[Any], Any], str, str]]] = {
    "log_info": ("info", as_bool, "bool_param", "boolean"),
    "log_warning": ("warning", as_bool, "bool_param", "boolean"),
    "log_error": ("error", as_bool, "bool_param", "boolean"),
    "log_verbose_level": ("verbose", as_unsigned, "uint32_param", "int32"),
    "log_format": ("format", as_string, "string_param", "string"),
}
"""Log setting → its field, how it is read from JSON, its choice in gRPC, and the name of that choice in errors."""
_INT32_MAX: Final = (1 << 31) - 1
_UINT32_MAX: Final = (1 << 32) - 1
_NUMBER: Final = re.compile(r"\s*([+-]?\d+)")
"""The part of a text that std::stoi reads; the rest is ignored."""
_TRACE_NUMBERS: Final[Mapping[str, TraceField]] = {
    "trace_rate": "rate",
    "trace_count": "count",
    "log_frequency": "log_frequency",
}


def log_changes_from_json(document: Any) -> dict[str, Any]:
    """document: body of a POST; null changes nothing. Raises TritonError naming the invalid field."""
    fields: Mapping[str, Any] = document if isinstance(document, dict) else {}
    if fields.get("log_file") is not None:
        raise _fixed_log_file()
    changes: dict[str, Any] = {
        field: read(fields[key]) for key, (field, read, _, _) in _LOG_FIELDS.items() if fields.get(key) is not None
    }
    if changes.get("verbose", 0) > _INT32_MAX:
        raise invalid_argument(f"log_verbose_level is {changes['verbose']}, expected at most {_INT32_MAX}")
    if changes.get("format", "default") not in LOG_FORMATS:
        raise unavailable(f"invalid argument for --log_format, got: {changes['format']}")
    return changes


def log_changes_from_proto(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Like `log_changes_from_json`, for a LogSettingsRequest."""
    if "log_file" in settings:
        raise _fixed_log_file()
    changes: dict[str, Any] = {}
    for key, (field, _, choice, name) in _LOG_FIELDS.items():
        if key in settings:
            if settings[key].WhichOneof("parameter_choice") != choice:
                raise invalid_argument(f"expect {name} for '{key}'")
            changes[field] = getattr(settings[key], choice)
    if changes.get("format", "default") not in LOG_FORMATS:
        raise invalid_argument(f"invalid argument for log_format, got: {changes['format']}")
    return changes


def _fixed_log_file() -> TritonError:
    return unsupported("log file location can not be updated through network protocol")


def shown_log_settings(settings: LogSettings) -> dict[str, str | bool | int]:
    """The settings in Triton's order."""
    return {
        "log_file": settings.file,
        "log_info": settings.info,
        "log_warning": settings.warning,
        "log_error": settings.error,
        "log_verbose_level": settings.verbose,
        "log_format": settings.format,
    }


def trace_changes_from_json(document: Any) -> TraceChanges:
    """document: body of a POST; null removes a model's own value. Raises TritonError naming the invalid field."""
    fields: Mapping[str, Any] = document if isinstance(document, dict) else {}
    _refuse_trace_file(fields)
    levels = fields.get("trace_level")
    values = {"trace_level": None if levels is None else [as_string(level) for level in as_array(levels)]}
    values |= {key: None if fields.get(key) is None else [as_string(fields[key])] for key in _TRACE_NUMBERS}
    return _trace_changes(fields, values, got="got:")


def trace_changes_from_proto(settings: Mapping[str, Any]) -> TraceChanges:
    """Like `trace_changes_from_json`, for a TraceSettingRequest. A setting without a value removes the model's own."""
    _refuse_trace_file(settings)
    values = {key: list(setting.value) or None for key, setting in settings.items()}
    for key in _TRACE_NUMBERS:
        if len(values.get(key) or ()) > 1:
            raise invalid_argument(f"expect only 1 value for '{key}'")
    return _trace_changes(settings, values, got="got: ")


def _refuse_trace_file(given: Mapping[str, Any]) -> None:
    if "trace_file" in given:
        raise unsupported("trace file location can not be updated through network protocol")


def _trace_changes(given: Mapping[str, Any], values: Mapping[str, Sequence[str] | None], got: str) -> TraceChanges:
    changes: dict[TraceField, TraceLevel | int | None] = {}
    if "trace_level" in given:
        levels = values["trace_level"]
        level = None if levels is None else _trace_level(levels)
        if levels is None or level is not None:
            changes["level"] = level
    for key, field in _TRACE_NUMBERS.items():
        if key in given:
            texts = values[key]
            changes[field] = None if texts is None else _number(key, texts[0], got)
    return changes


def _trace_level(names: Sequence[str]) -> TraceLevel | None:
    """The union of `names`; None: none is known, so nothing changes."""
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
    least, most = (UNLIMITED_COUNT, _INT32_MAX) if key == "trace_count" else (0, _UINT32_MAX)
    if key == "trace_count" and -_INT32_MAX <= value < UNLIMITED_COUNT:
        raise invalid_argument(f"Unable to parse '{key}'. Expecting value >= {UNLIMITED_COUNT}, {got}{text}")
    if not least <= value <= _INT32_MAX:
        raise invalid_argument(f"Unable to parse '{key}', value is out of range [ {least}, {most} ], got: {text}")
    return value


def shown_trace_settings(settings: TraceSettings) -> dict[str, list[str]]:
    """The settings in Triton's order."""
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


def updated_trace_settings(
    server: InferenceServer, model_name: str, changes: Callable[[], TraceChanges] | None
) -> TraceSettings:
    """The settings of a model, or of the server (""), after `changes`. Raises TritonError INVALID_ARG for a model that
    is not ready. May block for a second."""
    if model_name and not server.model_is_ready(model_name):
        raise invalid_argument(f"Request for unknown model : {model_name}")
    if changes is not None:
        server.tracing.update(model_name, changes())
    return server.tracing.settings(model_name)
