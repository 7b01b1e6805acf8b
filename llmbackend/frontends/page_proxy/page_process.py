"""PageProcess: the process that serves the pages, started for the first viewer and ended after the last one.

For: the page proxy. Does not know: HTTP, what a page is. Invariants: without viewers there is no process, and at most
one at any time; it listens on a socket in a folder that only this user can enter; it holds the reading end of a pipe to
this process, and ends when that pipe closes. Used on the event loop alone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Final, TypeVar

from llmbackend.fork_server.temporary_folders import OwnedFolder

log = logging.getLogger(__name__)

P = TypeVar("P", bound=asyncio.BaseProtocol)

_MODULE: Final = "llmbackend.pages.main"
_BACKLOG: Final = 256
"""Connections wait here until the process, which takes a second or two to start, accepts them."""
_START_INTERVAL_S: Final = 2.0
"""Between two starts, for a process that can not start."""
_STOP_TIMEOUT_S: Final = 3.0


_MAX_CONNECTIONS: Final = 256
"""Each costs this process a descriptor besides that of its browser."""


class PagesUnavailableError(Exception):
    """The text says why."""


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
        """Where the pages reach the server's API."""
        return self._folder / "api.sock"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def connect(self, make_protocol: Callable[[], P]) -> P:
        """A connection to the process, which is started if need be. Each one that was made counts until `left` is
        called. Raises PagesUnavailableError."""
        if self._num_connections >= _MAX_CONNECTIONS:
            raise PagesUnavailableError(f"the pages are at their limit of {_MAX_CONNECTIONS} connections")
        self._num_connections += 1
        self._cancel_idle()
        try:
            return await self._connect(make_protocol)
        except OSError as error:
            self.left()
            raise PagesUnavailableError(f"the page process can not be reached: {error.strerror}") from None
        except BaseException:
            self.left()
            raise

    async def _connect(self, make_protocol: Callable[[], P]) -> P:
        loop = asyncio.get_running_loop()
        watching = await self._start_once()
        try:
            _, protocol = await loop.create_unix_connection(make_protocol, str(self._socket_path))
        except OSError:  # it has just ended: the next one is tried
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
        """Ends when the process has ended."""
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
            # Not the event loop's own way: it forks, for which gRPC's handlers would stop its threads.
            # A session of its own: a Ctrl+C at the server's terminal is for the server, which ends this process.
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
            log.warning("the page process ended with exit code %s; it is started again when a viewer comes", code)

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
        """The caller holds `_starting`."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and self._watching is not None
        process.stdin.close()  # which it takes as the end
        done, _ = await asyncio.wait((self._watching,), timeout=_STOP_TIMEOUT_S)
        if not done:
            process.kill()
        await self._watching
