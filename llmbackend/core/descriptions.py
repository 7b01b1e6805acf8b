"""What the server and a model look like from outside: the metadata of the KServe protocol.

For: the server. Does not know: states, wire forms. Invariant: it reads the configuration as it is served, and nothing
else.
Source: TRITONSERVER_ServerModelMetadata.
"""

from __future__ import annotations

from collections.abc import Iterable

from tritonclient.grpc.model_config_pb2 import DataType, ModelInput, ModelOutput

from .messages import ModelMetadata, TensorMetadata
from .models.model import LoadedModel
from .tensors import DATATYPE_OF_CONFIG_TYPE

EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
"""Triton's names of the extensions that this host serves."""


def describe(model: LoadedModel, versions: Iterable[LoadedModel]) -> ModelMetadata:
    """Metadata of `model`, naming `versions` as those that can be asked for."""
    config = model.config
    return ModelMetadata(
        name=model.name,
        versions=tuple(str(version.version) for version in versions),
        platform=config.platform or config.backend,
        inputs=tuple(_tensor_metadata(tensor, config.max_batch_size) for tensor in config.input),
        outputs=tuple(_tensor_metadata(tensor, config.max_batch_size) for tensor in config.output),
    )


def _tensor_metadata(tensor: ModelInput | ModelOutput, max_batch_size: int) -> TensorMetadata:
    shape = (-1, *tensor.dims) if max_batch_size > 0 else tuple(tensor.dims)
    return TensorMetadata(tensor.name, DATATYPE_OF_CONFIG_TYPE[DataType.Name(tensor.data_type)], shape)
