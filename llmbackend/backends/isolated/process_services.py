"""The host's services for one process of an isolated library: performs the calls that the library makes on the host's
objects.

Invariants: a request is released once and gets one FINAL, from the library or, if the process has ended, from
`abandon`; until the release the host's Request is used, afterwards a factory. Nothing slow runs on the message thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from llmbackend.backends.python.stub_services import ChildServices, ModelMetrics
from llmbackend.backends.python.wire_messages import (
    not_healthy,
    pack_request,
    pack_response,
    unpack_error,
    unpack_response,
    unpack_tenant,
    unpack_tensor,
)
from llmbackend.core.backend_api import (
    InferenceRequest,
    InferenceResponse,
    Model,
    ModelConfig,
    ModelInstance,
    RawTensor,
    ReleaseFlag,
    Request,
    RequestFlag,
    ResponseFactory,
    ResponseFlag,
    Tensor,
    TritonError,
    internal,
)

log = logging.getLogger(__name__)
library_log = logging.getLogger("llmbackend.backends.isolated.library")


def log_level() -> int:
    """The level below which a process need not send log records."""
    return library_log.getEffectiveLevel()


class OpenRequest:
    """A request that the process has, or has released while factories of it are open. Used by one thread at a time."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.is_reported = False
        self._factory: ResponseFactory | None = None
        self._is_released = False
        self._is_final = False

    @property
    def factory(self) -> ResponseFactory:
        if self._factory is None:
            self._factory = self.request.response_factory()
        return self._factory

    def send(self, packed: Any, flags: int, parts: Sequence[Any]) -> None:
        outputs, parameters, error = unpack_response(packed, parts)
        response = (self._factory or self.request).new_response()
        for tensor in outputs:
            response.add_output(tensor)
        for name, value in parameters.items():
            response.set_parameter(name, value)
        self._is_final = self._is_final or bool(flags & ResponseFlag.FINAL)
        response.send(ResponseFlag(flags), error)

    def send_flags(self, flags: int) -> None:
        self._is_final = self._is_final or bool(flags & ResponseFlag.FINAL)
        self.factory.send_flags(ResponseFlag(flags))

    def release(self, *, keeps_factory: bool) -> None:
        if keeps_factory:
            _ = self.factory
        self._is_released = True
        self.request.release()

    def close(self) -> None:
        if self._factory is not None:
            self._factory.close()

    def fail(self, error: TritonError, instance: ModelInstance) -> None:
        """Called when the process has ended."""
        if not self._is_final:
            (self._factory or self.request).new_response().send(ResponseFlag.FINAL, error)
        if not self._is_released:
            if not self.is_reported:
                instance.report_statistics(self.request, False, 0, 0, 0, 0)
            self.request.release()
        self.close()


class ProcessServices(ChildServices):
    """The host's services for a process of an isolated library.

    model: None for the process that only reports the backend's attributes
    instance: set before the first Execute
    """

    def __init__(self, model: Model | None, metrics: ModelMetrics) -> None:
        super().__init__(model, library_log, _pack_response)
        self.instance: ModelInstance
        self._open: dict[int, OpenRequest] = {}
        self._questions = {
            "reschedule": self._reschedule,
            "metric_family": metrics.open_family,
            "metric_open": metrics.open,
            "metric_value": metrics.value,
            "metric_change": metrics.change,
            "check_state": self._check_state,
        }
        self._slow_questions = {}
        if model is not None:
            self._slow_questions = {
                "set_config": partial(_set_config, model),
                "is_decoupled": model.is_decoupled,
                "is_model_ready": model.is_model_ready,
                "load_model": model.load_model,
                "unload_model": model.unload_model,
            }

    def open(self, requests: Sequence[Request]) -> tuple[list[int], list[Any], list[Any]]:
        """The ids of the requests in the process, and the packed requests with the parts of their tensors."""
        parts: list[Any] = []
        numbers = [next(self._numbers) for _ in requests]
        packed = [pack_request(request, number, parts) for request, number in zip(requests, numbers, strict=True)]
        with self._lock:
            self._open.update(zip(numbers, map(OpenRequest, requests), strict=True))
        if self.is_abandoned:
            self._fail_all(not_healthy(self.process.name, self.process.cause))
        for number, request in zip(numbers, requests, strict=True):
            request.on_cancel(partial(self.process.outbox.post, ("cancel", number)))
        return numbers, packed, parts

    def give_back(self, numbers: Sequence[int]) -> None:
        """Called when Execute has failed: the host owns its requests again."""
        for number in numbers:
            if (taken := self._take(number)) is not None:
                taken.close()

    def _fail_all(self, error: TritonError) -> None:
        with self._lock:
            left = list(self._open.values())
            self._open.clear()
        for request in left:
            try:
                request.fail(error, self.instance)
            except TritonError as problem:
                log.error("a request of '%s' could not be ended: %s", self.process.name, problem.status)

    def _get(self, number: int) -> OpenRequest:
        """Raises TritonError if the library uses a request that it no longer owns."""
        with self._lock:
            opened = self._open.get(number)
        if opened is None:
            raise internal("the request is no longer the backend's")
        return opened

    def _take(self, number: int) -> OpenRequest | None:
        with self._lock:
            return self._open.pop(number, None)

    # --- messages of the process --------------------------------------------------------------------------------------

    def _on_response(self, number: int, packed: Any, flags: int, parts: Sequence[Any]) -> None:
        self._get(number).send(packed, flags, parts)

    def _on_flags(self, number: int, flags: int) -> None:
        self._get(number).send_flags(flags)

    def _on_state(self, number: int, packed: Any, parts: Sequence[Any]) -> None:
        self._get(number).request.new_state(unpack_tensor(packed, parts)).update()

    def _check_state(self, number: int, name: str) -> None:
        self._get(number).request.new_state(Tensor(name, "UINT8", (0,), np.empty(0, np.uint8)))

    def _on_release(self, number: int, keeps_factory: bool) -> None:
        self._get(number).release(keeps_factory=keeps_factory)

    def _on_closed(self, number: int) -> None:
        """Called when the request is released and the library has no factory of it."""
        if (taken := self._take(number)) is not None:
            taken.close()

    def _reschedule(self, number: int) -> None:
        self._get(number).request.release(ReleaseFlag.RESCHEDULE)
        self.give_back((number,))

    def _on_statistics(self, number: int, success: bool, *times_ns: int) -> None:
        opened = self._get(number)
        opened.is_reported = True
        self.instance.report_statistics(opened.request, success, *times_ns)

    def _on_batch_statistics(self, batch_size: int, *times_ns: int) -> None:
        self.instance.report_batch_statistics(batch_size, *times_ns)

    def _on_response_statistics(self, number: int, start: int, output_start: int, end: int, error: Any) -> None:
        opened = self._get(number)
        self.instance.report_response_statistics(opened.factory, start, output_start, end, unpack_error(error))

    def _on_infer(self, number: int, fields: dict[str, Any], parts: Sequence[Any]) -> None:
        parent = self._open.get(fields.pop("parent"))  # the request whose trace the library passed on
        inputs: Sequence[tuple[str, str, tuple[int, ...], int]] = fields.pop("inputs")
        request = InferenceRequest(
            inputs=tuple(RawTensor(name, datatype, shape, parts[part]) for name, datatype, shape, part in inputs),
            flags=RequestFlag(fields.pop("flags")),
            tenant=unpack_tenant(fields.pop("tenant")),
            trace=None if parent is None else parent.request.trace,
            **fields,
        )
        self._bls.start(number, request)


def _set_config(model: Model, serialized: bytes) -> bytes:
    """The model's configuration after the library has completed it."""
    model.set_config(ModelConfig.FromString(serialized))
    return bytes(model.config.SerializeToString())


def _pack_response(response: InferenceResponse, parts: list[Any]) -> tuple[Any, ...]:
    return pack_response(response, parts), response.model_name, response.model_version, response.request_id
