"""What a model of this backend would be, and what its engines would take, without starting one.

For: LLMBACKEND_ModelForecast. Does not know: how the engine's part is found out (engine/load_forecast.py). Invariant:
an error has the text that starting an engine would give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import msgspec

from llmbackend.core.backend_api import InstanceGroupKind, Model, ModelInstance, internal
from llmbackend.engine.load_forecast import forecast

from .device_placement import DevicePlacement
from .model_state import ModelState


@dataclass(frozen=True, slots=True)
class _FirstInstance:
    """What of the model's first instance decides its engine's device."""

    name: str
    kind: InstanceGroupKind
    device_id: int


def model_forecast(model: Model) -> dict[str, Any]:
    """Raises TritonError."""
    state: ModelState = model.state
    groups = list(model.config.instance_group)
    group = groups[0]
    kind = InstanceGroupKind(type(group).Kind.Name(group.kind))
    first = _FirstInstance(f"{group.name}_0", kind, group.gpus[0] if group.gpus else 0)
    placed = DevicePlacement().place(state.arguments.engine, cast(ModelInstance, first))
    try:
        engine = forecast(state.arguments.with_device_defaults(placed))
    except (ValueError, OSError, RuntimeError) as error:
        raise internal(f"the engine of '{first.name}' did not start: {error}") from error
    return {
        "model": state.arguments.engine.model,
        "num_engines": sum(each.count * max(len(each.gpus), 1) for each in groups),
        "engine": msgspec.to_builtins(engine),
        **state.describe_text(),
    }
