"""The responses of one request: what its response sender and the end of `execute` may still send.

For: InferenceRequest and InferenceResponseSender, which share it, and the runner. Does not know: the host's objects, of
which it names one by number. Invariants: after FINAL nothing is sent; the host is told of the end exactly once, also
when the model drops the request, so that no client waits forever.
Source: Triton's response sender, and the texts of its refusals.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Container, Sequence

from .errors import TritonModelException
from .host_link import HostLink
from .pb_response import InferenceResponse

FINAL = 1
RELEASE_ALL, RELEASE_RESCHEDULE = 1, 2
_PREFIX = "Unable to send response. "


class Exchange:
    """Any thread may send."""

    __slots__ = (
        "_decoupled",
        "_is_cancelled",
        "_is_closed",
        "_is_over",
        "_link",
        "_lock",
        "_output_names",
        "number",
        "release_flags",
    )

    def __init__(
        self, link: HostLink, number: int, wanted: Sequence[str], states: frozenset[str], decoupled: bool
    ) -> None:
        self.number = number
        self.release_flags = RELEASE_ALL
        self._link = link
        self._output_names = states.union(wanted) if states else wanted
        self._decoupled = decoupled
        self._lock = threading.RLock()
        self._is_closed = False  # the model has sent FINAL
        self._is_cancelled = False  # set at the end
        self._is_over = False  # the host is told of the end, or the runner will tell it
        link.cancellations.begin(number)

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled or self._link.cancellations.is_requested(self.number)

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def output_names(self) -> Container[str]:
        """The outputs that the host takes: the client's, and the states of the request's sequence."""
        return self._output_names

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        """Raises TritonModelException for a refused send."""
        if flags not in (0, FINAL):
            raise TritonModelException(f"{_PREFIX}Unsupported flag provided.")
        if response is None and flags == 0:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        with self._lock:
            self._check(has_response=response is not None)
            self._is_closed = flags == FINAL
            if response is not None:
                is_last = self._is_closed or not self._decoupled
                self._post_response(response, is_last)
            elif not self._is_over:
                self._end()
                self._link.post(("final", self.number))

    def check_response(self) -> None:
        """Raises TritonModelException when a response that execute returned may not be sent."""
        with self._lock:
            self._check(has_response=True)

    def end_by_runner(self) -> None:
        """The runner tells the host of the end, if the model did not."""
        with self._lock:
            self._is_closed = True
            if not self._is_over:
                self._end()

    def fail(self, text: str) -> None:
        """Ends the request with an error of the model's code, unless it is over."""
        with self._lock:
            self._is_closed = True
            if not self._is_over:
                self._end()
                self._link.post(("failed", self.number, text))

    def _check(self, *, has_response: bool) -> None:
        if self._is_closed:
            raise TritonModelException(f"{_PREFIX}Response sender has been closed.")
        if self._decoupled:
            return
        if has_response and self._is_over:
            raise TritonModelException(f"{_PREFIX}Non-decoupled model cannot send more than one response.")
        if not has_response and not self._is_over:
            raise TritonModelException(
                f"{_PREFIX}Non-decoupled model cannot send complete final before sending a response."
            )

    def _post_response(self, response: InferenceResponse, is_last: bool) -> None:
        parts: list[object] = []
        packed = response._pack(self._output_names, parts)
        if is_last:
            self._end()
        self._link.post(("response", self.number, packed, is_last), parts)

    def _end(self) -> None:
        self._is_over = True
        self._is_cancelled = self._link.cancellations.end(self.number)

    def __del__(self) -> None:
        if not getattr(self, "_is_over", True):
            self._end()
            with contextlib.suppress(OSError):
                self._link.post(("dropped", self.number))


class InferenceResponseSender:
    """Sends the responses of one request, from any thread: `send(response, flags)` or `send(flags=flags)`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"send takes an InferenceResponse, got {type(response).__name__}")
        self._exchange.send(response, flags)

    def is_cancelled(self) -> bool:
        return self._exchange.is_cancelled
