"""The `pytorch` backend's entry points, nothing else.

For: the host, which finds them by name. Does not know: how a program is run.
"""

from __future__ import annotations

from llmbackend.backends.entry_points import TRITONBACKEND_Initialize as TRITONBACKEND_Initialize
from llmbackend.backends.entry_points import TRITONBACKEND_ModelFinalize as TRITONBACKEND_ModelFinalize
from llmbackend.backends.entry_points import TRITONBACKEND_ModelInstanceExecute as TRITONBACKEND_ModelInstanceExecute
from llmbackend.backends.entry_points import TRITONBACKEND_ModelInstanceFinalize as TRITONBACKEND_ModelInstanceFinalize
from llmbackend.core.backend_api import Model, ModelInstance

from .instance_state import InstanceState
from .model_state import ModelState


def TRITONBACKEND_ModelInitialize(model: Model) -> None:
    model.state = ModelState(model)


def TRITONBACKEND_ModelInstanceInitialize(instance: ModelInstance) -> None:
    instance.state = InstanceState(instance, instance.model.state)
