"""The way of one request's responses to its client, on the host's side.

For: the messages of a stub process, and the end of an execute call. Does not know: what the model did (its Exchange in
the stub refuses what a model may not do). Invariant: at most one FINAL leaves, and nothing after it; a request that is
abandoned without FINAL is ended by the host, which sees that its factory is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from llmbackend.core.backend_api import (
    ParameterValue,
    Request,
    ResponseFactory,
    ResponseFlag,
    Tensor,
    TritonError,
)

from .implicit_state import StateOutputs


class Responder:
    """Owns the response factory of one request. Any thread."""

    def __init__(self, request: Request, states: frozenset[str] = frozenset()) -> None:
        self._factory: ResponseFactory = request.response_factory()
        self.trace = request.trace
        self.tenant = request.tenant
        self._states = StateOutputs(request, states) if states else None
        self._lock = threading.Lock()
        self._is_over = False

    def send(
        self,
        outputs: Sequence[Tensor],
        parameters: Mapping[str, ParameterValue],
        error: TritonError | None,
        *,
        is_last: bool,
    ) -> None:
        """Does nothing when the request is over."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = is_last
            if self._states is not None:
                outputs, error = self._states.take_out(outputs, error)
            try:
                response = self._factory.new_response()
                for tensor in outputs:
                    response.add_output(tensor)
                for name, value in parameters.items():
                    response.set_parameter(name, value)
                response.send(ResponseFlag.FINAL if is_last else ResponseFlag.NONE, error)
            finally:
                if is_last:
                    self._factory.close()

    def fail(self, error: TritonError) -> None:
        """Ends the request with `error`, unless it is over."""
        self.send((), {}, error, is_last=True)

    def finish(self) -> None:
        """FINAL without one more response."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                try:
                    self._factory.send_flags(ResponseFlag.FINAL)
                finally:
                    self._factory.close()

    def abandon(self) -> None:
        """Gives the factory back, whether or not the client has its FINAL."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                self._factory.close()
