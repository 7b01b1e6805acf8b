"""One TritonPythonModel object behind one model instance: initialize, execute, finalize.

For: backend.py. Does not know: wire protocols or schedulers. Invariant: every request of an Execute call is released
exactly once and ends with exactly one FINAL, whatever the model returns or raises; an error of the model is answered
here and never raised to the host, so that nothing is counted twice. BaseException is caught around calls into a model,
because sys.exit() there is an error of the model and not the end of a thread.
Source: Triton's python backend; statistics as transcript 09 shows them (an error response counts as success, a raise as
failure).
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from llmbackend.core.backend_api import ModelInstance, Request, TritonError, internal

from .config_json import config_to_json
from .coroutine_loop import CoroutineLoop
from .current_model import model_scope
from .error_text import exception_text
from .model_state import ModelState
from .pb_messages import InferenceRequest, InferenceResponse, send_through
from .pb_utils import TRITONSERVER_RESPONSE_COMPLETE_FINAL
from .responder import Responder

_log = logging.getLogger(__name__)


class _WrongReturnError(Exception):
    """execute returned something that Triton refuses; the text goes to the client as it is."""


class InstanceState:
    """Execute comes from the instance's own thread, one call at a time."""

    def __init__(self, instance: ModelInstance, model_state: ModelState) -> None:
        self._instance = instance
        self._model = instance.model
        config = self._model.config
        self._decoupled = config.model_transaction_policy.decoupled
        self._batches = config.max_batch_size > 0
        self._loop = CoroutineLoop(instance.name)
        self._python_model = model_state.new_python_model()
        self._initialize(config_to_json(config))

    def _initialize(self, config_json: str) -> None:
        initialize = getattr(self._python_model, "initialize", None)
        if initialize is None:
            return
        arguments = {
            "model_config": config_json,
            "model_instance_kind": self._instance.kind.value.removeprefix("KIND_"),
            "model_instance_name": self._instance.name,
            "model_instance_device_id": str(self._instance.device_id),
            "model_repository": str(self._model.directory),
            "model_version": str(self._model.version),
            "model_name": self._model.name,
        }
        try:
            with model_scope(self._model):
                initialize(arguments)
        except BaseException as error:
            raise internal(exception_text(error)) from error

    def finalize(self) -> None:
        """The model's own finalize may wait for requests in flight; afterwards its event loop ends."""
        finalize = getattr(self._python_model, "finalize", None)
        try:
            if finalize is not None:
                with model_scope(self._model):
                    finalize()
        except BaseException as error:
            _log.error("finalize of model '%s' failed: %s", self._model.name, exception_text(error))
        finally:
            self._loop.close()

    def execute(self, requests: Sequence[Request]) -> None:
        exec_start_ns = time.monotonic_ns()
        responders = [Responder(request, self._decoupled) for request in requests]
        given = [
            InferenceRequest.of(request, responder, self._model.name, self._model.version)
            for request, responder in zip(requests, responders, strict=True)
        ]
        compute_start_ns = time.monotonic_ns()
        responses, failure = self._run(given)
        compute_end_ns = time.monotonic_ns()
        # Counted before the answer leaves: who has an answer finds it in the statistics.
        self._account(requests, failure is None, (exec_start_ns, compute_start_ns, compute_end_ns, time.monotonic_ns()))
        for index, responder in enumerate(responders):
            self._answer(responder, responses[index] if responses else None, failure)
        for request in requests:
            request.release()

    def _run(self, given: list[InferenceRequest]) -> tuple[Sequence[InferenceResponse | None], TritonError | None]:
        """The responses to send (none for a decoupled model), or the error of the whole call."""
        try:
            with model_scope(self._model):
                returned = self._python_model.execute(given)
                if inspect.iscoroutine(returned):
                    returned = self._run_coroutine(returned, given)
            return self._checked(returned, given), None
        except BaseException as error:
            return (), self._execute_error(error)

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any], given: list[InferenceRequest]) -> Any:
        """A decoupled model's coroutine goes on after Execute; any other is waited for."""
        if not self._decoupled:
            return self._loop.run(coroutine)

        def on_error(error: BaseException) -> None:
            for request in given:
                request.responder.fail(self._execute_error(error))

        self._loop.start(coroutine, on_error)
        return None

    def _checked(self, returned: Any, given: list[InferenceRequest]) -> Sequence[InferenceResponse | None]:
        """Triton's checks on what execute returned."""
        if self._decoupled:
            if returned is not None:
                raise _WrongReturnError(
                    f"Python model '{self._instance.name}' is using the decoupled mode and the execute function "
                    "must return None."
                )
            return ()
        if returned is None and all(request.responder.is_finished for request in given):
            return ()
        if not isinstance(returned, list):
            raise _WrongReturnError(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(given):
            raise _WrongReturnError(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(given)}, and InferenceResponse(s) size is:{len(returned)}\n"
            )
        for request, response in zip(given, returned, strict=True):
            if not isinstance(response, InferenceResponse) and not (response is None and request.responder.is_finished):
                raise _WrongReturnError(
                    "Expected an 'InferenceResponse' object in the execute function return list, "
                    f"found type '{type(response)}'."
                )
        return returned

    def _execute_error(self, error: BaseException) -> TritonError:
        text = str(error) if isinstance(error, _WrongReturnError) else exception_text(error)
        return internal(f"Failed to process the request(s) for model '{self._instance.name}', message: {text}")

    def _answer(self, responder: Responder, response: InferenceResponse | None, failure: TritonError | None) -> None:
        """Sends what is due; a response that the host refuses becomes the error of its own request alone."""
        if failure is not None:
            responder.fail(failure)
        elif response is not None:
            try:
                send_through(responder, response, TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except TritonError as error:
                responder.fail(error)
            except ValueError as error:
                responder.fail(self._execute_error(error))

    def _account(self, requests: Sequence[Request], success: bool, times_ns: tuple[int, int, int, int]) -> None:
        batch_size = 0
        for request in requests:
            batch_size += self._batch_size(request)
            self._instance.report_statistics(request, success, *times_ns)
        self._instance.report_batch_statistics(batch_size, *times_ns)

    def _batch_size(self, request: Request) -> int:
        """The batch dimension of the request's inputs; 1 for a model that does not batch."""
        if not self._batches:
            return 1
        first = next(iter(request.inputs.values()), None)
        return first.shape[0] if first is not None and first.shape else 1
