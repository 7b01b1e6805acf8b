"""The `pytorch` backend's entry points, nothing else.

For: the host, which finds them by name. Does not know: how a program is run. Invariant: Finalize accepts a state that
is None.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmbackend.core.backend_api import Backend, Model, ModelInstance, Request, check_api_version

from .instance_state import InstanceState
from .model_state import ModelState


def TRITONBACKEND_Initialize(backend: Backend) -> None:
    check_api_version(backend)


def TRITONBACKEND_ModelInitialize(model: Model) -> None:
    model.state = ModelState(model)


def TRITONBACKEND_ModelFinalize(model: Model) -> None:
    model.state = None


def TRITONBACKEND_ModelInstanceInitialize(instance: ModelInstance) -> None:
    instance.state = InstanceState(instance, instance.model.state)


def TRITONBACKEND_ModelInstanceExecute(instance: ModelInstance, requests: Sequence[Request]) -> None:
    instance.state.execute(requests)


def TRITONBACKEND_ModelInstanceFinalize(instance: ModelInstance) -> None:
    instance.state = None
