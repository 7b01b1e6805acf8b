"""The one model that `llmbackend serve --model` serves, and the repository that is made for it.

For: the command line. Does not know: flags, what the engine's arguments mean. Invariant: the repository holds what a
person would have written: a config.pbtxt, and a model.json that points to the checkpoint; it lives as long as the
process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmbackend.adapter.engine_args import LORA_MODULES, MULTI_LORA_FILE

from .process_end import temporary_directory


@dataclass(frozen=True, kw_only=True)
class SingleModel:
    """model: a checkpoint's directory or a hub id. name "" = the last part of it. arguments: of the engine, checked,
    JSON values by name. parameters: of config.pbtxt, as text."""

    model: str
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def served_name(self) -> str:
        path = Path(self.model)
        return self.name or (path.resolve().name if path.exists() else self.model.rsplit("/", 1)[-1])

    def make_repository(self) -> Path:
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
