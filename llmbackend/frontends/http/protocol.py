"""One HTTP connection, with the limits that uvicorn's protocol lacks.

Invariants: a connection that makes no progress is closed, in every state (header, body, unread response, idle between
requests); its memory is bounded; every request, pipelined or not, is told when its client disconnects. Uses private
names of uvicorn: tests/frontends/test_uvicorn_seams.py lists them, pyproject.toml pins the version.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from llmbackend.core.errors import shown

from ..limits import HttpLimits
from .acceptor import Place
from .direct_body import MAX_CHUNKS, TOO_MANY_CHUNKS, BodyPieces, DirectBody, HeadJoined
from .errors import STOPPING, refusal_bytes, refusing
from .request_scope import PRESENCE, SENT_NAMES, ClientPresence
from .site_check import SiteCheck
from .tunnel import Tunnel, Tunnels

log = logging.getLogger(__name__)

_MAX_FRAMING_BYTES: Final = 1 << 20
"""Chunk sizes, chunk extensions and trailers of one body. 64 MiB in chunks of 1 KiB need half of it."""
_MAX_DISCARDED_BYTES: Final = 64 << 20
"""How much of the rest of a body is read and dropped after its request was answered."""
_MAX_DISCARDED_CHUNKS: Final = 1024
"""Limit of discarded chunks; beyond it nothing is parsed, and the connection is closed."""
_MAX_WAITING: Final = 64
"""Pipelined requests behind the one that runs: each takes 2 KiB. They are parsed a few at a time; more can come only at
the end of a long body."""
_MANY_HEADS: Final = 4
_MANY_PARSED_AT_ONCE_BYTES: Final = 1 << 10
"""Of data with more heads than that: less than _MAX_WAITING."""
_RESET: Final = struct.pack("ii", 1, 0)
"""A value of SO_LINGER: close at once, with a reset."""
_OVERLOAD_HEADER_TIMEOUT_S: Final = 2.0
"""Header timeout beyond the limit of connections. The path in the header determines the format of the refusal."""
_INTERIM_RESPONSE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_RESET_CHECK_DELAY_S: Final = 0.05
_RESET_CHECK_INTERVAL_S: Final = 1.0


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol within `limits`. A connection has no timer while its response runs.

    uvicorn pauses `send` while more than 64 KiB wait for the client, and stops reading a body after 64 KiB until the
    application consumes it; beyond these marks, a connection buffers at most one more read.
    """

    def __init__(
        self,
        limits: HttpLimits,
        place: Place,
        tunnels: Tunnels | None = None,
        sites: SiteCheck | None = None,
        **options: Any,
    ) -> None:
        """tunnels: accept websockets; None: websocket requests are served like any other
        sites: None: no check
        """
        super().__init__(**options)
        self._pieces = BodyPieces()
        self.parser = self._pieces.parser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn: a pipelined request
        self._limits = limits
        self._place = place
        self._sites = sites
        self._tunnels = tunnels
        self._opening: asyncio.Task[None] | None = None
        self._clock = _Clock(self.loop)
        self._write_clock = _Clock(self.loop)
        self._receiving: str | None = "header"
        """Which part of a request is being received; None between requests and once a request is complete."""
        self._framing_bytes = 0
        self._discarded_bytes = 0
        self._piece_bytes = 0
        self._progress_s = 0.0
        self._body_began_s = 0.0
        self._body_bytes = 0
        self._unsent_bytes = 0
        self._running: RequestResponseCycle | None = None
        self._closes_when_received = False
        self._unparsed = b""
        """Received data that is parsed later: many chunks in later turns of the event loop, further pipelined requests
        once none waits. Reading is paused meanwhile."""
        self._drops_input = False
        """Whether further data (the rest of a body whose request was answered) is dropped unparsed."""

    # --- connection -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._presence = ClientPresence(transport.close)
        timeout_s = _OVERLOAD_HEADER_TIMEOUT_S if self._place.refusal else self._limits.header_timeout_s
        self._clock.start(timeout_s, self._header_timed_out)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._place.leave()
        self._unset_keepalive_if_required()
        self._clock.stop()
        self._write_clock.stop()
        running, self._running = self._running, None
        if running is not None and not running.response_complete:  # uvicorn notifies only the newest request
            running.disconnected = True
            running.message_event.set()
        self._presence.lost()
        self.pipeline.clear()

    # --- receiving --------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.pipeline:
            self._keep_until_none_waits(self._unparsed + data)
        elif self._unparsed:
            self._unparsed += data
            self.transport.pause_reading()  # the application may have resumed it
        else:
            self._parse_at_length(data)

    def _keep_until_none_waits(self, data: bytes) -> None:
        self._unparsed = data
        self.flow.resume_reading()  # so that no application that reads its body resumes it later
        self.transport.pause_reading()

    def _parse_rest(self) -> None:
        data, self._unparsed = self._unparsed, b""
        self._parse_at_length(data)
        if not self._unparsed and not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _parse_at_length(self, data: bytes) -> None:
        """Parses `data`, over several turns of the event loop if it has many chunks, and while no request waits."""
        rest = memoryview(data)
        while rest and not self.transport.is_closing() and self._opening is None:
            part = self._next_part(rest)
            rest = rest[len(part) :]
            self._parse(part)
            if len(self.pipeline) > _MAX_WAITING:
                self._end(429, f"more than {_MAX_WAITING} pipelined requests wait")
            elif rest and self.pipeline:
                self._keep_until_none_waits(rest.tobytes())
                return
            elif rest and self._pieces.is_dense and not self._drops_input:
                self._unparsed = rest.tobytes()
                self.transport.pause_reading()
                self.loop.call_soon(self._parse_rest)
                return

    def _next_part(self, rest: memoryview) -> memoryview:
        part = rest[: self._pieces.parsed_at_once_bytes]
        is_within_long_body = self._receiving == "body" and self._body_bytes > self._pieces.parsed_at_once_bytes
        has_many_heads = not is_within_long_body and part.tobytes().count(b"\r\n\r\n") > _MANY_HEADS
        return part[:_MANY_PARSED_AT_ONCE_BYTES] if has_many_heads else part

    def _parse(self, data: memoryview) -> None:
        if self._drops_input:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > _MAX_DISCARDED_BYTES:
                self.transport.close()
            return
        self._piece_bytes = len(data)
        self._framing_bytes += len(data)
        super().data_received(data)  # type: ignore[arg-type]  # only the parser gets it
        self._take_body()
        if self.transport.is_closing() or self._opening is not None:
            return
        receiving = self._receiving
        if receiving is None:
            if self.timeout_keep_alive_task is None and not self._is_busy:
                self._await_header()  # bytes that do not begin a request
            else:
                self._clock.stop()
        elif receiving == "header":
            self._await_header()
            if self._framing_bytes > self._limits.max_header_bytes + self._limits.max_url_bytes:
                self._end(431, "the request's header is too large")
        else:
            self._clock.start_once(self._limits.body_timeout_s, self._check_body_progress)
            num_chunks = self._pieces.num_chunks
            if num_chunks > MAX_CHUNKS + 1:
                self._end(400, TOO_MANY_CHUNKS)
            elif self._framing_bytes > _MAX_FRAMING_BYTES or self._discarded_bytes > _MAX_DISCARDED_BYTES:
                self._end(413, "the request's body has too much framing or trailing data")
            elif self.cycle.response_complete and num_chunks > _MAX_DISCARDED_CHUNKS:
                self._drops_input = True

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's meaning: whether the transport stays open
        """A client that half-closes its connection still gets its response. If it closed the connection completely,
        only sending reveals that: an interim response, which clients ignore, or the next piece. The client of a feed
        (GET), which may stay silent for long, is treated as gone."""
        running = self._running
        if self._receiving is not None or running is None or running.response_complete or self.scheme == "https":
            return False
        if running.response_started and running.scope["method"] == "GET":
            return False
        self.cycle.keep_alive = False
        if not running.response_started and running.scope["http_version"] == "1.1":
            self.transport.write(_INTERIM_RESPONSE)
        self._clock.start(_RESET_CHECK_DELAY_S, self._check_for_reset)
        return True

    def _check_for_reset(self) -> None:
        """After the end of reading, the event loop does not report a reset."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._clock.start(_RESET_CHECK_INTERVAL_S, self._check_for_reset)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._pieces.begin()
        self._receiving = "header"
        self._framing_bytes = self._piece_bytes
        self._discarded_bytes = 0
        scope: Any = self.scope
        scope[PRESENCE] = self._presence

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._receiving == "header":  # a trailer would extend the header of a running request
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._receiving = "body"
        self._clock.stop()
        self._begin_measuring()
        super().on_headers_complete()

    def _take_body(self) -> None:
        """Delivers the part of a body that was just parsed."""
        if body := self._pieces.take():
            self.on_body(body)

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body)
        self._body_bytes += len(body)
        self._progress_s = self.loop.time()
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._take_body()
        if self._pieces.num_chunks > MAX_CHUNKS + 1:
            self._end(400, TOO_MANY_CHUNKS)
            return
        self._receiving = None
        self._clock.stop()
        super().on_message_complete()
        if self._closes_when_received:
            self.transport.close()

    @property
    def _may_answer(self) -> bool:
        """Whether the incoming request has no response yet, and no earlier request is running."""
        if self._receiving == "body":
            return self._running is self.cycle and not self.cycle.response_started
        return not self._is_busy

    @property
    def _is_busy(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _await_header(self) -> None:
        self._clock.start_once(self._limits.header_timeout_s, self._header_timed_out)

    def _header_timed_out(self) -> None:
        if self._is_busy:  # a pipelined request must not end the previous one
            self._clock.start(self._limits.header_timeout_s, self._header_timed_out)
        elif self._receiving is None or not self._framing_bytes:
            self.transport.close()
        else:
            self._end(408, "the request's header did not arrive in time")

    def _begin_measuring(self) -> None:
        self._progress_s = self._body_began_s = self.loop.time()
        self._body_bytes = 0

    def _check_body_progress(self) -> None:
        if self._receiving != "body":
            return
        is_pipelined = self._is_busy and self._running is not self.cycle
        if self.flow.read_paused or is_pipelined:  # the application is not reading
            self._begin_measuring()
        now_s, limits = self.loop.time(), self._limits
        left_s = self._progress_s + limits.body_timeout_s - now_s
        due_bytes = limits.min_body_bytes_per_s * (now_s - self._body_began_s - limits.body_timeout_s)
        if left_s <= 0:
            self._end(408, "the request's body did not arrive in time")
        elif self._body_bytes < due_bytes:
            self._end(408, f"the request's body arrived at less than {limits.min_body_bytes_per_s} bytes per second")
        else:
            self._clock.start(left_s, self._check_body_progress)

    def _close_when_received(self) -> None:
        """Closes after the rest of the body, within `linger_s`: closing while a client sends its body resets the
        connection, and the client might never read the response."""
        if self._receiving == "body":
            self._closes_when_received = True
        else:
            self.transport.close()

    def _end_of_lingering(self) -> None:
        if self._receiving == "body" and self.cycle.response_complete:
            self.transport.close()
            self._watch_closing()

    def _end(self, status: int, message: str) -> None:
        """Sends a refusal, unless a response has begun, and closes. A handler that reads the body sees a disconnect."""
        self._clock.stop()
        if self._may_answer:
            path = self.scope["path"] if self._receiving == "body" else ""
            self.transport.write(refusal_bytes(path, status, message))
        self.transport.close()
        self._watch_closing()

    def shutdown(self) -> None:
        """A request whose body is still arriving is refused."""
        if self._receiving == "body" and self._may_answer:
            self._end(503, STOPPING)
        else:
            super().shutdown()

    # --- websockets -------------------------------------------------------------------------------------------------

    def _should_upgrade_to_ws(self) -> bool:
        return self._tunnels is not None and self._tunnels.takes_websocket(self.url)

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing: any client could fill the log."""

    def handle_websocket_upgrade(self) -> None:
        """Hands the connection over to the tunnel."""
        assert self._tunnels is not None
        status, message = self._websocket_refusal(self._tunnels)
        if message:
            self._end(status, message)
            return
        lines = [b"GET %b HTTP/1.1" % self.url, *(b"%b: %b" % pair for pair in self.headers), b"", b""]
        tunnel = Tunnel(self.transport, self._tunnels, self.connections, self._place.leave)
        self.connections.discard(self)
        self.transport.set_protocol(tunnel)
        opening = tunnel.open(b"\r\n".join(lines), lambda text: refusal_bytes("", 503, text))
        self._opening = self.loop.create_task(opening)

    def _websocket_refusal(self, tunnels: Tunnels) -> tuple[int, str]:
        if message := self._place.reevaluate():
            return 429, message
        if self.scope["method"] != "GET" or self._is_busy:
            return 400, "a websocket request must be a GET on a connection without another request"
        if self._framing_bytes > self._limits.max_header_bytes:
            return 431, "the request's header is too large"
        if message := self._refused_site(self.scope["method"], self.headers) or tunnels.websocket_refusal(self.headers):
            return 403, message
        return 429, self._place.enter_websocket()

    # --- answering --------------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.transport = HeadJoined(self.transport, self.loop, self._close_when_received)
        DirectBody(cycle, self.flow).add_to(cycle.scope)
        app = self._refusal(cycle.scope) or app
        super()._start_asgi_task(cycle, _until_close(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def _refusal(self, scope: Any) -> Any | None:
        """The application that refuses the request; None: it is served."""
        limits = self._limits
        if message := self._place.reevaluate():
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
        codings = b", ".join(value for name, value in headers if name == b"transfer-encoding").decode("latin-1")
        if codings.strip().lower() not in ("", "chunked"):
            return refusing(501, f"the request's Transfer-Encoding is {shown(codings)}, expected chunked")
        if message := self._refused_site(scope["method"], headers):
            return refusing(403, message)
        return None

    def _refused_site(self, method: str, headers: Any) -> str:
        return "" if self._sites is None else self._sites.refusal(method, headers)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_clock.stop()

    def on_response_complete(self) -> None:
        was_waited_for = bool(self.pipeline)
        super().on_response_complete()
        if was_waited_for and not self.pipeline:
            self._begin_measuring()
            self.loop.call_soon(self._parse_rest)
        if self._receiving == "body" and self.cycle.response_complete:
            self._clock.start(self._limits.linger_s, self._end_of_lingering)
        self._watch_closing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_closing()

    def _watch_closing(self) -> None:
        """Bounds the close: a closing transport waits until its client has read the rest, which may never happen."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._watch_writing()

    def _watch_writing(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._write_clock.start(self._limits.write_timeout_s, self._check_write_progress)

    def _check_write_progress(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._watch_writing()
            return
        log.warning("a client read nothing for %g s: closing its connection", self._limits.write_timeout_s)
        # Without a reset, the kernel keeps the unsent megabytes for as long as the client stays connected.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()


def _until_close(app: Any, cycle: RequestResponseCycle) -> Any:
    """`app` for an HTTP/1.0 client, without chunks: a response without a length ends with the connection (RFC 9112,
    6.3)."""

    async def served(scope: Any, receive: Any, send: Any) -> None:
        async def unchunked(message: Any) -> None:
            if message["type"] == "http.response.start":
                if all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
                    cycle.chunked_encoding = False
            elif not cycle.expected_content_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, unchunked)

    return served


class _Clock:
    """Runs at most one timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float, callback: Callable[[], None]) -> None:
        self.stop()
        self._timer = self._loop.call_later(seconds, self._run, callback)

    def start_once(self, seconds: float, callback: Callable[[], None]) -> None:
        """Like `start`, unless a timer is running."""
        if self._timer is None:
            self.start(seconds, callback)

    def _run(self, callback: Callable[[], None]) -> None:
        self._timer = None
        callback()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class CaseKeepingProtocol(GuardedProtocol):
    """Also records header names as sent, because Triton forwards them like this (golden 60)."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._names: list[bytes] = []
        scope: Any = self.scope
        scope[SENT_NAMES] = self._names

    def on_header(self, name: bytes, value: bytes) -> None:
        before = len(self.headers)
        super().on_header(name, value)
        if len(self.headers) > before:
            self._names.append(name)
