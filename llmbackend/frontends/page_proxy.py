"""Forwards browser requests for pages to the page process, which runs while there are viewers.

Only GET and HEAD are forwarded; the application gets all other requests. The page process listens on a socket in a
folder that only this user can enter, and exits when its pipe to this process closes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Final, TypeVar

import httptools
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from llmbackend.fork_server.process_resources import OwnedFolder

from .http.responses import HOP_BY_HOP, ForwardedResponse
from .http.site_check import SiteCheck
from .protocol_options import PageSettings

log = logging.getLogger(__name__)

P = TypeVar("P", bound=asyncio.BaseProtocol)

_MODULE: Final = "llmbackend.pages.main"
_BACKLOG: Final = 256
"""Connections that wait while the process starts, which takes a second or two."""
_START_INTERVAL_S: Final = 2.0
"""Minimum time between two starts of a process that exits at once."""
_STOP_TIMEOUT_S: Final = 3.0
_MAX_CONNECTIONS: Final = 256
"""Each connection needs a file descriptor in addition to that of its browser."""


class PagesUnavailableError(Exception):
    pass


class PageProcess:
    def __init__(self, idle_timeout_s: float) -> None:
        self._idle_timeout_s = idle_timeout_s
        self._owned = OwnedFolder("pages")
        self._folder = self._owned.path
        self._process: subprocess.Popen[bytes] | None = None
        self._starting: asyncio.Lock = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._num_connections = 0
        self._idle: asyncio.TimerHandle | None = None
        self._not_before_s = 0.0
        self._is_stopped = False

    @property
    def api_path(self) -> Path:
        """The socket through which the pages reach the server's API."""
        return self._folder / "api.sock"

    async def connect(self, make_protocol: Callable[[], P]) -> P:
        """A connection to the process, started if necessary; counted until `left`. Raises PagesUnavailableError."""
        if self._num_connections >= _MAX_CONNECTIONS:
            raise PagesUnavailableError(f"the pages are at their limit of {_MAX_CONNECTIONS} connections")
        self._num_connections += 1
        self._cancel_idle()
        try:
            return await self._connect(make_protocol)
        except OSError as error:
            self.left()
            raise PagesUnavailableError(f"the page process cannot be reached: {error.strerror}") from None
        except BaseException:
            self.left()
            raise

    async def _connect(self, make_protocol: Callable[[], P]) -> P:
        loop = asyncio.get_running_loop()
        watching = await self._start_once()
        try:
            _, protocol = await loop.create_unix_connection(make_protocol, str(self._socket_path))
        except OSError:  # the process has just exited
            await asyncio.wait((watching,), timeout=_STOP_TIMEOUT_S)
            await self._start_once()
            _, protocol = await loop.create_unix_connection(make_protocol, str(self._socket_path))
        return protocol

    def left(self) -> None:
        self._num_connections -= 1
        if not self._num_connections and not self._is_stopped:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(self._idle_timeout_s, self._end_idle)

    async def stop(self) -> None:
        """Ends the process and removes the folder."""
        self._is_stopped = True
        self._cancel_idle()
        async with self._starting:
            await self._end()
        self._owned.remove()

    @property
    def _socket_path(self) -> Path:
        return self._folder / "pages.sock"

    async def _start_once(self) -> asyncio.Task[None]:
        """The task that waits for the process to exit; starts the process unless it is running."""
        async with self._starting:
            if self._is_stopped:
                raise PagesUnavailableError("the server is stopping")
            if self._process is None:
                loop = asyncio.get_running_loop()
                await asyncio.sleep(self._not_before_s - loop.time())
                self._not_before_s = loop.time() + _START_INTERVAL_S
                self._process = self._start()
                self._watching = asyncio.create_task(self._watch(self._process))
            assert self._watching is not None
            return self._watching

    def _start(self) -> subprocess.Popen[bytes]:
        self._socket_path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self._socket_path))
            listener.listen(_BACKLOG)
            number = listener.fileno()
            arguments = ("--socket-descriptor", str(number), "--api-socket", str(self.api_path))
            # asyncio would fork, for which gRPC's handlers stop its threads. A session of its own, so that Ctrl+C at
            # the terminal ends only the server, which then ends this process.
            return subprocess.Popen(
                [sys.executable, "-m", _MODULE, *arguments],
                stdin=PIPE,
                stdout=DEVNULL,
                pass_fds=(number,),
                start_new_session=True,
            )

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        code = await asyncio.to_thread(process.wait)
        assert process.stdin is not None
        process.stdin.close()
        if self._process is process:
            self._process = None
            log.warning("the page process exited with code %s; it is restarted for the next viewer", code)

    def _cancel_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _end_idle(self) -> None:
        self._idle = None
        self._ending = asyncio.create_task(self._end_if_idle())

    async def _end_if_idle(self) -> None:
        async with self._starting:
            if not self._num_connections:
                await self._end()

    async def _end(self) -> None:
        """Requires `_starting`."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and self._watching is not None
        process.stdin.close()  # asks it to exit
        done, _ = await asyncio.wait((self._watching,), timeout=_STOP_TIMEOUT_S)
        if not done:
            process.kill()
        await self._watching


WEBSOCKET_PATH: Final = "/_nicegui_ws/"
_ASSETS: Final = "/_nicegui/"
_PAGES: Final = frozenset({"/", "/chat", "/engine", "/operations"})
_FILES: Final = frozenset({"/favicon.ico"})


def is_for_pages(path: str, accept: bytes) -> bool:
    """A probe of `/` that does not accept HTML starts no process."""
    return path.startswith(_ASSETS) or path in _FILES or (path in _PAGES and b"text/html" in accept)


_HEAD_TIMEOUT_S: Final = 60.0
_PIECE_BYTES: Final = 64 << 10
_SENT: Final = frozenset(
    {b"host", b"accept", b"accept-encoding", b"accept-language", b"user-agent", b"if-none-match", b"if-modified-since"}
)
_DROPPED: Final = HOP_BY_HOP | {b"date", b"server"}


class PageProxy:
    """Owns the page process."""

    def __init__(self, settings: PageSettings, sites: SiteCheck) -> None:
        """sites: the names by which pages are served"""
        self.process = PageProcess(settings.idle_timeout_s)
        self._sites = sites

    def wrap(self, app: ASGIApp) -> ASGIApp:
        async def dispatched(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and _is_forwarded(scope):
                await self._forward(scope, receive, send)
            else:
                await app(scope, receive, send)

        return dispatched

    def takes_websocket(self, target: bytes) -> bool:
        return target.startswith(WEBSOCKET_PATH.encode())

    def websocket_refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Why the request is refused; "": it is not. Browsers always send an Origin when they open a websocket."""
        pairs = list(headers)
        if not any(name == b"origin" for name, _ in pairs):
            return "the request has no Origin, expected that of the pages"
        return self._site_refusal(pairs)

    def _site_refusal(self, headers: Collection[tuple[bytes, bytes]]) -> str:
        return self._sites.host_refusal(headers) or self._sites.refusal("GET", headers)

    async def connect(self, make_protocol: Callable[[], P]) -> P:
        return await self.process.connect(make_protocol)

    def left(self) -> None:
        self.process.left()

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        if message := self._site_refusal(scope["headers"]):
            return await PlainTextResponse(message, 403)(scope, receive, send)
        forwarded = partial(ForwardedResponse, send, has_body=scope["method"] != "HEAD", dropped=_DROPPED)
        response = forwarded()
        try:
            try:
                await self._exchange(scope, response)
            except ConnectionError:  # the process was about to exit
                if response.has_begun:
                    raise
                response = forwarded()
                await self._exchange(scope, response)
        except (PagesUnavailableError, OSError, TimeoutError, httptools.HttpParserError) as error:
            if response.has_begun:
                raise ConnectionError("the page process exited during a response") from error
            await _unavailable(error)(scope, receive, send)

    async def _exchange(self, scope: Scope, response: ForwardedResponse) -> None:
        reader = asyncio.StreamReader(limit=_PIECE_BYTES)
        protocol = await self.process.connect(lambda: _Connection(reader))
        try:
            protocol.send(_head(scope))
            async with asyncio.timeout(_HEAD_TIMEOUT_S):
                await response.take(await reader.read(_PIECE_BYTES))
            while not response.is_complete:
                await response.take(await reader.read(_PIECE_BYTES))
        finally:
            protocol.close()
            self.process.left()


def _unavailable(error: Exception) -> PlainTextResponse:
    if isinstance(error, TimeoutError):
        return PlainTextResponse("the page process did not answer in time", 504)
    return PlainTextResponse(str(error) or "the page process exited", 503, {"retry-after": "2"})


def _is_forwarded(scope: Scope) -> bool:
    accept = b"".join(value for name, value in scope["headers"] if name == b"accept")
    return is_for_pages(scope["path"], accept)


def _head(scope: Scope) -> bytes:
    """The forwarded request: only what a page needs, without cookies and keys."""
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    lines = [b"%b %b HTTP/1.1" % (scope["method"].encode(), target)]
    lines += [b"%b: %b" % pair for pair in scope["headers"] if pair[0] in _SENT]
    return b"\r\n".join((*lines, b"connection: close", b"", b""))


class _Connection(asyncio.StreamReaderProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the loop calls it
        super().connection_made(transport)
        self._to = transport

    def send(self, head: bytes) -> None:
        self._to.write(head)

    def close(self) -> None:
        self._to.abort()
