"""Model configurations and engine arguments, read as in a load but without starting an engine.

Used by the in-process tests and `make fuzz`. Independent of HTTP. Invariant: `read` returns what a load would use, or
raises the TritonError that a load would report; any other exception is a finding.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import orjson
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from llmbackend.adapter.engine_args import read_model_arguments
from llmbackend.adapter.schemas import schema_for
from llmbackend.core.backend_api import InstanceGroupKind, Model
from llmbackend.core.config.model_config import merge_auto_complete, set_instance_groups
from llmbackend.core.config.model_config_rules import validate_config, validate_tensors
from llmbackend.core.config_readers import config_to_json
from llmbackend.core.errors import TritonError
from llmbackend.core.messages import LoadParameters
from llmbackend.core.models.served_config import warn_of_ignored_fields
from llmbackend.core.repository.model_repository import ModelRepository
from llmbackend.core.requests.request_validation import RequestValidator

from . import examples
from .inputs import as_json, json_bodies, mutated_bytes, strange_scalars

Kind = Literal["config.pbtxt", "config override", "model.json", "MindIE config.json", "parameters"]


@dataclass(frozen=True)
class ConfigInput:
    kind: Kind
    content: bytes


@dataclass(frozen=True)
class _ModelVersion:
    """What the reading of arguments needs of a backend_api.Model."""

    name: str
    directory: Path
    version_directory: Path
    config: ModelConfig


class ConfigReader:
    """Reads into a repository of one model `m`. Owns the files below `root`."""

    def __init__(self, root: Path) -> None:
        self._directory = root / "m"
        (self._directory / "1").mkdir(parents=True)
        self._repository = ModelRepository([root], auto_complete_config=True)

    def read(self, given: ConfigInput) -> None:
        """Raises TritonError."""
        spec = self._repository.poll("m", self._write(given))["m"]
        if isinstance(spec, TritonError):
            raise spec
        config = spec.config
        set_instance_groups(config, [])
        if config.backend == "llm":
            merge_auto_complete(config, schema_for(config).complete(config))
        validate_config(config)
        validate_tensors(config)
        warn_of_ignored_fields(config)
        for group in config.instance_group:
            InstanceGroupKind(ModelInstanceGroup.Kind.Name(group.kind))
        RequestValidator(config)
        orjson.dumps(config_to_json(config))
        if config.backend == "llm":
            version = _ModelVersion("m", self._directory, self._directory / "1", config)
            read_model_arguments(cast(Model, version))

    def _write(self, given: ConfigInput) -> LoadParameters:
        """Puts the content where it is read from; the rest of the model is valid."""
        contents: dict[str, bytes] = {
            "config.pbtxt": b'backend: "llm"\n',
            "1/model.json": b'{"model": "mock"}',
            "mindie.json": as_json(examples.MINDIE_CONFIG[0]),
        }
        override: dict[str, str | bytes] = {}
        match given.kind:
            case "config.pbtxt":
                contents["config.pbtxt"] = given.content
            case "model.json":
                contents["1/model.json"] = given.content
            case "MindIE config.json":
                contents["config.pbtxt"] += (
                    b'parameters { key: "engine_config_path" value { string_value: "mindie.json" } }'
                )
                contents["mindie.json"] = given.content
            case "config override" | "parameters":
                override["config"] = given.content.decode("utf-8", "replace")
        for name, content in contents.items():
            (self._directory / name).write_bytes(content)
        return override


_PARAMETERS = (
    "model", "tokenizer", "max_queue_size", "engine_config_path", "dtype", "device", "max_model_len", "block_size",
    "num_kv_blocks", "step_timeout_s", "tensor_parallel_size", "model_instance_number", "gpu_memory_utilization", "x",
)  # fmt: skip


def _parameters(values: dict[str, Any]) -> ConfigInput:
    """config.pbtxt `parameters`, as an override."""
    texts = {
        name: {"string_value": value if isinstance(value, str) else json.dumps(value)} for name, value in values.items()
    }
    return ConfigInput("parameters", as_json({"backend": "llm", "parameters": texts}))


def _of(kind: Kind, contents: st.SearchStrategy[bytes]) -> st.SearchStrategy[ConfigInput]:
    return st.builds(ConfigInput, st.just(kind), contents)


CONFIG_INPUTS: dict[str, st.SearchStrategy[ConfigInput]] = {
    "config.pbtxt": _of("config.pbtxt", mutated_bytes(examples.CONFIG_PBTXT)),
    "config override": _of("config override", json_bodies(examples.CONFIG_JSON)),
    "model.json": _of("model.json", json_bodies(examples.MODEL_JSON)),
    "MindIE config.json": _of("MindIE config.json", json_bodies(examples.MINDIE_CONFIG)),
    "parameters": st.dictionaries(st.sampled_from(_PARAMETERS), strange_scalars, min_size=1, max_size=3).map(
        _parameters
    ),
}
