"""The `python` backend's entry points."""

from __future__ import annotations

from collections.abc import Sequence

from llmbackend.core.backend_api import (
    Backend,
    BackendAttributes,
    MemoryUsage,
    Model,
    ModelInstance,
    Request,
    SendPolicy,
    check_api_version,
    process_memory,
    unavailable,
)

from .model_instance_state import ModelInstanceState
from .model_state import BackendState, ModelState

BUILT_FOR_API = (1, 19)
LLMBACKEND_API_VERSION = (1, 0)


def TRITONBACKEND_Initialize(backend: Backend) -> None:
    check_api_version(backend, BUILT_FOR_API)
    backend.send_policy = SendPolicy.BLOCKING  # each stub has its own thread for messages
    backend.state = BackendState()


def TRITONBACKEND_Finalize(backend: Backend) -> None:
    if backend.state is not None:
        backend.state.environments.close()
        backend.state = None


def TRITONBACKEND_GetBackendAttribute(backend: Backend, attributes: BackendAttributes) -> None:
    attributes.parallel_instance_loading = True


def TRITONBACKEND_ModelInitialize(model: Model) -> None:
    model.state = ModelState(model)
    if model.auto_complete_config:
        model.state.auto_complete()


def TRITONBACKEND_ModelFinalize(model: Model) -> None:
    if model.state is not None:
        model.state.close()
        model.state = None


def TRITONBACKEND_ModelInstanceInitialize(instance: ModelInstance) -> None:
    instance.state = ModelInstanceState(instance, instance.model.state)
    instance.state.initialize()


def TRITONBACKEND_ModelInstanceExecute(instance: ModelInstance, requests: Sequence[Request]) -> None:
    instance.state.process_requests(requests)


def TRITONBACKEND_ModelInstanceReady(instance: ModelInstance) -> None:
    if instance.state is not None:
        instance.state.supervisor.check_ready()


def LLMBACKEND_ModelInstanceKill(instance: ModelInstance) -> int:
    if instance.state is None:
        raise unavailable(f"instance '{instance.name}' has no process")
    pid: int = instance.state.supervisor.kill()
    return pid


def LLMBACKEND_ModelInstanceMemoryUsage(instance: ModelInstance) -> Sequence[MemoryUsage]:
    return () if instance.state is None else process_memory(instance.state.supervisor.pid)


def TRITONBACKEND_ModelInstanceFinalize(instance: ModelInstance) -> None:
    if instance.state is not None:
        instance.state.finalize()
        instance.state = None
