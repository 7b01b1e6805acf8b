"""The way of one request's responses out of a model, for both kinds of models.

For: the response sender of a model, and the host side of this backend. Does not know: pb_utils. Invariant: exactly one
FINAL leaves, whatever the model does: after it every send is refused. (A request that the model drops without FINAL is
ended by the host, which sees that its factory was lost.) The lock makes sends of several threads follow one another.
Source: Triton's python backend response sender (its refusals are kept in meaning).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from llmbackend.core.backend_api import (
    ParameterValue,
    Request,
    Response,
    ResponseFactory,
    ResponseFlag,
    Tensor,
    TritonError,
)

_PREFIX = "Unable to send response. "


class Responder:
    """Owns the response factory of one request."""

    def __init__(self, request: Request, decoupled: bool) -> None:
        self._factory: ResponseFactory = request.response_factory()
        self._requested = frozenset(request.requested_outputs)
        self._decoupled = decoupled
        self._lock = threading.Lock()
        self._closed = False  # the model has said FINAL
        self._finished = False  # FINAL has left

    @property
    def is_cancelled(self) -> bool:
        return self._factory.is_cancelled

    @property
    def is_finished(self) -> bool:
        return self._finished

    def send(
        self,
        outputs: Sequence[Tensor],
        parameters: Mapping[str, ParameterValue],
        error: TritonError | None,
        flags: int,
    ) -> None:
        """One response with the outputs that the client asked for; the only one of a non-decoupled model is its last.

        Raises ValueError for a refused send.
        """
        with self._lock:
            self._check(flags)
            if self._finished:
                raise ValueError(f"{_PREFIX}Non-decoupled model cannot send more than one response.")
            response = self._factory.new_response()
            if error is None:
                for tensor in outputs:
                    if tensor.name in self._requested:
                        response.add_output(tensor)
            for name, value in parameters.items():
                response.set_parameter(name, value)
            self._closed = flags == ResponseFlag.FINAL
            self._finish(response, ResponseFlag(flags) if self._decoupled else ResponseFlag.FINAL, error)

    def send_flags(self, flags: int) -> None:
        """A completion without one more response. Raises ValueError for a refused send."""
        with self._lock:
            self._check(flags)
            if flags == ResponseFlag.NONE:
                raise ValueError("Inference Response object must be provided when the response flags is set to zero.")
            if not self._decoupled and not self._finished:
                raise ValueError(f"{_PREFIX}Non-decoupled model cannot send complete final before sending a response.")
            self._closed = True
            if not self._finished:
                self._finished = True
                try:
                    self._factory.send_flags(ResponseFlag.FINAL)
                finally:
                    self._factory.close()

    def fail(self, error: TritonError) -> None:
        """Ends the request with `error`, unless it is ended already."""
        with self._lock:
            self._closed = True
            if not self._finished:
                self._finish(self._factory.new_response(), ResponseFlag.FINAL, error)

    def _check(self, flags: int) -> None:
        if flags not in (ResponseFlag.NONE, ResponseFlag.FINAL):
            raise ValueError(f"{_PREFIX}Unsupported flag provided: {flags!r}.")
        if self._closed:
            raise ValueError(f"{_PREFIX}Response sender has been closed.")

    def _finish(self, response: Response, flag: ResponseFlag, error: TritonError | None) -> None:
        self._finished = flag is ResponseFlag.FINAL
        try:
            response.send(flag, error)
        finally:
            if self._finished:
                self._factory.close()
