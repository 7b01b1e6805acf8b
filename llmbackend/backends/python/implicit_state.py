"""Implicit state of a sequence: outputs of a model that the host keeps for its next request.

For: the responders of requests. Does not know: sequences, the model. Invariant: the state is set before the response
leaves, so that a client's next request finds it.
Source: TRITONBACKEND_StateNew and StateUpdate. Ours: Triton's python backend hands states to a model as inputs, but
takes none from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmbackend.core.backend_api import ModelConfig, Request, Tensor, TritonError


def state_outputs(config: ModelConfig) -> frozenset[str]:
    """The names of the outputs that are states."""
    return frozenset(state.output_name for state in config.sequence_batching.state)


class StateOutputs:
    """Those of one request."""

    def __init__(self, request: Request, names: frozenset[str]) -> None:
        self._request = request
        self._names = names
        self._asked_for = frozenset(request.requested_outputs)

    def take_out(
        self, outputs: Sequence[Tensor], error: TritonError | None
    ) -> tuple[Sequence[Tensor], TritonError | None]:
        """Sets the states among the outputs. What is left for the client; or, where a state can not be set (the
        request was released, as when a decoupled model answers late), the error."""
        try:
            for tensor in outputs:
                if tensor.name in self._names:
                    self._request.new_state(tensor).update()
        except TritonError as problem:
            return (), error or problem
        return [tensor for tensor in outputs if tensor.name not in self._names or tensor.name in self._asked_for], error
