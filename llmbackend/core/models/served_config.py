"""The configuration of one model version, from the file's to the one that is served.

For: Model. Does not know: instances, requests, where the file lies. Invariants: the backend may complete it while its
model is initialised and never after; what is served has passed every check. Source: backend API contract §2.1;
TRITONBACKEND_ModelSetConfig and SetInstanceGroup in Triton's core.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.backend_manager import LoadedBackend
from llmbackend.core.config.model_config import merge_auto_complete, set_instance_groups
from llmbackend.core.config.model_config_rules import validate_config, validate_instance_groups, warn_of_ignored_fields
from llmbackend.core.config.tensor_rules import validate_tensors
from llmbackend.core.errors import unsupported
from llmbackend.core.host_services import HostGpus


class ServedConfig:
    def __init__(self, config: ModelConfig, backend: LoadedBackend, gpus: HostGpus, may_complete: bool) -> None:
        self.current = _copy(config)  # for reading; what others may change is `copy`
        self.current.runtime = config.runtime or backend.runtime
        self._backend = backend
        self._gpus = gpus
        self._may_complete = may_complete
        self._is_open = False

    def copy(self) -> ModelConfig:
        return _copy(self.current)

    @contextmanager
    def open(self) -> Iterator[None]:
        """While the backend may complete it."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def complete(self, config: ModelConfig) -> None:
        """Takes over what the backend knows better. Raises TritonError UNSUPPORTED when it is not `open`, or when
        auto-complete is off."""
        if not self._is_open or not self._may_complete:
            name = self.current.name
            raise unsupported(f"the configuration of model '{name}' can only be set in ModelInitialize")
        merge_auto_complete(self.current, config)

    def complete_instance_groups(self) -> None:
        """Raises TritonError INVALID_ARG when the host has not what a group asks for."""
        self._complete_groups_of(self.current)

    def check(self) -> None:
        """Raises TritonError for a configuration that no model may be served with."""
        validate_config(self.current)
        validate_tensors(self.current)
        warn_of_ignored_fields(self.current)

    def with_instances_of(self, config: ModelConfig) -> ModelConfig:
        """This one with the instance groups and the version policy of `config`. Raises as they are completed."""
        changed = self.copy()
        del changed.instance_group[:]
        changed.instance_group.extend(config.instance_group)
        changed.version_policy.CopyFrom(config.version_policy)
        self._complete_groups_of(changed)
        return changed

    def _complete_groups_of(self, config: ModelConfig) -> None:
        set_instance_groups(config, self._backend.attributes().preferred_groups, self._gpus.ids)
        validate_instance_groups(config, self._gpus.ids, self._gpus.min_compute_capability)


def _copy(config: ModelConfig) -> ModelConfig:
    copy = ModelConfig()
    copy.CopyFrom(config)
    return copy
