"""The `llm` backend as a Python-based backend of NVIDIA's Triton: the same adapter behind TritonPythonModel.

Used by Triton's stub, through the `model.py` written by install.py. Independent of tensors, text and engines.
Invariants: no failure here ends the stub; imports are light (no torch, transformers or gRPC) and come from the stub's
environment.
Source: python_backend's documentation; vllm_backend's model.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import triton_python_backend_utils as pb_utils
from tritonclient.grpc.model_config_pb2 import DataType

from llmbackend.core.backend_api import Backend, Model, ModelInstance, ResponseFlag, TritonError, internal, unavailable

from .. import backend as entry_points
from ..schemas import schema_for
from .host import (
    BackgroundPoller,
    Channel,
    TritonBackend,
    TritonInstance,
    TritonModel,
    TritonRequest,
    error_response,
    parse_config,
)

logger = logging.getLogger(__name__)

_LOGGER_NAME = "llmbackend"
NUMPY_2_IS_FINE = "LLMBACKEND_STUB_TAKES_NUMPY_2"
HEALTH_CHECK = "ENABLE_VLLM_HEALTH_CHECK"


class TritonPythonModel:
    """One instance of one model. Triton calls execute on one thread, and finalize after the last response.

    Calls the entry points of backend.py in the same order as a host. If a stub died, its streams in Triton would stay
    open forever. When `finalize` returns, the engine's process is reaped, every request answered, and no thread left.
    """

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        return complete_pb_utils_config(auto_complete_model_config)

    def initialize(self, arguments: Mapping[str, str]) -> None:
        """Returns when the engine has loaded its model. Raises an error with the reason if it cannot."""
        _check_numpy()
        self._log_handler = attach_log_handler()
        self._poller = BackgroundPoller()
        config = json.loads(arguments["model_config"])
        # Read here, so removed: the adapter would report that it has no effect.
        health_check = config.get("parameters", {}).pop(HEALTH_CHECK, {})
        self._unloads_when_unhealthy = health_check.get("string_value", "").lower() == "true"
        backend = TritonBackend(config.get("backend", "llm"), self._poller)
        model = TritonModel(backend, {**arguments, "model_config": json.dumps(config)})
        self._model = cast(Model, model)
        self._instance = cast(ModelInstance, TritonInstance(model, arguments))
        try:
            self._poller.start()
            entry_points.TRITONBACKEND_Initialize(cast(Backend, backend))
            entry_points.TRITONBACKEND_ModelInitialize(self._model)
            entry_points.TRITONBACKEND_ModelInstanceInitialize(self._instance)
        except Exception as error:
            self.finalize()  # Triton does not call it after a failed initialize
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: Sequence[Any]) -> None:
        """Takes over the requests and returns; responses are sent through the requests' senders."""
        taken: list[Any] = [request for request in map(self._take, requests) if request is not None]
        if self._unloads_when_unhealthy and not self._is_healthy():
            for request in taken:
                error = unavailable("Model is unavailable due to unhealthy vLLM engine")
                request.new_response().send(ResponseFlag.FINAL, error)
            return
        entry_points.TRITONBACKEND_ModelInstanceExecute(self._instance, taken)

    def finalize(self) -> None:
        """Ends the engine; unfinished requests are answered."""
        with self._logged("the end of the instance"):
            entry_points.TRITONBACKEND_ModelInstanceFinalize(self._instance)
        with self._logged("the end of the model"):
            entry_points.TRITONBACKEND_ModelFinalize(self._model)
        with self._logged("removing its metrics"):
            self._poller.stop()
        logger.info("model '%s' is finalised", self._model.name)
        detach_log_handler(self._log_handler)

    @contextlib.contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        """Logs a failure during finalisation, so that the remaining steps are still executed."""
        try:
            yield
        except Exception:
            logger.exception("model '%s': %s failed", self._model.name, what)

    def _take(self, request: Any) -> TritonRequest | None:
        """The request as the adapter sees it; None if it could not be read and has been answered with an error."""
        channel = Channel(request.get_response_sender())
        try:
            return TritonRequest(request, channel, self._poller.watch)
        except Exception as error:
            logger.exception("a request could not be read")
            known = error if isinstance(error, TritonError) else internal(f"the request could not be read: {error}")
            channel.send(error_response(known), ResponseFlag.FINAL)
            return None

    def _is_healthy(self) -> bool:
        """As in vllm_backend: if the engine is given up, Triton is asked to unload the model (which requires model
        control mode explicit)."""
        try:
            entry_points.TRITONBACKEND_ModelInstanceReady(self._instance)
        except TritonError as error:
            logger.error("the engine is not healthy and the model will be unloaded: %s", error)
            try:
                pb_utils.unload_model(self._model.name)  # returns immediately
            except Exception:
                logger.exception("the model could not be unloaded")
            return False
        return True


def _check_numpy() -> None:
    """A stub built for numpy 1 aborts under numpy 2 at the first string tensor; refuse to load instead."""
    if int(np.__version__.partition(".")[0]) >= 2 and os.environ.get(NUMPY_2_IS_FINE) != "1":
        raise pb_utils.TritonModelException(
            f"numpy {np.__version__} is in the stub's environment, and stubs of many Triton releases (24.10 is one) "
            f"abort at the first string with numpy 2: install 'numpy<2' there, or set {NUMPY_2_IS_FINE}=1 for a "
            "release whose stub takes it"
        )


class TritonLogHandler(logging.Handler):
    """Writes the adapter's log to Triton's. A line that cannot be written is dropped."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            if record.levelno >= logging.ERROR:
                pb_utils.Logger.log_error(text)
            elif record.levelno >= logging.WARNING:
                pb_utils.Logger.log_warn(text)
            elif record.levelno >= logging.INFO:
                pb_utils.Logger.log_info(text)
            else:
                pb_utils.Logger.log_verbose(text)
        except Exception:
            self.handleError(record)


def attach_log_handler() -> logging.Handler:
    """Sends all log lines of this package from INFO on to Triton's log, until `detach_log_handler`."""
    handler = TritonLogHandler()
    ours = logging.getLogger(_LOGGER_NAME)
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False
    return handler


def detach_log_handler(handler: logging.Handler) -> None:
    logging.getLogger(_LOGGER_NAME).removeHandler(handler)


def complete_pb_utils_config(model_config: Any) -> Any:
    """Completes a pb_utils.ModelConfig with what it does not declare. Runs in its own process before the load.

    Does not change anything that the user configured. Raises TritonError for a declared tensor that does not fit.
    """
    config = parse_config(model_config.as_dict())
    completed = schema_for(config).complete(config)
    declared = {tensor.name for tensor in (*config.input, *config.output)}
    for tensor in completed.input:
        if tensor.name not in declared:
            model_config.add_input(_described(tensor) | {"optional": tensor.optional})
    for tensor in completed.output:
        if tensor.name not in declared:
            model_config.add_output(_described(tensor))
    model_config.set_max_batch_size(completed.max_batch_size)
    if not config.HasField("model_transaction_policy"):
        decoupled = completed.model_transaction_policy.decoupled
        model_config.set_model_transaction_policy({"decoupled": decoupled})
    return model_config


def _described(tensor: Any) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": DataType.Name(tensor.data_type), "dims": list(tensor.dims)}
