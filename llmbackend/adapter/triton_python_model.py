"""The `llm` backend as a python-based backend of NVIDIA's own server: the same adapter behind TritonPythonModel.

For: Triton's stub, which imports it through the `model.py` that `llmbackend install-triton-backend` writes. Does not
know: tensors, text, engines; it calls the entry points of backend.py in the order in which a host calls them.
Invariants: nothing that fails here ends the stub, whose death would hang every stream in Triton for ever; `finalize`
returns when the engine's process is reaped, every request is answered and no thread of ours is left; imports stay
light (no torch, no transformers, no gRPC), because they are those of the stub's environment.
Source: python_backend's documentation; the life of vllm_backend's model.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import triton_python_backend_utils as pb_utils

from llmbackend.core.backend_api import Model, ModelInstance, ResponseFlag, TritonError, internal, unavailable

from . import backend as entry_points
from .inside_triton import log_handler
from .inside_triton.channel import Channel
from .inside_triton.chores import Chores
from .inside_triton.complete_config import complete
from .inside_triton.host import TritonBackend, TritonInstance, TritonModel
from .inside_triton.requests import TritonRequest, error_response

logger = logging.getLogger(__name__)

NUMPY_2_IS_FINE = "LLMBACKEND_STUB_TAKES_NUMPY_2"
HEALTH_CHECK = "ENABLE_VLLM_HEALTH_CHECK"


class TritonPythonModel:
    """One instance of one model. Triton calls execute on one thread, and finalize after the last response."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        return complete(auto_complete_model_config)

    def initialize(self, arguments: Mapping[str, str]) -> None:
        """Returns when the engine has loaded its model. Raises with the reason when it cannot."""
        _check_numpy()
        self._log_handler = log_handler.attach()
        self._chores = Chores()
        backend_name = json.loads(arguments["model_config"]).get("backend", "llm")
        self._backend = TritonBackend(backend_name, Path(__file__).parent, self._chores)
        model = TritonModel(self._backend, arguments)
        # The part of the contract that this backend uses; the rest (models that ask other models, states) is not there.
        self._model = cast(Model, model)
        self._instance = cast(ModelInstance, TritonInstance(model, arguments))
        self._unloads_when_unhealthy = _flag(self._model, HEALTH_CHECK)
        try:
            self._chores.start()
            entry_points.TRITONBACKEND_Initialize(self._backend)
            entry_points.TRITONBACKEND_ModelInitialize(self._model)
            entry_points.TRITONBACKEND_ModelInstanceInitialize(self._instance)
        except Exception as error:
            self.finalize()  # Triton does not, after a failed initialize
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: Sequence[Any]) -> None:
        """Takes the requests and returns; their responses come through their senders."""
        taken: list[Any] = [request for request in map(self._take, requests) if request is not None]
        if self._unloads_when_unhealthy and not self._is_healthy():
            for request in taken:
                error = unavailable("Model is unavailable due to unhealthy vLLM engine")
                request.new_response().send(ResponseFlag.FINAL, error)
            return
        entry_points.TRITONBACKEND_ModelInstanceExecute(self._instance, taken)

    def finalize(self) -> None:
        """Ends the engine; whatever is not finished is answered."""
        with self._logged("the end of the instance"):
            entry_points.TRITONBACKEND_ModelInstanceFinalize(self._instance)
        with self._logged("the end of the model"):
            entry_points.TRITONBACKEND_ModelFinalize(self._model)
        with self._logged("giving its metrics back"):
            self._chores.stop()
        logger.info("model '%s' is finalised", self._model.name)
        log_handler.detach(self._log_handler)

    @contextlib.contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        """What fails on the way out must not keep the rest from happening."""
        try:
            yield
        except Exception:
            logger.exception("model '%s': %s failed", self._model.name, what)

    def _take(self, request: Any) -> TritonRequest | None:
        """The request as the adapter knows one; None when it could not be read, and was answered."""
        channel = Channel(request.get_response_sender())
        try:
            return TritonRequest(request, channel, self._chores.watch)
        except Exception as error:
            logger.exception("a request could not be read")
            known = error if isinstance(error, TritonError) else internal(f"the request could not be read: {error}")
            channel.send(error_response(known), ResponseFlag.FINAL)
            return None

    def _is_healthy(self) -> bool:
        """As vllm_backend: an engine that is given up has Triton unload the model (which needs the model control mode
        explicit)."""
        try:
            entry_points.TRITONBACKEND_ModelInstanceReady(self._instance)
        except TritonError as error:
            logger.error("the engine is not healthy and the model will be unloaded: %s", error)
            try:
                pb_utils.unload_model(self._model.name)  # does not wait
            except Exception:
                logger.exception("the model could not be unloaded")
            return False
        return True


def _flag(model: Model, name: str) -> bool:
    parameters = model.config.parameters
    return name in parameters and parameters[name].string_value.lower() == "true"


def _check_numpy() -> None:
    """numpy 2 under a stub that was built for numpy 1 aborts it at the first string tensor, long after the model was
    loaded: better said at once."""
    if int(np.__version__.partition(".")[0]) >= 2 and os.environ.get(NUMPY_2_IS_FINE) != "1":
        raise pb_utils.TritonModelException(
            f"numpy {np.__version__} is in the stub's environment, and stubs of many Triton releases (24.10 is one) "
            f"abort at the first string with numpy 2: install 'numpy<2' there, or set {NUMPY_2_IS_FINE}=1 for a "
            "release whose stub takes it"
        )
