"""The parts of pb_utils that talk to the host: log lines, model control and metrics, from any thread.

Invariants: the host's log level decides what is logged; metrics changed before a response have changed when the client
has it; a refusal by the host is a TritonModelException with its text.
Source: Triton python_backend documentation ("Model Loading API", "Custom Metrics"), and Triton's texts.
"""

from __future__ import annotations

import enum
import logging
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from .errors import TritonModelException, text
from .host_link import host

_CALLER_OF_CALLER = 2

_PHASES_WITHOUT_CONTROL = ("load", "auto_complete", "finalize")
_FILE_PREFIX = "file:"
_COUNTER, _GAUGE, _HISTOGRAM = "counter", "gauge", "histogram"
_KINDS_OF_ACTION = {
    "increment": (_COUNTER, _GAUGE),
    "set": (_GAUGE,),
    "observe": (_HISTOGRAM,),
    "value": (_COUNTER, _GAUGE),
}


class Logger:
    class LogLevel(enum.Enum):
        INFO = logging.INFO
        WARNING = logging.WARNING
        ERROR = logging.ERROR
        VERBOSE = logging.DEBUG

    INFO: ClassVar[LogLevel] = LogLevel.INFO
    WARNING: ClassVar[LogLevel] = LogLevel.WARNING
    ERROR: ClassVar[LogLevel] = LogLevel.ERROR
    VERBOSE: ClassVar[LogLevel] = LogLevel.VERBOSE

    @staticmethod
    def log(message: str | bytes, level: LogLevel = LogLevel.INFO) -> None:
        if not isinstance(level, Logger.LogLevel):
            raise TypeError(f"level must be one of Logger's levels, got {type(level).__name__}")
        _post(message, level)

    @staticmethod
    def log_info(message: str | bytes) -> None:
        _post(message, Logger.INFO)

    @staticmethod
    def log_warn(message: str | bytes) -> None:
        _post(message, Logger.WARNING)

    @staticmethod
    def log_error(message: str | bytes) -> None:
        _post(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message: str | bytes) -> None:
        _post(message, Logger.VERBOSE)


def _post(message: str | bytes, level: Logger.LogLevel) -> None:
    line = text(message, "message")
    caller = sys._getframe(_CALLER_OF_CALLER)
    host("Logger").post(("log", level.value, caller.f_code.co_filename, caller.f_lineno, line))


def load_model(
    model_name: str | bytes, config: str | bytes = "", files: Mapping[str | bytes, bytes | str] | None = None
) -> None:
    """Loads a model of the repository; blocks until done.

    config: JSON that replaces its configuration
    files: {"file:1/model.onnx": content} that replaces its directory
    """
    parameters: dict[str, str | bytes] = {"config": text(config, "config")} if config else {}
    for path, content in (files or {}).items():
        name = text(path, "a name in files")
        if not name.startswith(_FILE_PREFIX) or not isinstance(content, (bytes, bytearray, str)):
            raise TritonModelException(f"files of load_model must be bytes under names '{_FILE_PREFIX}…', got {name!r}")
        parameters[name] = content.encode() if isinstance(content, str) else bytes(content)
    _ask("load_model", text(model_name, "model_name"), parameters)


def unload_model(model_name: str | bytes, unload_dependents: bool = False) -> None:
    """Begins to unload a model; returns immediately."""
    _ask("unload_model", text(model_name, "model_name"), bool(unload_dependents))


def is_model_ready(model_name: str | bytes, model_version: str | bytes = "") -> bool:
    """model_version: "" = chosen by the server. False for an unknown model."""
    version = text(model_version, "model_version")
    if version and not version.isdecimal():
        raise TritonModelException(f"model_version must be a number as text, got {model_version!r}")
    return bool(_ask("is_model_ready", text(model_name, "model_name"), int(version) if version else -1))


def _ask(verb: str, *arguments: object) -> object:
    link = host(verb)
    if link.phase in _PHASES_WITHOUT_CONTROL:
        raise TritonModelException(f"{verb} is not supported during the '{link.phase}' function.")
    answer: object = link.ask(verb, *arguments)
    return answer


class Metric:
    """One metric of a family: a family and label values."""

    def __init__(self, family: MetricFamily, number: int) -> None:
        self._family = weakref.ref(family)
        self._kind = family._kind
        self._number = number

    def increment(self, value: float) -> None:
        """Raises TritonModelException for a histogram, and for a counter with a negative value."""
        self._change("increment", value)

    def set(self, value: float) -> None:
        self._change("set", value)

    def observe(self, value: float) -> None:
        self._change("observe", value)

    def value(self) -> float:
        """The value of a counter or gauge. Raises TritonModelException for a histogram."""
        with _failing("Failed to get metric value"):
            self._check("value")
            return float(host("Metric.value").ask("metric_value", self._number))

    def _check(self, action: str) -> None:
        if self._family() is None:
            raise TritonModelException(
                "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The 'MetricFamily' "
                "object should be deleted AFTER its corresponding 'Metric' objects have been deleted."
            )
        if self._kind not in _KINDS_OF_ACTION[action]:
            raise TritonModelException(
                f"TRITONSERVER_METRIC_KIND_{self._kind.upper()} does not support {action.capitalize()}"
            )

    def _change(self, action: str, value: float) -> None:
        with _failing(f"Failed to {action} metric value"):
            self._check(action)
            if self._kind == _COUNTER and value < 0:
                raise TritonModelException(
                    "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."
                )
            host(f"Metric.{action}").post(("metric", self._number, action, float(value)))


class MetricKind:
    COUNTER: ClassVar[str] = _COUNTER
    GAUGE: ClassVar[str] = _GAUGE
    HISTOGRAM: ClassVar[str] = _HISTOGRAM


class MetricFamily(MetricKind):
    """An existing family keeps its first description."""

    def __init__(self, name: str | bytes, description: str | bytes, kind: str) -> None:
        """Raises TritonModelException if the name is invalid, or exists with another kind."""
        if kind not in (_COUNTER, _GAUGE, _HISTOGRAM):
            raise TritonModelException(
                f"Unknown metric kind {kind!r}: expected MetricFamily.COUNTER, GAUGE or HISTOGRAM"
            )
        self._link = host("MetricFamily")
        self._name = text(name, "name")
        self._description = text(description, "description")
        self._kind = str(kind)
        with _failing("Error when creating MetricFamily"):
            self._link.ask("metric_family", self._kind, self._name, self._description)

    def Metric(self, labels: dict[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """The metric with these labels. buckets: a histogram's upper bounds, ascending. Raises TritonModelException for
        invalid labels or buckets."""
        bounds = self._checked_buckets(buckets)
        plain_labels = _checked_labels(labels)
        with _failing("Error when creating Metric"):
            number = self._link.ask("metric_open", self._kind, self._name, self._description, plain_labels, bounds)
        return Metric(self, number)

    def _checked_buckets(self, buckets: Any) -> list[float] | None:
        if buckets is None:
            if self._kind == _HISTOGRAM:
                raise TritonModelException("Failed to create metric. Missing required buckets.")
            return None
        if not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if self._kind != _HISTOGRAM:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        return [float(bound) for bound in buckets]


def _checked_labels(labels: Any) -> dict[str, str]:
    if labels is None:
        return {}
    if not isinstance(labels, dict):
        raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TritonModelException(f"Failed to create metric. Labels must be strings, got {{{name!r}: {value!r}}}.")
    return {str(name): str(value) for name, value in labels.items()}


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Prefixes the text of a refusal with `what`."""
    try:
        yield
    except TritonModelException as error:
        raise TritonModelException(f"{what}: {error}") from None
