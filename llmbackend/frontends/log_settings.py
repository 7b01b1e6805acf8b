"""The log settings as they cross the network: names, types, and what is refused.

For: the endpoints of HTTP and gRPC. Does not know: how anything is logged. Invariant: a change is understood as a whole
before any of it is made; fields that nobody knows are ignored, as in Triton (golden 41). Source: Triton's HandleLogging
and its gRPC LogSettings, which differ in texts and in the code of a format that nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from llmbackend.core.errors import TritonError, invalid_argument, unavailable, unsupported
from llmbackend.log_format import LOG_FORMATS
from llmbackend.server_log import LogField, LogSettings

from .json_reader import as_bool, as_string, as_unsigned

_MOST_VERBOSE: Final = (1 << 31) - 1
_FIELDS: Final[Mapping[str, LogField]] = {
    "log_info": "info",
    "log_warning": "warning",
    "log_error": "error",
    "log_verbose_level": "verbose",
    "log_format": "format",
}
_FROM_JSON: Final[Mapping[LogField, Callable[[Any], Any]]] = {
    "info": as_bool,
    "warning": as_bool,
    "error": as_bool,
    "verbose": as_unsigned,
    "format": as_string,
}
_PROTO_CHOICES: Final[Mapping[LogField, tuple[str, str]]] = {
    "info": ("bool_param", "boolean"),
    "warning": ("bool_param", "boolean"),
    "error": ("bool_param", "boolean"),
    "verbose": ("uint32_param", "int32"),
    "format": ("string_param", "string"),
}


def changes_from_json(document: Any) -> dict[str, Any]:
    """The changes that a POST asks for; null changes nothing. Raises TritonError naming what is wrong."""
    fields: Mapping[str, Any] = document if isinstance(document, dict) else {}
    if fields.get("log_file") is not None:
        raise _fixed_file()
    changes: dict[str, Any] = {
        field: _FROM_JSON[field](fields[key]) for key, field in _FIELDS.items() if fields.get(key) is not None
    }
    if changes.get("verbose", 0) > _MOST_VERBOSE:
        raise invalid_argument(f"log_verbose_level is {changes['verbose']}, expected at most {_MOST_VERBOSE}")
    if changes.get("format", "default") not in LOG_FORMATS:
        raise unavailable(f"invalid argument for --log_format, got: {changes['format']}")
    return changes


def changes_from_proto(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As `changes_from_json`, of a LogSettingsRequest."""
    if "log_file" in settings:
        raise _fixed_file()
    changes: dict[str, Any] = {}
    for key, field in _FIELDS.items():
        if key in settings:
            choice, name = _PROTO_CHOICES[field]
            if settings[key].WhichOneof("parameter_choice") != choice:
                raise invalid_argument(f"expect {name} for '{key}'")
            changes[field] = getattr(settings[key], choice)
    if changes.get("format", "default") not in LOG_FORMATS:
        raise invalid_argument(f"invalid argument for log_format, got: {changes['format']}")
    return changes


def _fixed_file() -> TritonError:
    return unsupported("log file location can not be updated through network protocol")


def shown(settings: LogSettings) -> dict[str, str | bool | int]:
    """Every setting, in Triton's order."""
    return {
        "log_file": settings.file,
        "log_info": settings.info,
        "log_warning": settings.warning,
        "log_error": settings.error,
        "log_verbose_level": settings.verbose,
        "log_format": settings.format,
    }
