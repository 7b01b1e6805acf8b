"""The settings of one server process: frozen objects, made by the command line, read by everything above the host.

For: `llmbackend serve`. Does not know: how flags are spelled, what the engine's arguments mean. Invariant: settings
that exist are consistent; names and defaults are Triton's. The repository that is made for a single model holds what a
person would have written, and lives as long as the process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from llmbackend.adapter.engine_args import LORA_MODULES, MULTI_LORA_FILE
from llmbackend.core.server_options import ServerOptions
from llmbackend.frontends.access.settings import NO_ACCESS_CONTROL, AccessSettings
from llmbackend.frontends.journals.store_settings import IN_MEMORY, StoreSettings
from llmbackend.frontends.limits import FrontendLimits
from llmbackend.frontends.protocol_options import DEFAULT_OPTIONS, ProtocolOptions

from ..core.server_log import LogSettings
from .process_end import temporary_directory


@dataclass(frozen=True)
class Endpoint:
    """Where one protocol listens."""

    address: str
    port: int
    """0: any free one."""
    enabled: bool = True
    reuse_port: bool = False
    """Other servers that allow it too may listen on the port."""

    @property
    def port_or_none(self) -> int | None:
        return self.port if self.enabled else None

    @property
    def address_or_none(self) -> str | None:
        return self.address if self.enabled else None


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Everything that `llmbackend serve` needs."""

    options: ServerOptions
    http: Endpoint
    grpc: Endpoint
    metrics: Endpoint
    http_max_input_size_bytes: int = 64 << 20
    openai_max_input_size_bytes: int = 4 << 20
    exit_timeout_s: int = 30
    limits: FrontendLimits = field(default_factory=FrontendLimits)
    store: StoreSettings = IN_MEMORY
    access: AccessSettings = NO_ACCESS_CONTROL
    log: LogSettings = field(default_factory=LogSettings)
    protocols: ProtocolOptions = DEFAULT_OPTIONS
    flag_model: str = ""
    """The name of the model that flags describe (`--model`), "" for none."""


def check_port_collision(endpoints: Mapping[str, Endpoint]) -> None:
    """Raises ValueError with Triton's text, naming the protocols. Port 0 is any free one, and never collides; a port
    that another process has is found when it is bound. Source: CheckPortCollision in Triton's command_line_parser."""
    used = [(name, endpoint) for name, endpoint in endpoints.items() if endpoint.enabled and endpoint.port]
    for (one, first), (other, second) in combinations(used, 2):
        if (first.address, first.port) == (second.address, second.port):
            raise ValueError(
                f"The server cannot listen to {one} requests and {other} requests at the same address and port "
                f"{first.address}:{first.port}"
            )


@dataclass(frozen=True, kw_only=True)
class SingleModel:
    """The one model that `llmbackend serve --model` serves."""

    model: str
    """A checkpoint's directory or a hub id."""
    name: str = ""
    """The name that it is served as; "": the last part of `model`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The engine's arguments, checked: JSON values by name."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Parameters of config.pbtxt."""

    @property
    def served_name(self) -> str:
        path = Path(self.model)
        return self.name or (path.resolve().name if path.exists() else self.model.rsplit("/", 1)[-1])

    def make_repository(self) -> Path:
        """A temporary repository with this model: config.pbtxt, and a model.json that points to the checkpoint."""
        repository = temporary_directory(prefix="llmbackend-repository-")
        version = repository / self.served_name / "1"
        version.mkdir(parents=True)
        arguments = dict(self.arguments)
        adapters = arguments.pop(LORA_MODULES, {})
        if arguments.get("enable_lora"):
            (version / MULTI_LORA_FILE).write_text(json.dumps(adapters))
        (version / "model.json").write_text(json.dumps(arguments))
        lines = [
            f"parameters {{ key: {json.dumps(name)} value: {{ string_value: {json.dumps(value)} }} }}\n"
            for name, value in self.parameters.items()
        ]
        (version.parent / "config.pbtxt").write_text("".join(['backend: "llm"\n', *lines]))
        return repository
