"""The record of a resumable stream: all that another host needs to make it again, with the same events.

For: the frontends that make resumable streams, and their copies on other hosts. Does not know: what a request or a
delta says. Invariants: a record grows only; its deltas have the order in which their events were made; of two records
of one stream that with the higher epoch counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
from starlette.requests import Request

from llmbackend.core.messages import Resume

RECORDING: Final = "llmbackend.stream_recording"
"""Key of a request's scope for the Recording of the stream that it begins."""
StreamDelta = tuple[int, bytes]
"""(index of the inference among those of the stream, delta of one of its responses)"""


class StreamHead(msgspec.Struct, frozen=True, kw_only=True):
    """How a stream began."""

    key: str
    """Its name."""
    epoch: int = 0
    """How often it was taken up by another host."""
    owner: str = ""
    """Its API key, as `current_owner` names it; "" where there are none."""
    path: str
    """Of the requests that may come back to it."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    request: bytes = b""
    """The body of the request that began it."""
    identity: bytes = b""
    """What was drawn for it (ids, times): known to its endpoint alone."""


class StreamRecord(msgspec.Struct, frozen=True):
    """A stream so far."""

    head: StreamHead
    deltas: tuple[StreamDelta, ...] = ()

    @property
    def size_bytes(self) -> int:
        return len(self.head.request) + sum(len(delta) for _, delta in self.deltas)


class Recording:
    """The record of one stream, as its endpoint writes it. Used on the event loop alone.

    An endpoint that begins a stream, or makes one again, asks it for `identity` and `resume`, tells it each `delta` as
    it reads responses, and reads the responses of several inferences in the order of `takes`.
    """

    def __init__(self, known: StreamRecord | None = None) -> None:
        """known: of the stream that is made again."""
        self.known = known
        self.identity = b"" if known is None else known.head.identity
        """To be set by the endpoint of a new stream."""
        self.request = b""
        """To be set by the endpoint of a new stream."""
        self.opened: Callable[[], None] = lambda: None
        """Called when its stream may be come back to."""
        self._order = deque(() if known is None else (index for index, _ in known.deltas))
        self._new: list[StreamDelta] = []

    @classmethod
    def of(cls, http: Request) -> Recording | None:
        """Of the stream that the request begins; None where nothing is recorded."""
        return http.scope.get(RECORDING)

    @property
    def num_known(self) -> int:
        return 0 if self.known is None else len(self.known.deltas)

    def resume(self, index: int) -> Resume:
        """For the inference with this index."""
        deltas = () if self.known is None else self.known.deltas
        return Resume(tuple([delta for one, delta in deltas if one == index]), replays=True)

    def takes(self, index: int) -> bool:
        """Whether the next response to be read may be one of this inference."""
        return not self._order or self._order[0] == index

    def delta(self, index: int, delta: bytes) -> None:
        """A response of this inference was read. delta: b"" where it has none."""
        if self._order:
            self._order.popleft()
        if delta:
            self._new.append((index, delta))

    def take_new(self) -> tuple[StreamDelta, ...]:
        """Deltas since the last call."""
        new, self._new = tuple(self._new), []
        return new
