"""The flags of `llmbackend serve` for the log, metrics and request traces.

Invariants: names, defaults and meanings are Triton's. --trace-config takes precedence over the --trace-* flags that it
replaced; settings of a mode that is not selected are ignored, unknown ones are refused.
Source: Triton's command_line_parser.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final

import typer

from llmbackend.core.metrics.metrics_options import MetricsOptions, with_metrics_config
from llmbackend.core.tracing.trace import UNLIMITED_COUNT, OpenTelemetryOptions, TraceLevel, TraceMode, TraceSettings

from ...core.server_log import LOG_FORMATS, LogSettings
from ..command_line import bad_option, one_of, switch, warn

_OTLP_HTTP: Final = "http/protobuf"
_OTLP_GRPC: Final = "grpc"
LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class LogFlags:
    PANEL: ClassVar = "Log"

    log_verbose: Annotated[int, typer.Option(min=0, help="1 or higher: debug lines.")] = 0
    log_level: Annotated[
        str,
        typer.Option(
            help="debug, info, warning, error or critical; "
            "replaces --log-verbose, --log-info, --log-warning and --log-error.",
            autocompletion=one_of(*LOG_LEVELS),
        ),
    ] = ""
    log_info: Annotated[Any, switch("Log information.")] = True
    log_warning: Annotated[Any, switch("Log warnings.")] = True
    log_error: Annotated[Any, switch("Log errors.")] = True
    log_format: Annotated[str, typer.Option(help="default or ISO8601.", autocompletion=one_of(*LOG_FORMATS))] = (
        "default"
    )
    log_file: Annotated[str, typer.Option(help="File to which the log is appended; default: standard error.")] = ""

    def settings(self) -> LogSettings:
        if self.log_format not in LOG_FORMATS:
            raise bad_option("--log-format", "invalid argument for --log-format")
        if self.log_level and self.log_level.lower() not in LOG_LEVELS:
            expected = f"expected one of {', '.join(LOG_LEVELS)}"
            raise bad_option("--log-level", f"--log-level is '{self.log_level}', {expected}")
        verbose, info, warning, error = self.log_verbose, self.log_info, self.log_warning, self.log_error
        if self.log_level:
            least = LOG_LEVELS.index(self.log_level.lower())
            verbose, info, warning, error = int(least == 0), least <= 1, least <= 2, least <= 3
        return LogSettings(
            verbose=verbose, info=info, warning=warning, error=error, format=self.log_format, file=self.log_file
        )


@dataclass(frozen=True)
class MetricsConfigFlags:
    PANEL: ClassVar = "Metrics"

    metrics_config: Annotated[
        list[str] | None,
        typer.Option(
            help="counter_latencies=BOOL, histogram_latencies=BOOL, summary_latencies=BOOL or "
            "summary_quantiles=Q:ERROR,Q:ERROR; repeatable."
        ),
    ] = None
    metrics_interval_ms: Annotated[int, typer.Option(min=1, help="Interval of machine metrics, ms.")] = 2000
    allow_cpu_metrics: Annotated[Any, switch("Metrics of the machine's CPU and memory.")] = True

    def options(self) -> MetricsOptions:
        options = MetricsOptions(interval_ms=self.metrics_interval_ms, cpu_metrics=self.allow_cpu_metrics)
        try:
            return with_metrics_config(options, self.metrics_config or ())
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None


_MODES: Final[tuple[TraceMode, ...]] = ("triton", "opentelemetry")
_LEVELS: Final[Mapping[str, TraceLevel]] = (
    dict.fromkeys(("off", "false"), TraceLevel.OFF)
    | dict.fromkeys(("timestamps", "true", "on", "min", "max"), TraceLevel.TIMESTAMPS)
    | {"tensors": TraceLevel.TENSORS}
)
_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("level", "rate", "count", "mode"),
    "triton": ("file", "log-frequency"),
    "opentelemetry": ("url", "resource", "bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size"),
}
_BATCHING: Final = {"bsp_max_queue_size": 2048, "bsp_schedule_delay": 5000, "bsp_max_export_batch_size": 512}
"""Each value can also come from the environment, as OTEL_BSP_…"""


def _deprecated(instead: str) -> Any:
    return typer.Option(help=f"Deprecated: use --trace-config {instead}.")


@dataclass(frozen=True)
class TraceFlags:
    PANEL: ClassVar = "Traces"

    trace_config: Annotated[
        list[str] | None,
        typer.Option(help="<setting>=<value> (level, rate, count, mode) or <mode>,<setting>=<value>; repeatable."),
    ] = None
    trace_file: Annotated[str | None, _deprecated("triton,file=")] = None
    trace_level: Annotated[list[str] | None, _deprecated("level=")] = None
    trace_rate: Annotated[int | None, _deprecated("rate=")] = None
    trace_count: Annotated[int | None, _deprecated("count=")] = None
    trace_log_frequency: Annotated[int | None, _deprecated("triton,log-frequency=")] = None
    otlp_traces_endpoint: Annotated[
        str,
        typer.Option(
            help="Collector to which each request's OpenTelemetry trace is sent: OTLP over HTTP if the URL has a path, "
            "else over gRPC, unless OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is set; replaces --trace-config.",
        ),
    ] = ""

    def settings(self) -> TraceSettings:
        """Raises BadParameter that names the invalid setting."""
        if self.otlp_traces_endpoint:
            if self.trace_config:
                raise bad_option("--otlp-traces-endpoint", "--otlp-traces-endpoint and --trace-config: expected one")
            return _every_request_to(self.otlp_traces_endpoint)
        self._warn_of_deprecated()
        given = _parsed(self.trace_config or ())
        mode = _mode(given[""].get("mode", ["triton"])[-1])
        levels = given[""].get("level") or self.trace_level or []
        return TraceSettings(
            level=_level(levels),
            rate=_last(given[""], "rate", self.trace_rate, 1000, least=0),
            count=_last(given[""], "count", self.trace_count, UNLIMITED_COUNT, least=UNLIMITED_COUNT),
            log_frequency=_last(given["triton"], "log-frequency", self.trace_log_frequency, 0, least=0),
            file=(given["triton"].get("file") or [self.trace_file or ""])[-1] if mode == "triton" else "",
            mode=mode,
            open_telemetry=(
                _open_telemetry(given["opentelemetry"]) if mode == "opentelemetry" else OpenTelemetryOptions()
            ),
        )

    def _warn_of_deprecated(self) -> None:
        for flag, value, instead in (
            ("--trace-file", self.trace_file, "triton,file=<file path>"),
            ("--trace-level", self.trace_level, "level=<OFF|TIMESTAMPS|TENSORS>"),
            ("--trace-rate", self.trace_rate, "rate=<rate value>"),
            ("--trace-count", self.trace_count, "count=<count value>"),
            ("--trace-log-frequency", self.trace_log_frequency, "triton,log-frequency=<log frequency value>"),
        ):
            if value is not None:
                warn(
                    f"'{flag}' has been deprecated and will be removed in future releases. "
                    f"Please use '--trace-config {instead}' instead."
                )


def _every_request_to(url: str) -> TraceSettings:
    """As in vLLM, OTLP over gRPC unless OpenTelemetry's variables say otherwise; but a URL with a path is of HTTP."""
    path = url.rpartition("://")[2].partition("/")[2]
    variables = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next(filter(None, map(os.environ.get, variables)), _OTLP_HTTP if path else _OTLP_GRPC)
    if protocol not in (_OTLP_HTTP, _OTLP_GRPC):
        raise bad_option("--otlp-traces-endpoint", f"{variables[0]} is '{protocol}', expected grpc or http/protobuf")
    options = replace(_open_telemetry({"url": [url]}), uses_grpc=protocol == _OTLP_GRPC)
    return TraceSettings(level=TraceLevel.TIMESTAMPS, rate=1, mode="opentelemetry", open_telemetry=options)


Given = dict[str, list[str]]
"""Setting → its values, in the order of the command line."""


def _parsed(items: Sequence[str]) -> dict[str, Given]:
    """The settings by mode; "" for settings of every mode."""
    given: dict[str, Given] = {mode: {} for mode in _SETTINGS}
    for item in items:
        mode, comma, setting = item.partition(",")
        if not comma or "=" in mode:  # a value may contain a comma
            mode, setting = "", item
        name, _, value = setting.partition("=")
        if item.startswith(","):
            raise typer.BadParameter(
                "No trace mode specified. --trace-config option format is <trace mode>,<setting>=<value> or "
                f"<setting>=<value>. Got {item}"
            )
        if not name or not value:
            raise typer.BadParameter(f"--trace-config option format is '<trace mode>,<setting>=<value>'. Got {item}")
        mode = _mode(mode) if mode else ""
        if name not in _SETTINGS[mode]:
            known = ", ".join(_SETTINGS[mode])
            raise typer.BadParameter(f"--trace-config {item}: unknown setting '{name}', expected {known}")
        given[mode].setdefault(name, []).append(value)
    return given


def _mode(text: str) -> TraceMode:
    for mode in _MODES:
        if text.lower() == mode:
            return mode
    raise typer.BadParameter(
        f'invalid value for trace mode option: {text}. Available options are "triton" and "opentelemetry"'
    )


def _level(texts: list[str]) -> TraceLevel:
    """The union of all named levels; off takes precedence."""
    level = TraceLevel.OFF
    for text in texts:
        if text.lower() not in _LEVELS:
            raise typer.BadParameter(f"invalid value for trace level option: {text}")
        level |= _LEVELS[text.lower()]
    return TraceLevel.OFF if any(_LEVELS[text.lower()] is TraceLevel.OFF for text in texts) else level


def _last(given: Given, name: str, deprecated: int | None, default: int, least: int) -> int:
    value = default if deprecated is None else deprecated
    if name in given:
        value = _number(f"--trace-config {name}", given[name][-1])
    if value < least:
        raise typer.BadParameter(f"trace setting '{name}' is {value}, expected at least {least}")
    return value


def _number(what: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f'Bad option: "{what}": {text} is not a number') from None


def _open_telemetry(given: Given) -> OpenTelemetryOptions:
    batching = {name: _batching(given, name) for name in _BATCHING}
    if batching["bsp_max_export_batch_size"] > batching["bsp_max_queue_size"]:
        raise typer.BadParameter("--trace-config opentelemetry: bsp_max_export_batch_size exceeds bsp_max_queue_size")
    return OpenTelemetryOptions(
        url=given.get("url", [""])[-1],
        resource=dict(_pair(text) for text in given.get("resource", ())),
        bsp_max_queue_size=batching["bsp_max_queue_size"],
        bsp_schedule_delay_ms=batching["bsp_schedule_delay"],
        bsp_max_export_batch_size=batching["bsp_max_export_batch_size"],
    )


def _batching(given: Given, name: str) -> int:
    variable = f"OTEL_{name.upper()}"
    if name in given:
        value = _number(f"--trace-config opentelemetry,{name}", given[name][-1])
    else:
        value = _number(variable, os.environ.get(variable, str(_BATCHING[name])))
    if value < 1:
        raise typer.BadParameter(f"OpenTelemetry setting '{name}' is {value}, expected at least 1")
    return value


def _pair(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value
