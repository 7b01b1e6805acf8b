"""One HTTP connection, with the limits that uvicorn's own protocol lacks.

For: the HTTP endpoints. Does not know: what is served. Invariants: a connection that makes no progress ends, in each
of its states (header, body, a response that the client does not take, silence between requests); what it can make the
server hold is bounded; a request whose client is gone is told so, pipelined or not; a connection costs no timer while
its response runs, and an endpoint without connections none at all.

uvicorn pauses `send` while more than the transport's high-water mark (64 KiB) waits for the client, and stops reading
a body past 64 KiB until the application asks for more; so beside these marks a connection holds one chunk at a time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .client_presence import PRESENCE, ClientPresence
from .connections import Place
from .http_refusals import STOPPING, refusal_bytes, refusing
from .http_writes import HeadJoined
from .limits import HttpLimits

log = logging.getLogger(__name__)

_MAX_FRAMING_BYTES: Final = 1 << 20
"""Of one body: what is not content (chunk sizes, chunk extensions, trailers). 64 MiB in chunks of 1 KiB take half."""
_MAX_DISCARDED_BYTES: Final = 64 << 20
"""Of a body whose request was answered before it was read: the rest is thrown away, up to here."""
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: close at once, with a reset."""
_CROWDED_HEADER_TIMEOUT_S: Final = 2.0
"""A connection beyond the limit has so long to say what it wants, so that it can be refused in that protocol."""


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol within `limits`."""

    def __init__(self, limits: HttpLimits, place: Place, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._place = place
        self._clock = _Clock(self.loop)
        self._write_clock = _Clock(self.loop)
        self._receiving: str | None = "header"
        """Which part of a request is on its way; None between requests and once one is whole."""
        self._framing_bytes = 0
        self._discarded_bytes = 0
        self._piece_bytes = 0
        self._progress_s = 0.0
        self._body_began_s = 0.0
        self._body_bytes = 0
        self._unsent_bytes = 0
        self._running: RequestResponseCycle | None = None
        self._closes_when_received = False

    # --- connection -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._presence = ClientPresence()
        timeout_s = _CROWDED_HEADER_TIMEOUT_S if self._place.refusal else self._limits.header_timeout_s
        self._clock.start(timeout_s, self._header_timed_out)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._place.leave()
        self._unset_keepalive_if_required()
        self._clock.stop()
        self._write_clock.stop()
        running, self._running = self._running, None
        if running is not None and not running.response_complete:  # uvicorn tells the newest request alone
            running.disconnected = True
            running.message_event.set()
        self._presence.lost()
        self.pipeline.clear()

    # --- receiving --------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._piece_bytes = len(data)
        self._framing_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        receiving = self._receiving
        if receiving is None:
            if self.timeout_keep_alive_task is None and not self._is_busy:
                self._await_header()  # bytes that begin no request
            else:
                self._clock.stop()
        elif receiving == "header":
            self._await_header()
            if self._framing_bytes > self._limits.max_header_bytes + self._limits.max_url_bytes:
                self._end(431, "the request's header is too large")
        else:
            self._clock.start_once(self._limits.body_timeout_s, self._body_looked_at)
            if self._framing_bytes > _MAX_FRAMING_BYTES or self._discarded_bytes > _MAX_DISCARDED_BYTES:
                self._end(413, "the request's body has too much around or behind it")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._receiving = "header"
        self._framing_bytes = self._piece_bytes
        self._discarded_bytes = 0
        scope: Any = self.scope
        scope[PRESENCE] = self._presence

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._receiving == "header":  # a trailer would grow the header of a request that runs
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._receiving = "body"
        self._clock.stop()
        self._begin_measuring()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body)
        self._body_bytes += len(body)
        self._progress_s = self.loop.time()
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._receiving = None
        self._clock.stop()
        super().on_message_complete()
        if self._closes_when_received:
            self.transport.close()

    @property
    def _may_answer(self) -> bool:
        """Whether what is being received has no answer yet, nor one before it that runs."""
        if self._receiving == "body":
            return self._running is self.cycle and not self.cycle.response_started
        return not self._is_busy

    @property
    def _is_busy(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _await_header(self) -> None:
        self._clock.start_once(self._limits.header_timeout_s, self._header_timed_out)

    def _header_timed_out(self) -> None:
        if self._is_busy:  # a pipelined request must not end the one before it
            self._clock.start(self._limits.header_timeout_s, self._header_timed_out)
        elif self._receiving is None or not self._framing_bytes:
            self.transport.close()
        else:
            self._end(408, "the request's header did not arrive in time")

    def _begin_measuring(self) -> None:
        self._progress_s = self._body_began_s = self.loop.time()
        self._body_bytes = 0

    def _body_looked_at(self) -> None:
        if self._receiving != "body":
            return
        is_pipelined = self._is_busy and self._running is not self.cycle
        if self.flow.read_paused or is_pipelined:  # it is the application that does not read
            self._begin_measuring()
        now_s, limits = self.loop.time(), self._limits
        left_s = self._progress_s + limits.body_timeout_s - now_s
        due_bytes = limits.min_body_bytes_per_s * (now_s - self._body_began_s - limits.body_timeout_s)
        if left_s <= 0:
            self._end(408, "the request's body did not arrive in time")
        elif self._body_bytes < due_bytes:
            self._end(408, f"the request's body arrived with less than {limits.min_body_bytes_per_s} bytes per second")
        else:
            self._clock.start(left_s, self._body_looked_at)

    def _close_when_received(self) -> None:
        """Closing while a client sends its body resets the connection, and the client may never read the answer: what
        is left of the body is discarded first, for `linger_s` at most."""
        if self._receiving == "body":
            self._closes_when_received = True
        else:
            self.transport.close()

    def _end_of_lingering(self) -> None:
        if self._receiving == "body" and self.cycle.response_complete:
            self.transport.close()
            self._watch_closing()

    def _end(self, status: int, message: str) -> None:
        """Answers unless an answer has begun, and closes; a handler that reads the body sees a disconnect."""
        self._clock.stop()
        if self._may_answer:
            path = self.scope["path"] if self._receiving == "body" else ""
            self.transport.write(refusal_bytes(path, status, message))
        self.transport.close()
        self._watch_closing()

    def shutdown(self) -> None:
        """A request whose body is still on its way can not be served any more."""
        if self._receiving == "body" and self._may_answer:
            self._end(503, STOPPING)
        else:
            super().shutdown()

    # --- answering --------------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.transport = HeadJoined(self.transport, self.loop, self._close_when_received)
        super()._start_asgi_task(cycle, self._refusal(cycle.scope) or app)

    def _refusal(self, scope: Any) -> Any | None:
        """The application that answers a request which is not served; None for one that is."""
        limits = self._limits
        if message := self._place.reconsider():
            return refusing(429, message)
        if len(scope["raw_path"]) + len(scope["query_string"]) > limits.max_url_bytes:
            return refusing(414, f"the request's URL is longer than {limits.max_url_bytes} bytes")
        headers = scope["headers"]
        if len(headers) > limits.max_headers:
            return refusing(431, f"the request has more than {limits.max_headers} header fields")
        if sum(len(name) + len(value) for name, value in headers) > limits.max_header_bytes:
            return refusing(431, f"the request's header is longer than {limits.max_header_bytes} bytes")
        if (hosts := sum(name == b"host" for name, _ in headers)) > 1:
            return refusing(400, f"the request has {hosts} Host header fields, expected one")
        return None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_clock.stop()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._receiving == "body" and self.cycle.response_complete:  # its client may still send, but not for long
            self._clock.start(self._limits.linger_s, self._end_of_lingering)
        self._watch_closing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_closing()

    def _watch_closing(self) -> None:
        """A transport that closes waits for its client to take what is left, which may be never."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._watch_writing()

    def _watch_writing(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._write_clock.start(self._limits.write_timeout_s, self._writing_looked_at)

    def _writing_looked_at(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._watch_writing()
            return
        log.warning("a client took nothing for %g s: its connection is cut", self._limits.write_timeout_s)
        # Without this the kernel would keep what it has for the client, megabytes, as long as the client likes.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()


class _Clock:
    """One timer, or none."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float, callback: Callable[[], None]) -> None:
        self.stop()
        self._timer = self._loop.call_later(seconds, self._run, callback)

    def start_once(self, seconds: float, callback: Callable[[], None]) -> None:
        """As `start`, but a timer that runs already runs on."""
        if self._timer is None:
            self.start(seconds, callback)

    def _run(self, callback: Callable[[], None]) -> None:
        self._timer = None
        callback()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
