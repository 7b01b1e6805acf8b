"""The settings of one server process: one frozen object, made by the command line, read by everything above the host.

For: `llmbackend serve`. Does not know: how flags are spelled. Invariant: settings that exist are consistent; names
and defaults are Triton's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llmbackend.core.messages import ServerOptions
from llmbackend.frontends.doors.settings import NO_DOORS, DoorSettings
from llmbackend.frontends.limits import FrontendLimits
from llmbackend.frontends.protocol_options import DEFAULT_OPTIONS, ProtocolOptions

from .server_log import LogSettings


@dataclass(frozen=True)
class Endpoint:
    """Where one protocol listens; port 0 picks a free one. With `reuse_port`, beside other servers that allow it."""

    address: str
    port: int
    enabled: bool = True
    reuse_port: bool = False

    @property
    def port_or_none(self) -> int | None:
        return self.port if self.enabled else None

    @property
    def address_or_none(self) -> str | None:
        return self.address if self.enabled else None


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Everything `llmbackend serve` needs. flag_model: the name of the model that flags describe, "" for none."""

    options: ServerOptions
    http: Endpoint
    grpc: Endpoint
    metrics: Endpoint
    http_max_input_size_bytes: int = 64 << 20
    openai_max_input_size_bytes: int = 4 << 20
    exit_timeout_s: int = 30
    limits: FrontendLimits = field(default_factory=FrontendLimits)
    doors: DoorSettings = NO_DOORS
    log: LogSettings = field(default_factory=LogSettings)
    protocols: ProtocolOptions = DEFAULT_OPTIONS
    flag_model: str = ""
