"""The body of a response that goes straight to its connection, without the ASGI application's task.

For: event streams, whose pieces are made where tokens arrive. Does not know: what the bytes mean. Invariants: the bytes
on the wire are those of the same piece sent as an ASGI message; nothing is written before the head, after the end, to a
client that is behind or gone, or while the application's task may send. It relies on there being nothing between the
application and the connection that changes a body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_DIRECT_BODY: Final = "llmbackend.direct_body"
"""Key of the scope; absent under another ASGI server."""


class DirectBody:
    """Of one request. Used on the event loop alone."""

    __slots__ = ("_cycle", "_flow")

    def __init__(self, cycle: RequestResponseCycle, flow: FlowControl) -> None:
        self._cycle = cycle
        self._flow = flow

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> DirectBody | None:
        return scope.get(_DIRECT_BODY)

    def put_into(self, scope: Any) -> None:
        scope[_DIRECT_BODY] = self

    @staticmethod
    def take_out_of(scope: Any) -> None:
        """For an application whose messages go elsewhere than to the connection."""
        scope.pop(_DIRECT_BODY, None)

    @property
    def is_open(self) -> bool:
        """Whether a piece may be written now: the head has been sent, of a response in chunks, and the client keeps
        up."""
        cycle = self._cycle
        return not (
            self._flow.write_paused or not cycle.chunked_encoding or cycle.disconnected or cycle.response_complete
        )

    def write(self, piece: bytes) -> None:
        """One chunk, not empty; only while `is_open`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
