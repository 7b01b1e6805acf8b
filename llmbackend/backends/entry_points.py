"""The entry points that are the same for every backend whose model and instance states end with their last reference.

For: the pytorch and onnxruntime backends, which export them beside their own. Does not know: what the states are.
Invariant: Finalize accepts a state that is None.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmbackend.core.backend_api import Backend, Model, ModelInstance, Request, check_api_version


def TRITONBACKEND_Initialize(backend: Backend) -> None:
    check_api_version(backend)


def TRITONBACKEND_ModelFinalize(model: Model) -> None:
    model.state = None


def TRITONBACKEND_ModelInstanceExecute(instance: ModelInstance, requests: Sequence[Request]) -> None:
    instance.state.execute(requests)


def TRITONBACKEND_ModelInstanceFinalize(instance: ModelInstance) -> None:
    instance.state = None
