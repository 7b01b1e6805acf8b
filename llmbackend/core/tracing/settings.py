"""Trace settings: what can be set, defaults, and how a model's settings inherit from the server's.

For: the trace manager, the command line, and the frontends' trace setting endpoints. Does not know: traces, protocols.
Invariant: where a model sets nothing of its own it has the server's setting, also after the server's changes.
Source: Triton's TraceManager; golden 41.
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
        """As in the protocol."""
        return [level.name or "" for level in (TraceLevel.TIMESTAMPS, TraceLevel.TENSORS) if level in self] or ["OFF"]


TraceMode = Literal["triton", "opentelemetry"]
TraceField = Literal["level", "rate", "count", "log_frequency"]
TraceChanges = Mapping[TraceField, TraceLevel | int | None]
"""New values. None = inherit again; an absent field does not change."""

UNLIMITED_COUNT: Final = -1
"""`count` without a limit."""


@dataclass(frozen=True, kw_only=True)
class OpenTelemetryOptions:
    """`--trace-config opentelemetry,…`."""

    url: str = ""
    """Where spans are sent; "" = the exporter's default, http://localhost:4318/v1/traces."""
    resource: Mapping[str, str] = field(default_factory=dict)
    """Attributes of the spans' resource."""
    bsp_max_queue_size: int = 2048
    """Spans that wait to be sent; more are dropped."""
    bsp_schedule_delay_ms: int = 5000
    bsp_max_export_batch_size: int = 512
    """Spans."""

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
    """The settings of the server or of one model."""

    level: TraceLevel = TraceLevel.OFF
    rate: int = 1000
    """Every rate-th request is traced."""
    count: int = UNLIMITED_COUNT
    """Traces still to be collected; -1 = no limit."""
    log_frequency: int = 0
    """Traces per numbered file; 0 = all in `file` itself."""
    file: str = ""
    """Path; mode triton only."""
    mode: TraceMode = "triton"
    open_telemetry: OpenTelemetryOptions = field(default_factory=OpenTelemetryOptions)

    def fault(self) -> str:
        """Why no request can be sampled, apart from `count`; "" = requests can be sampled."""
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
    """The own values of a model or the server, after `changes`."""
    merged = {**own, **changes}
    return {name: value for name, value in merged.items() if value is not None}
