"""One request's responses on their way to its client, and the states of its sequence that are among them.

For: the messages of a stub process, and the end of an execute call. Does not know: what the model did (its Exchange in
the stub refuses what a model may not do). Invariants: at most one FINAL is sent, and nothing after it; the host ends a
request whose factory is closed without FINAL.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from llmbackend.core.backend_api import (
    ModelConfig,
    ParameterValue,
    Request,
    ResponseFactory,
    ResponseFlag,
    Tensor,
    TritonError,
)


def state_outputs(config: ModelConfig) -> frozenset[str]:
    """The names of the outputs that are states."""
    return frozenset(state.output_name for state in config.sequence_batching.state)


class StateOutputs:
    """The outputs of one request that are states of its sequence."""

    def __init__(self, request: Request, names: frozenset[str]) -> None:
        self._request = request
        self._names = names
        self._asked_for = frozenset(request.requested_outputs)

    def take_out(
        self, outputs: Sequence[Tensor], error: TritonError | None
    ) -> tuple[Sequence[Tensor], TritonError | None]:
        """Sets the states among the outputs. Returns the outputs for the client, and `error`; or, where a state cannot
        be set because the request was released (a decoupled model may answer late), that error."""
        try:
            for tensor in outputs:
                if tensor.name in self._names:
                    self._request.new_state(tensor).update()
        except TritonError as problem:
            return (), error or problem
        return [tensor for tensor in outputs if tensor.name not in self._names or tensor.name in self._asked_for], error


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
        """Sends FINAL without a response."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                try:
                    self._factory.send_flags(ResponseFlag.FINAL)
                finally:
                    self._factory.close()

    def abandon(self) -> None:
        """Closes the factory, whether or not the client has its FINAL."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                self._factory.close()
