"""ServerSettings: the frozen settings of one server process. SingleModel: a repository for the only model of `--model`.

Used by the command line, which creates them, and by the server. Independent of the spelling of flags and the meaning of
engine arguments. Invariants: an existing settings object is consistent; names and defaults are Triton's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from llmbackend.adapter.engine_args import (
    LORA_MODULES,
    OWN_PARAMETERS,
    check_checkpoint,
    read_given_arguments,
    read_own_parameters,
)
from llmbackend.core.backend_api import SERVED_MODEL_NAME
from llmbackend.core.server_options import ServerOptions
from llmbackend.engine.config import EngineConfig
from llmbackend.frontends.access.settings import NO_ACCESS_CONTROL, AccessSettings
from llmbackend.frontends.journals.store_settings import IN_MEMORY, StoreSettings
from llmbackend.frontends.limits import FrontendLimits
from llmbackend.frontends.protocol_options import DEFAULT_OPTIONS, NO_PAGES, PageSettings, ProtocolOptions
from llmbackend.gguf.files import model_name as gguf_name

from ..core.server_log import LogSettings
from .ports import Endpoint
from .process import temporary_directory

_NOT_IN_NAMES = re.compile(r"[^\w.+@=-]")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """All settings of `llmbackend serve`."""

    options: ServerOptions
    http: Endpoint
    grpc: Endpoint
    metrics: Endpoint
    http_max_input_size_bytes: int = 64 << 20
    openai_max_input_size_bytes: int = 4 << 20
    exit_timeout_s: int = 30
    frontend_processes: int = 1
    """1 = the host's process has the clients' connections; more = the number of separate processes that have them."""
    host_folder: Path | None = None
    """The folder that the host shares with its frontend processes, if another process starts them."""
    limits: FrontendLimits = field(default_factory=FrontendLimits)
    store: StoreSettings = IN_MEMORY
    access: AccessSettings = NO_ACCESS_CONTROL
    log: LogSettings = field(default_factory=LogSettings)
    protocols: ProtocolOptions = DEFAULT_OPTIONS
    flags: Mapping[str, str] = field(default_factory=dict)
    """The flags on the command line, as shown to operators."""
    pages: PageSettings = NO_PAGES
    is_on_one_port: bool = False
    """Whether gRPC and a separate metrics port are closed unless requested."""
    flag_model: str = ""
    """Name of the model of `--model`; "" = none."""


@dataclass(frozen=True, kw_only=True)
class SingleModel:
    """The only model of `llmbackend serve --model`."""

    model: str
    """A checkpoint's directory, a GGUF file or a hub id."""
    names: Sequence[str] = ()
    """Names for clients, the canonical one first; may contain slashes and colons; () = the last part of `model`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Checked engine arguments: JSON values by name."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Parameters of config.pbtxt."""

    @classmethod
    def checked(cls, model: str, names: Sequence[str], given: Mapping[str, Any]) -> SingleModel:
        """given: engine arguments and request limits by name. Raises TritonError or ValueError that names the
        argument."""
        parameters = {key: str(value) for key, value in given.items() if key in OWN_PARAMETERS}
        others = {key: value for key, value in given.items() if key not in OWN_PARAMETERS}
        arguments = read_given_arguments({"model": model, **others}, Path.cwd())
        read_own_parameters(parameters)
        check_checkpoint(EngineConfig(**arguments))
        single = cls(model=model, names=names, arguments=msgspec.to_builtins(arguments), parameters=parameters)
        if list(names) not in ([], [single.name]):
            parameters[SERVED_MODEL_NAME] = ",".join(names)
        return single

    @property
    def name(self) -> str:
        """The model's directory in the repository."""
        path = Path(self.model)
        if self.names or not path.exists():
            last = (self.names[0] if self.names else self.model).rstrip("/").rsplit("/", 1)[-1]
            return _NOT_IN_NAMES.sub("_", gguf_name(Path(last))).lstrip(".") or "model"
        return gguf_name(path) if path.is_file() else path.resolve().name

    def make_repository(self) -> Path:
        """A repository with this model, removed together with the process."""
        repository = temporary_directory("repository")
        self.write_into(repository)
        return repository

    def write_into(self, repository: Path) -> None:
        """Writes config.pbtxt, and model.json with the engine arguments."""
        version = repository / self.name / "1"
        version.mkdir(parents=True)
        arguments = dict(self.arguments)
        if arguments.get("enable_lora"):
            arguments.setdefault(LORA_MODULES, {})
        (version / "model.json").write_text(json.dumps(arguments))
        lines = [
            f"parameters {{ key: {json.dumps(name)} value: {{ string_value: {json.dumps(value)} }} }}\n"
            for name, value in self.parameters.items()
        ]
        (version.parent / "config.pbtxt").write_text("".join(['backend: "llm"\n', *lines]))
