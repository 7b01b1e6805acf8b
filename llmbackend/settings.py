"""The settings of one server process: one frozen object, made by the command line, read by everything above the host.

For: `llmbackend serve`. Does not know: how flags are spelled. Invariant: settings that exist are consistent; names
and defaults are Triton's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from llmbackend.core.messages import ServerOptions
from llmbackend.frontends.doors.settings import NO_DOORS, DoorSettings
from llmbackend.frontends.limits import FrontendLimits

LogFormat = Literal["default", "ISO8601"]


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Which levels are logged, and how a line looks. verbose > 0 adds debug lines."""

    verbose: int = 0
    info: bool = True
    warning: bool = True
    error: bool = True
    format: LogFormat = "default"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where one protocol listens; port 0 picks a free one."""

    address: str
    port: int
    enabled: bool = True

    @property
    def port_or_none(self) -> int | None:
        return self.port if self.enabled else None

    @property
    def address_or_none(self) -> str | None:
        return self.address if self.enabled else None


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Everything `llmbackend serve` needs."""

    options: ServerOptions
    http: Endpoint
    grpc: Endpoint
    metrics: Endpoint
    http_max_input_size_bytes: int = 64 << 20
    exit_timeout_s: int = 30
    limits: FrontendLimits = field(default_factory=FrontendLimits)
    doors: DoorSettings = NO_DOORS
    log: LogSettings = LogSettings()
