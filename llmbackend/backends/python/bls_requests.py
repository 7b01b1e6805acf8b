"""The inferences that one stub process runs on other models (BLS), on the host's side.

For: StubServices. Does not know: what the model does with responses. Invariants: every call that a stub starts gets its
last answer, however it ends; when the stub has ended, its calls are cancelled and their further answers dropped;
nothing here blocks, because responses come on other models' threads.
Source: python_backend's request executor; its texts for a model that is not ready and for a decoupled one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from llmbackend.core.backend_api import (
    InferenceHandle,
    InferenceRequest,
    InferenceResponse,
    Model,
    RequestFlag,
    RequestTrace,
    ResponseFlag,
    Tenant,
    TritonError,
    internal,
)

from .stub_process import Outbox
from .wire_messages import pack_error, pack_response, unpack_tensor


class BlsRequests:
    """`start`, `cancel` and `cancel_all` come from the thread of the stub's messages."""

    def __init__(self, model: Model, outbox: Outbox) -> None:
        self._model = model
        self._outbox = outbox
        self._lock = threading.Lock()
        self._handles: dict[int, InferenceHandle | None] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def start(
        self,
        number: int,
        is_stream: bool,
        fields: dict[str, Any],
        parts: Sequence[Any],
        trace: RequestTrace | None,
        tenant: Tenant,
    ) -> None:
        with self._lock:
            self._handles[number] = None
        try:
            self._check(fields["model"], is_stream)
            handle = self._model.infer_async(_request(fields, parts, trace, tenant), partial(self._answer, number))
        except TritonError as error:
            self._end(number, ([], {}, pack_error(error)))
            return
        with self._lock:
            if number in self._handles:  # else it has ended already
                self._handles[number] = handle

    def cancel(self, number: int) -> None:
        with self._lock:
            handle = self._handles.get(number)
        if handle is not None:
            handle.cancel()

    def cancel_all(self) -> None:
        """The stub has ended."""
        with self._lock:
            handles = list(self._handles.values())
        for handle in handles:
            if handle is not None:
                handle.cancel()

    def _check(self, model: tuple[str, int], is_stream: bool) -> None:
        name, version = model
        try:
            is_decoupled = self._model.is_decoupled(name, version)
        except TritonError:
            raise internal(f"Failed for execute the inference request. Model '{name}' is not ready.") from None
        if is_decoupled and not is_stream:
            raise internal(
                f"Model {name} is using the decoupled. The current BLS request call doesn't support models using the "
                "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' "
                "calls for decoupled models.'"
            )

    def _answer(self, number: int, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        parts: list[Any] = []
        packed = None if response is None else pack_response(response, parts)
        if flags & ResponseFlag.FINAL:
            self._end(number, packed, parts)
        else:
            self._outbox.post(("answer", number, packed, False), parts)

    def _end(self, number: int, packed: Any, parts: Sequence[Any] = ()) -> None:
        with self._lock:
            del self._handles[number]
        self._outbox.post(("answer", number, packed, True), parts)


def _request(
    fields: dict[str, Any], parts: Sequence[Any], trace: RequestTrace | None, tenant: Tenant
) -> InferenceRequest:
    name, version = fields["model"]
    return InferenceRequest(
        model_name=name,
        inputs=tuple(unpack_tensor(tensor, parts) for tensor in fields["inputs"]),
        model_version=version,
        id=fields["id"],
        requested_outputs=tuple(fields["outputs"]),
        parameters=fields["parameters"],
        correlation_id=fields["correlation_id"],
        flags=RequestFlag(fields["flags"]),
        timeout_us=fields["timeout_us"],
        trace=trace,
        tenant=tenant,
    )
