"""Backend, Model and ModelInstance of the backend contract, as Triton's python backend describes them to a stub.

For: TritonPythonModel. Does not know: LLMs. A stub is the process of one model instance, so there is one of each here;
`instance_group.count: 2` are two stubs that share nothing but Triton's own queue.
Source: the `args` of TritonPythonModel.initialize.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.backend_api import (
    API_VERSION,
    ExecutionPolicy,
    InstanceGroupKind,
    MetricFamily,
    MetricKind,
    SendPolicy,
    unsupported,
)

from .chores import Chores


def parse_config(fields: dict[str, Any]) -> ModelConfig:
    """A configuration as the stub hands it over; fields that this protobuf does not know are of no concern."""
    config: ModelConfig = json_format.ParseDict(fields, ModelConfig(), ignore_unknown_fields=True)
    return config


class TritonBackend:
    """backend_api.Backend. `chores` is what every request and metric of this process hangs on."""

    execution_policy = ExecutionPolicy.BLOCKING
    send_policy = SendPolicy.IMMEDIATE
    api_version = API_VERSION

    def __init__(self, name: str, directory: Path, chores: Chores) -> None:
        self.state: Any = None
        self.name = name
        self.directory = directory
        self.config: Mapping[str, str] = {}
        self.chores = chores

    def metric_family(
        self,
        kind: MetricKind,
        name: str,
        description: str,
        label_names: Sequence[str] | None = (),
        buckets: Sequence[float] | None = None,
    ) -> MetricFamily:
        return self.chores.metrics.family(kind, name, description, buckets)


class TritonModel:
    """backend_api.Model."""

    auto_complete_config = False
    """Triton has the configuration completed in another process, before."""

    def __init__(self, backend: TritonBackend, arguments: Mapping[str, str]) -> None:
        """`arguments`: those of TritonPythonModel.initialize."""
        self.state: Any = None
        self.backend = backend
        self.name = arguments["model_name"]
        self.version = int(arguments["model_version"])
        self.directory = Path(arguments["model_repository"])
        self.version_directory = self.directory / arguments["model_version"]
        self._config = parse_config(json.loads(arguments["model_config"]))

    @property
    def config(self) -> ModelConfig:
        copy = ModelConfig()
        copy.CopyFrom(self._config)
        return copy

    def set_config(self, config: ModelConfig) -> None:
        raise unsupported("inside Triton a configuration is completed by auto_complete_config alone")


class TritonInstance:
    """backend_api.ModelInstance. Triton's python backend reports the statistics of a request itself."""

    is_passive = False

    def __init__(self, model: TritonModel, arguments: Mapping[str, str]) -> None:
        self.state: Any = None
        self.model = model
        self.name = arguments["model_instance_name"]
        self.kind = InstanceGroupKind(f"KIND_{arguments['model_instance_kind']}")
        self.device_id = int(arguments["model_instance_device_id"])

    def _count_nothing(self, *_: Any, **__: Any) -> None:
        """A report that Triton makes for itself."""

    report_statistics = report_batch_statistics = report_response_statistics = _count_nothing
