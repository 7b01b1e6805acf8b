"""ModelInstanceState: an instance's way into its model's queue.

For: Execute, which must return at once. Does not know: the queue's inside, how outputs come back. Invariant: every
request given to `enqueue` is in the model's queue or on its way there, or answered and released when it returns. Name
and role are MindIE's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from llmbackend.core.backend_api import (
    ModelInstance,
    Request,
    ResponseFlag,
    TritonError,
    internal,
    unavailable,
)

from .conversion_pool import is_short
from .infer_task import InferTask
from .model_state import ModelState

logger = logging.getLogger(__name__)


class ModelInstanceState:
    """Owner of the instance's engine."""

    def __init__(self, model_state: ModelState, instance: ModelInstance) -> None:
        """Starts the instance's engine; returns when its model is loaded. Raises TritonError when it cannot."""
        self._model_state = model_state
        self._instance = instance
        self._engine = model_state.start_engine(instance)

    def enqueue(self, requests: Sequence[Request]) -> None:
        """Takes ownership of `requests`; one that cannot be served is answered, the others go on."""
        for request in requests:
            if self._model_state.schema.is_stop(request):
                self._stop(request)
                continue
            tasks = partial(self._tasks_of, request, time.monotonic_ns())
            if is_short(request):
                for task in tasks():
                    self._model_state.submit(task)
            else:
                self._model_state.convert_later(request, tasks, partial(self._refuse, request))

    def check_ready(self) -> None:
        """Raises TritonError UNAVAILABLE saying why the engine is not ready."""
        try:
            self._engine.manager.check_ready()
        except RuntimeError as error:
            raise unavailable(str(error)) from error

    def shutdown(self) -> None:
        self._model_state.stop_engine(self._engine)

    def _tasks_of(self, request: Request, exec_start_ns: int) -> Sequence[InferTask]:
        """None when the request cannot be served, and was answered."""
        converter = self._model_state.converter
        try:
            if converter is None:
                raise unavailable("no engine is running")
            return converter.convert(request, self._instance, exec_start_ns)
        except TritonError as error:
            self._refuse(request, error)
        except Exception as error:
            logger.exception("a request could not be converted")
            self._refuse(request, internal(f"the request could not be converted: {error}"))
        return ()

    def _stop(self, request: Request) -> None:
        """Ends its client's requests with this id; its answer is empty. Source: TensorRT-LLM's handleStopRequest."""
        if not request.id:
            self._refuse(request, internal("Trying to stop a request but request ID is not provided"))
            return
        self._model_state.stop_requests(request.id, request.tenant)
        start_ns = time.monotonic_ns()
        request.new_response().send(ResponseFlag.FINAL)
        self._instance.report_statistics(request, True, start_ns, start_ns, start_ns, time.monotonic_ns())
        request.release()

    def _refuse(self, request: Request, error: TritonError) -> None:
        request.new_response().send(ResponseFlag.FINAL, self._model_state.schema.client_error(error))
        self._instance.report_statistics(request, False, 0, 0, 0, 0)
        request.release()
