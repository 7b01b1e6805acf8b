"""Entry points of the `llm` backend, which the host finds by name.

Serving itself is in ModelState and ModelInstanceState. Invariant: every finaliser accepts a state that was never set,
because it is also called after a failed Initialize.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from llmbackend.core.activity.messages import InstanceDescription
from llmbackend.core.backend_api import (
    Backend,
    BackendAttributes,
    InstanceGroupKind,
    MemoryUsage,
    Model,
    ModelInstance,
    Request,
    check_api_version,
    internal,
    unavailable,
)
from llmbackend.gguf.model_directory import source_of

from .device_placement import DevicePlacement
from .llmapi_config import complete_policy, read_model_yaml
from .metrics import SeriesUsers
from .model_instance_state import ModelInstanceState
from .model_state import ModelState
from .schemas import is_llmapi, schema_for

BUILT_FOR_API = (1, 19)
LLMBACKEND_API_VERSION = (1, 0)


def TRITONBACKEND_Initialize(backend: Backend) -> None:
    check_api_version(backend, BUILT_FOR_API)
    backend.state = SeriesUsers()
    backend.resumes = True


def TRITONBACKEND_GetBackendAttribute(backend: Backend, attributes: BackendAttributes) -> None:
    """By default, one engine on the configured device. Several engines start in parallel."""
    attributes.preferred_groups.append((InstanceGroupKind.MODEL, 1))
    attributes.parallel_instance_loading = True


def TRITONBACKEND_ModelInitialize(model: Model) -> None:
    config = model.config
    model_yaml = read_model_yaml(model.version_directory) if is_llmapi(config) else None
    if model.auto_complete_config:
        if model_yaml is not None:
            complete_policy(config, model_yaml)
        model.set_config(schema_for(config).complete(config))
        config = model.config
    state = ModelState(model, schema_for(config), model_yaml)
    model.state = state
    if model.auto_complete_config and (parameters := state.public_parameters()):
        for name, value in parameters.items():
            config.parameters[name].string_value = value
        model.set_config(config)


def TRITONBACKEND_ModelInstanceInitialize(instance: ModelInstance) -> None:
    instance.state = ModelInstanceState(instance.model.state, instance)


def TRITONBACKEND_ModelInstanceExecute(instance: ModelInstance, requests: Sequence[Request]) -> None:
    state: ModelInstanceState = instance.state
    state.enqueue(requests)


def TRITONBACKEND_ModelInstanceReady(instance: ModelInstance) -> None:
    state: ModelInstanceState | None = instance.state
    if state is None:
        raise unavailable(f"instance '{instance.name}' has no engine")
    state.check_ready()


def LLMBACKEND_ModelInstanceKill(instance: ModelInstance) -> int:
    state: ModelInstanceState | None = instance.state
    if state is None:
        raise unavailable(f"instance '{instance.name}' has no engine")
    return state.kill_engine()


def LLMBACKEND_ModelInstanceWatch(instance: ModelInstance, kinds: frozenset[str]) -> None:
    state: ModelInstanceState | None = instance.state
    if state is not None:
        state.watch(kinds)


def LLMBACKEND_ModelInstanceDescribe(instance: ModelInstance) -> InstanceDescription:
    state: ModelInstanceState | None = instance.state
    return InstanceDescription(state="stopped") if state is None else state.describe()


def LLMBACKEND_ModelInstanceMemoryUsage(instance: ModelInstance) -> Sequence[MemoryUsage]:
    state: ModelInstanceState | None = instance.state
    return () if state is None else state.memory_usage()


def TRITONBACKEND_ModelInstanceFinalize(instance: ModelInstance) -> None:
    state: ModelInstanceState | None = instance.state
    instance.state = None
    if state is not None:
        state.shutdown()


def LLMBACKEND_ModelForecast(model: Model) -> dict[str, Any]:
    """Describes a model and the memory of its engines without starting one. Raises the errors of a start."""
    from llmbackend.engine.load_forecast import forecast

    state: ModelState = model.state
    groups = list(model.config.instance_group)
    first = groups[0]
    instance_name, kind = f"{first.name}_0", InstanceGroupKind(type(first).Kind.Name(first.kind))
    place = instance_name, kind, first.gpus[0] if first.gpus else 0
    placed = DevicePlacement().place(state.arguments.engine, *place, state.arguments.is_llmapi)
    try:
        engine = forecast(state.arguments.with_device_defaults(placed))
    except (ValueError, OSError, RuntimeError) as error:
        raise internal(f"the engine of '{instance_name}' did not start: {error}") from error
    return {
        "model": source_of(state.arguments.engine.model),
        "num_engines": sum(each.count * max(len(each.gpus), 1) for each in groups),
        "engine": msgspec.to_builtins(engine),
        **state.describe_text(),
    }


def TRITONBACKEND_ModelFinalize(model: Model) -> None:
    state: ModelState | None = model.state
    model.state = None
    if state is not None:
        state.close()
