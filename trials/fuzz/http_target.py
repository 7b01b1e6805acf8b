"""HTTP over sockets: whole requests on a kept-alive connection, and raw bytes.

Part of `make fuzz`. Independent of endpoints. Invariants: a whole request gets one answer, which `complaint` permits,
and leaves the connection usable or explicitly closed by the server; raw bytes get answers or a closed connection, never
a 5xx, and harm no other client.
"""

from __future__ import annotations

import http.client
import itertools
import re
import socket

from hypothesis import strategies as st

from . import examples
from .exchange import HttpAnswer, HttpInput, complaint
from .fuzzed_server import HANG_S, FuzzedServer
from .http_inputs import WHOLE
from .inputs import as_json, mutated_bytes
from .tally import Finding

_QUIET_S = 0.3
"""How long raw bytes may go unanswered before the client hangs up: half a request has no answer."""
_STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3})")


class HttpTarget:
    """Sends HttpInputs, one after the other, on one connection."""

    def __init__(self, fuzzed: FuzzedServer) -> None:
        self._fuzzed = fuzzed
        self._connection: socket.socket | None = None

    def __call__(self, request: HttpInput) -> None:
        answer = self._exchange(_on_the_wire(request), request.method)
        found = complaint(request, answer)
        if found:
            raise Finding("5xx" if answer.is_5xx else "violation", found)
        self._fuzzed.check()

    def _exchange(self, sent: bytes, method: str) -> HttpAnswer:
        connection, self._connection = self._connection or self._connect(), None
        try:
            connection.sendall(sent)
            response = http.client.HTTPResponse(connection, method=method)
            response.begin()
            answer = HttpAnswer(
                response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
            )
        except TimeoutError:
            raise Finding("hang", f"no answer in {HANG_S:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            self._fuzzed.check()
            raise Finding("violation", f"no whole answer: {error!r}") from None
        if answer.headers.get("connection") == "close" or answer.status == 400:
            connection.close()  # a request that is no HTTP is answered and the connection closed
        else:
            self._connection = connection
        return answer

    def _connect(self) -> socket.socket:
        self._fuzzed.check_answers()
        return socket.create_connection((self._fuzzed.http_host, self._fuzzed.http_port), timeout=HANG_S)


def _on_the_wire(request: HttpInput) -> bytes:
    lines = [f"{request.method} {request.path or '/'} HTTP/1.1".encode(), b"host: localhost"]
    lines += [name + b": " + value for name, value in request.headers]
    lines.append(b"content-length: %d" % len(request.body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + request.body


class RawHttpTarget:
    """Sends bytes on a connection of their own."""

    def __init__(self, fuzzed: FuzzedServer) -> None:
        self._fuzzed = fuzzed
        self._count = itertools.count(1)

    def __call__(self, sent: bytes) -> None:
        received = self._send(sent)
        for status in map(int, _STATUS_LINE.findall(received)):
            if status >= 500 and status not in (501, 503) and b"failed to parse" not in received:
                raise Finding("5xx", received[:300].decode("utf-8", "replace"))
        if received and not received.startswith(b"HTTP/1.1 "):
            raise Finding("violation", f"the answer is no HTTP: {received[:80]!r}")
        self._fuzzed.check()
        if next(self._count) % 50 == 0:
            self._fuzzed.check_answers()

    def _send(self, sent: bytes) -> bytes:
        received = b""
        with socket.create_connection((self._fuzzed.http_host, self._fuzzed.http_port), timeout=HANG_S) as connection:
            try:
                connection.sendall(sent)
                connection.settimeout(_QUIET_S)
                while piece := connection.recv(1 << 16):
                    received += piece
            except (TimeoutError, ConnectionError):
                pass  # quiet: it waits for more of the request; reset: it has had enough
        return received


def _chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


_CHAT = as_json(examples.CHAT[0])
_STREAM = as_json(examples.CHAT[2])
_RAW_EXAMPLES = [
    b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3,
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(_CHAT), _CHAT),
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + _chunked(_CHAT),
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%bGET /v1/models HTTP/1.1\r\n\r\n"
    % (len(_STREAM), _STREAM),
    b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: localhost\r\nInference-Header-Content-Length: %d\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
    % (WHOLE.encode(), len(as_json(examples.BINARY_INFER_JSON)))
    + _chunked(as_json(examples.BINARY_INFER_JSON) + examples.BINARY_INFER_RAW),
    b"POST /v2/models/mock/generate HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 999999999\r\n\r\n{",
    b"POST /v2/models/mock/generate HTTP/1.0\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /%b HTTP/1.1\r\n%b\r\n" % (b"a" * 70_000, b"X: y\r\n" * 2000),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
]
_RAW_WORDS = [
    b"\r\n",
    b"\r",
    b"\n",
    b" ",
    b":",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"-1\r\n",
    b"Content-Length: 0\r\n",
]
RAW_HTTP_INPUTS: st.SearchStrategy[bytes] = st.builds(
    lambda first, word, second: first + word + second,
    mutated_bytes(_RAW_EXAMPLES),
    st.sampled_from([b"", *_RAW_WORDS]),
    st.just(b"") | mutated_bytes(_RAW_EXAMPLES),
)
