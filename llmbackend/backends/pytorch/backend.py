"""The `pytorch` backend's entry points, nothing else.

For: the host, which finds them by name. Does not know: how a program is run.
"""

from __future__ import annotations

from llmbackend.backends.entry_points import (
    TRITONBACKEND_Initialize,
    TRITONBACKEND_ModelFinalize,
    TRITONBACKEND_ModelInstanceExecute,
    TRITONBACKEND_ModelInstanceFinalize,
)
from llmbackend.core.backend_api import Model, ModelInstance

from .instance_state import InstanceState
from .model_state import ModelState

__all__ = [
    "TRITONBACKEND_Initialize",
    "TRITONBACKEND_ModelFinalize",
    "TRITONBACKEND_ModelInitialize",
    "TRITONBACKEND_ModelInstanceExecute",
    "TRITONBACKEND_ModelInstanceFinalize",
    "TRITONBACKEND_ModelInstanceInitialize",
]


def TRITONBACKEND_ModelInitialize(model: Model) -> None:
    model.state = ModelState(model)


def TRITONBACKEND_ModelInstanceInitialize(instance: ModelInstance) -> None:
    instance.state = InstanceState(instance, instance.model.state)
