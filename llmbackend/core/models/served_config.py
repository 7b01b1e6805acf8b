"""The configuration of one model version: completed, checked, served, and described for clients.

The backend may complete it only during ModelInitialize. A Description is built once per load, because every request
reads it. Source: TRITONBACKEND_ModelSetConfig, SetInstanceGroup and TRITONSERVER_ServerModelMetadata in Triton's core.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput

from llmbackend import __version__

from ..backend_manager import LoadedBackend
from ..config.model_config import merge_auto_complete, set_instance_groups
from ..config.model_config_rules import validate_config, validate_instance_groups, validate_tensors
from ..config_readers import ACCELERATORS_FIELD, ENVIRONMENT_PARAMETER, accelerator_names
from ..errors import unsupported
from ..gpus import HostGpus
from ..messages import ModelMetadata, TensorMetadata
from ..tensors import DATATYPE_OF_CONFIG_TYPE

log = logging.getLogger(__name__)

IGNORED_FIELDS: Final[Mapping[str, str]] = {
    "cc_model_filenames": "every device uses 'default_model_filename'",
    "ensemble_scheduling.step.model_namespace": "a model is looked up in the ensemble's namespace first",
    "instance_group.profile": "only TensorRT engines have profiles, and this server does not run them",
    "instance_group.secondary_devices": "instances use no DLA cores",
    "model_operations": "libraries of custom operations are not loaded",
    "optimization.cuda": "CUDA graphs are set by the engine arguments of the llm backend",
    "optimization.eager_batching": "a batch grows until an instance is free",
    ACCELERATORS_FIELD: "the backend runs models with its own framework only",
    "optimization.gather_kernel_buffer_threshold": "inputs are not gathered by a kernel",
    "optimization.graph": "only the onnxruntime backend has levels of graph optimization",
    "optimization.priority": "instances have no priority on their device",
    "sequence_batching.state.use_growable_memory": "states are kept in host memory",
    "sequence_batching.state.use_same_buffer_for_input_output": "each state has one buffer, which is replaced",
}
"""Path of the field → what happens instead. Without `input_pinned_memory` and `output_pinned_memory`: Triton sets them
to true in every configuration, and this host has no pinned memory."""
FIELDS_OF_BACKENDS: Final = frozenset(
    {"cc_model_filenames", "model_operations"}
    | {f"optimization.{name}" for name in ("cuda", "gather_kernel_buffer_threshold", "graph", "priority")}
    | {ACCELERATORS_FIELD}
)
"""Ignored fields that Triton leaves to backends: a compiled one reads them."""


def fields_read_by(backend: LoadedBackend) -> frozenset[str]:
    """Those of the ignored fields that the backend itself acts on."""
    if backend.is_compiled:
        return FIELDS_OF_BACKENDS
    return backend.attributes().read_fields


def warn_of_ignored_fields(config: ModelConfig, read_by_backend: Collection[str] = ()) -> None:
    """Logs one WARNING for each ignored field that is set, except those read by the backend."""
    names = accelerator_names(config)
    for path, instead in IGNORED_FIELDS.items():
        if path not in read_by_backend and _is_set(config, path):
            if path == ACCELERATORS_FIELD and names:
                instead = f"{instead}, not with {', '.join(names)}"
            log.warning("model '%s': '%s' in the model configuration has no effect: %s", config.name, path, instead)


def _is_set(message: Message, path: str) -> bool:
    """Whether the path is set in any of the repeated messages along it."""
    name, _, rest = path.partition(".")
    for field, value in message.ListFields():
        if field.name == name:
            return not rest or any(_is_set(item, rest) for item in (value if field.is_repeated else [value]))
    return False


SMALL_FILE_BYTES = 64 << 10
"""A fingerprint covers the content of files up to this size, and the names and sizes of larger ones."""


class ServedConfig:
    def __init__(self, config: ModelConfig, backend: LoadedBackend, gpus: HostGpus, may_complete: bool) -> None:
        self.current = deepcopy(config)  # read-only; others get a copy from `copy`
        self.current.runtime = config.runtime or backend.runtime
        environment = backend.directory / f"pb_exec_env_{backend.runtime}.tar.gz"
        if backend.runtime and ENVIRONMENT_PARAMETER not in config.parameters and environment.is_file():
            self.current.parameters[ENVIRONMENT_PARAMETER].string_value = str(environment)
        self._backend = backend
        self._gpus = gpus
        self._may_complete = may_complete
        self._is_open = False

    def copy(self) -> ModelConfig:
        return deepcopy(self.current)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Context in which the backend may call `complete`."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def complete(self, config: ModelConfig) -> None:
        """Merges the backend's configuration. Raises TritonError UNSUPPORTED outside `open`, or without
        auto-complete."""
        if not self._is_open or not self._may_complete:
            name = self.current.name
            raise unsupported(f"the configuration of model '{name}' can only be set in ModelInitialize")
        merge_auto_complete(self.current, config)

    def complete_instance_groups(self) -> None:
        """Raises TritonError INVALID_ARG if a group requests a device that the host does not have."""
        self._complete_groups_of(self.current)

    def check(self) -> None:
        """Raises TritonError if the configuration cannot be served."""
        validate_config(self.current)
        validate_tensors(self.current)
        warn_of_ignored_fields(self.current, fields_read_by(self._backend))

    def with_instances_of(self, config: ModelConfig) -> ModelConfig:
        """A copy with the instance groups and version policy of `config`. Raises the same errors as
        `complete_instance_groups`."""
        changed = self.copy()
        del changed.instance_group[:]
        changed.instance_group.extend(config.instance_group)
        changed.version_policy.CopyFrom(config.version_policy)
        self._complete_groups_of(changed)
        return changed

    def _complete_groups_of(self, config: ModelConfig) -> None:
        set_instance_groups(config, self._backend.attributes().preferred_groups, self._gpus.ids)
        validate_instance_groups(config, self._gpus.ids, self._gpus.min_compute_capability)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description(ModelMetadata):
    """A model's metadata without versions, and the other parts of its configuration that requests need.

    batches: whether max_batch_size is above 0
    parameters: string values of the configuration's `parameters`
    """

    batches: bool
    is_decoupled: bool
    parameters: Mapping[str, str]

    @classmethod
    def of(cls, name: str, config: ModelConfig, version_directory: Path) -> Description:
        return cls(
            name=name,
            versions=(),
            platform=config.platform or config.backend,
            inputs=tuple(_tensor_metadata(tensor, config.max_batch_size) for tensor in config.input),
            outputs=tuple(_tensor_metadata(tensor, config.max_batch_size) for tensor in config.output),
            batches=config.max_batch_size > 0,
            is_decoupled=config.model_transaction_policy.decoupled,
            parameters={key: value.string_value for key, value in config.parameters.items()},
            optional_inputs=frozenset(tensor.name for tensor in config.input if tensor.optional),
            fingerprint=fingerprint(config, version_directory),
        )

    def metadata(self, versions: Iterable[int]) -> ModelMetadata:
        return replace(self, versions=tuple(map(str, versions)))


def fingerprint(config: ModelConfig, version_directory: Path) -> str:
    """16 hexadecimal digits computed from the server's release, the model's configuration, the content of small files
    (engine arguments, a checkpoint's configuration) and the names and sizes of large ones (weights)."""
    digest = hashlib.sha256(__version__.encode())
    digest.update(config.SerializeToString(deterministic=True))
    with contextlib.suppress(OSError):
        for path in sorted(version_directory.iterdir()):
            if path.is_file():
                size = path.stat().st_size
                digest.update(f"\0{path.name}\0{size}\0".encode("utf-8", "surrogateescape"))
                digest.update(path.read_bytes() if size <= SMALL_FILE_BYTES else b"")
    return digest.hexdigest()[:16]


def _tensor_metadata(tensor: ModelInput | ModelOutput, max_batch_size: int) -> TensorMetadata:
    shape = (-1, *tensor.dims) if max_batch_size > 0 else tuple(tensor.dims)
    return TensorMetadata(tensor.name, DATATYPE_OF_CONFIG_TYPE[DataType.Name(tensor.data_type)], shape)
