"""What happens to a response between a model and its client's callback.

For: the host's features that look at or change responses (shared memory, classification, reshape, time to the first
response). Does not know: any of them. Invariants: every call of the callback in front is one call of the one behind,
with the same flags; a response that a step can not make is an error in its place, and harms no other.
"""

from __future__ import annotations

from collections.abc import Callable

from llmbackend.core.backend_api import ResponseFlag, is_final
from llmbackend.core.errors import TritonError
from llmbackend.core.messages import InferenceResponse, ResponseCallback

Step = Callable[[InferenceResponse], InferenceResponse]
"""Makes a response without an error from one. May raise TritonError."""


def nothing() -> None:
    """For a delivery that owns nothing."""


class Delivery:
    """A response callback: passes responses through `step`, then on to `callback`. `on_final` is called before the last
    one is passed on, so that who has seen it also sees what belonged to the request given back."""

    __slots__ = ("_callback", "_on_final", "_step")

    def __init__(self, callback: ResponseCallback, step: Step, on_final: Callable[[], None] = nothing) -> None:
        self._callback = callback
        self._step = step
        self._on_final = on_final

    def __call__(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        if response is not None and response.error is None:
            response = self._made(response)
        if is_final(flags):
            self._on_final()
        self._callback(response, flags)

    def _made(self, response: InferenceResponse) -> InferenceResponse:
        try:
            return self._step(response)
        except TritonError as error:
            # A fresh error: the traceback of the given one holds frames, and they hold the request.
            fresh = TritonError(error.message, error.code)
            return InferenceResponse(response.model_name, response.model_version, response.request_id, error=fresh)
