"""What the server and a model look like from outside: the metadata of the KServe protocol.

For: LoadedModel and the server. Does not know: states, wire forms. Invariant: it reads the configuration as it is
served, and nothing else, once per load.
Source: TRITONSERVER_ServerModelMetadata.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput

from llmbackend import __version__

from .messages import ModelMetadata, TensorMetadata
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


_SMALL_FILE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Description:
    """What a model's configuration says of it, but for its versions. Made once per load: requests ask for it."""

    name: str
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    batches: bool
    parameters: Mapping[str, str]
    """`parameters` of the configuration, their string values."""
    optional_inputs: frozenset[str]
    fingerprint: str

    @classmethod
    def of(cls, name: str, config: ModelConfig, version_directory: Path) -> Description:
        return cls(
            name=name,
            platform=config.platform or config.backend,
            inputs=tuple(_tensor_metadata(tensor, config.max_batch_size) for tensor in config.input),
            outputs=tuple(_tensor_metadata(tensor, config.max_batch_size) for tensor in config.output),
            batches=config.max_batch_size > 0,
            parameters={key: value.string_value for key, value in config.parameters.items()},
            optional_inputs=frozenset(tensor.name for tensor in config.input if tensor.optional),
            fingerprint=fingerprint(config, version_directory),
        )

    def metadata(self, versions: Iterable[int]) -> ModelMetadata:
        """Names `versions` as those that can be asked for."""
        return ModelMetadata(
            name=self.name,
            versions=tuple(map(str, versions)),
            platform=self.platform,
            inputs=self.inputs,
            outputs=self.outputs,
            optional_inputs=self.optional_inputs,
            fingerprint=self.fingerprint,
        )


def fingerprint(config: ModelConfig, version_directory: Path) -> str:
    """Equal for equal models of one release: the same configuration, the same small files (engine arguments, a
    checkpoint's own configuration) and large files (weights) of the same names and sizes. 16 hexadecimal digits."""
    digest = hashlib.sha256(__version__.encode())
    digest.update(config.SerializeToString(deterministic=True))
    with contextlib.suppress(OSError):
        for path in sorted(version_directory.iterdir()):
            if path.is_file():
                size = path.stat().st_size
                digest.update(f"\0{path.name}\0{size}\0".encode("utf-8", "surrogateescape"))
                digest.update(path.read_bytes() if size <= _SMALL_FILE_BYTES else b"")
    return digest.hexdigest()[:16]


def _tensor_metadata(tensor: ModelInput | ModelOutput, max_batch_size: int) -> TensorMetadata:
    shape = (-1, *tensor.dims) if max_batch_size > 0 else tuple(tensor.dims)
    return TensorMetadata(tensor.name, DATATYPE_OF_CONFIG_TYPE[DataType.Name(tensor.data_type)], shape)
