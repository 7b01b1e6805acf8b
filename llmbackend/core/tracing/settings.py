"""What can be set about tracing, its defaults, and how the settings of models inherit from those of the server.

For: the trace manager, the command line, and the frontends' trace setting endpoints. Does not know: traces, protocols.
Invariant: a model's setting is the server's wherever the model names none of its own, also after the server's changes.
Source: Triton's TraceManager (reference §1.1, golden 41).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntFlag
from typing import Any, Final, Literal


class TraceLevel(IntFlag):
    OFF = 0
    TIMESTAMPS = 1
    TENSORS = 2

    @property
    def names(self) -> list[str]:
        """As the protocol lists them."""
        return [level.name or "" for level in (TraceLevel.TIMESTAMPS, TraceLevel.TENSORS) if level in self] or ["OFF"]


TraceMode = Literal["triton", "opentelemetry"]
TraceField = Literal["level", "rate", "count", "log_frequency"]
TraceChanges = Mapping[TraceField, TraceLevel | int | None]
"""New values; None takes a field's value back, so that it is inherited again. A field that is not here stays."""

LEAST_COUNT: Final = -1
"""Of traces to collect: no limit."""


@dataclass(frozen=True, kw_only=True)
class OpenTelemetryOptions:
    """`--trace-config opentelemetry,…`: where spans go, as what, and how they are batched. url "" = the exporter's own
    default, http://localhost:4318/v1/traces."""

    url: str = ""
    resource: Mapping[str, str] = field(default_factory=dict)
    bsp_max_queue_size: int = 2048
    bsp_schedule_delay_ms: int = 5000
    bsp_max_export_batch_size: int = 512

    def shown(self) -> dict[str, str]:
        """As the trace setting endpoints show them."""
        shown = {"url": self.url} if self.url else {}
        if self.resource:
            shown["resource"] = ",".join(f"{key}={value}" for key, value in self.resource.items())
        return shown | {
            "bsp_max_queue_size": str(self.bsp_max_queue_size),
            "bsp_schedule_delay": str(self.bsp_schedule_delay_ms),
            "bsp_max_export_batch_size": str(self.bsp_max_export_batch_size),
        }


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """rate: every rate-th request is traced. count: how many traces are still to be collected, -1 = no end.
    log_frequency: how many traces go into one numbered file, 0 = all into `file` itself."""

    level: TraceLevel = TraceLevel.OFF
    rate: int = 1000
    count: int = LEAST_COUNT
    log_frequency: int = 0
    file: str = ""
    mode: TraceMode = "triton"
    open_telemetry: OpenTelemetryOptions = field(default_factory=OpenTelemetryOptions)

    def fault(self) -> str:
        """Why no request can be sampled with these, whatever is left of `count`; "" when one can."""
        if self.level is TraceLevel.OFF:
            return "tracing is disabled"
        if self.rate == 0:
            return "sample rate must be non-zero"
        if self.mode == "triton" and not self.file:
            return "trace file name is not given"
        return ""

    def with_changes(self, own: Mapping[TraceField, Any]) -> TraceSettings:
        return replace(self, **{str(name): value for name, value in own.items()})


def changed(own: Mapping[TraceField, Any], changes: TraceChanges) -> dict[TraceField, Any]:
    """The values that somebody has set for himself, after `changes`."""
    merged = {**own, **changes}
    return {name: value for name, value in merged.items() if value is not None}
