"""FrontendProcesses: starts, controls, restarts and drains the frontend processes of one machine.

Used by the host and by a cluster's launcher. Independent of what a frontend does. Invariants: a frontend that dies is
restarted, with increasing pauses if it dies soon; its log is part of this process's log; all frontends end with this
process. Used only on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from subprocess import DEVNULL, PIPE
from typing import Final

from llmbackend.frontends.access.process_counters import add_ended

from .frontend_settings import (
    ControlChannel,
    Drain,
    FrontendSettings,
    Leave,
    Message,
    Reload,
    Serve,
    Serving,
    send_settings,
)
from .process import in_thread, log_line

log = logging.getLogger(__name__)

_MODULE: Final = "llmbackend.server.frontend_process"
METRICS_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
"""When prometheus_client is imported, it reads from this variable the folder for files with counters
(access/process_counters.py)."""
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 5.0
SILENCE_S: Final = 30.0
_SILENT_WAITS: Final = 3
"""A silent process is killed after this many timeouts. One is not enough: if this process itself was stopped (SIGSTOP),
a timeout fires before waiting messages are read."""
_LASTED_S: Final = 5.0
"""A process that has run this long is restarted after the shortest pause."""
_END_TIMEOUT_S: Final = 5.0
_LAST_LINES_S: Final = 1.0
_LINE_BYTES: Final = 1 << 20


class FrontendsFailedError(Exception):
    """The text names the frontend process that did not begin serving."""


class FrontendProcesses:
    def __init__(
        self,
        settings: Sequence[FrontendSettings],
        on_end: Callable[[int], None] = lambda number: None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """on_end: called with a frontend's number after its process has ended and before the next one is started.
        silence_s: a frontend that sends nothing for this long is killed"""
        self._keepers = [_Keeper(one, on_end, silence_s) for one in settings]

    @property
    def pids(self) -> list[int]:
        """The ids of running frontend processes."""
        return [keeper.process.pid for keeper in self._keepers if keeper.process is not None]

    def start(self) -> None:
        """Starts all processes, which do not listen yet."""
        for keeper in self._keepers:
            keeper.start()

    async def serve(self) -> None:
        """Returns when all frontends are listening. Raises FrontendsFailedError if one ends first."""
        for keeper in self._keepers:
            keeper.serve()
        for keeper in self._keepers:
            await keeper.first_serves

    def reload(self) -> None:
        """Makes all processes reread API keys and certificates."""
        for keeper in self._keepers:
            keeper.tell(Reload())

    def leave(self) -> None:
        """Called when the host is stopping: gRPC refuses new connections and calls; others continue until `stop`."""
        for keeper in self._keepers:
            keeper.leave()

    async def stop(self, grace_s: float) -> None:
        """Makes all processes refuse new work and end after their running work, at most after `grace_s` seconds."""
        await asyncio.gather(*(keeper.stop(grace_s) for keeper in self._keepers))


class _Keeper:
    """Runs one frontend's process, and restarts it."""

    def __init__(self, settings: FrontendSettings, on_end: Callable[[int], None], silence_s: float) -> None:
        self._settings = settings
        self._on_end = on_end
        self._silence_s = silence_s
        self.process: subprocess.Popen[bytes] | None = None
        self._control: ControlChannel | None = None
        self._serves = False
        self._leaves = False
        self._is_stopping = False
        self.first_serves: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the first process is serving."""
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._keeping = asyncio.create_task(self._keep())

    def serve(self) -> None:
        self._serves = True
        self.tell(Serve())

    def leave(self) -> None:
        self._leaves = True
        self.tell(Leave())

    def tell(self, message: Message) -> None:
        if self._control is not None:
            self._control.send(message)

    async def stop(self, grace_s: float) -> None:
        self._is_stopping = True
        self.tell(Drain(grace_s))
        if self._keeping is None:
            return
        if self.process is None:  # between two processes
            self._keeping.cancel()
        await asyncio.wait((self._keeping,), timeout=grace_s + _END_TIMEOUT_S)
        if self.process is not None:
            log.warning("%s did not exit in time; killing it", self._settings.name)
            self.process.kill()
            await self._keeping

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = _FIRST_PAUSE_S
        while not self._is_stopping:
            began_s = loop.time()
            try:
                code = await self._run_once()
                ended = f"(process {self._pid}) exited with code {code}"
            except (OSError, RuntimeError) as error:  # memory, process ids, threads or descriptors are used up
                self._kill()
                code, ended = 1, f"could not be started: {error}"
            if self._is_stopping:
                return
            if not self.first_serves.done():
                text = f"{self._settings.name} {ended} before it served"
                self.first_serves.set_exception(FrontendsFailedError(text))
                return
            if loop.time() - began_s >= _LASTED_S:
                pause_s = _FIRST_PAUSE_S
            log.log(
                logging.ERROR if code else logging.INFO,
                "%s %s, its connections are closed; restarting it",
                *(self._settings.name, ended),
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _kill(self) -> None:
        """Ends what a start that failed has left."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self._on_end(self._settings.number)
        if self._control is not None:
            self._control.close()
        self.process = self._control = None

    async def _run_once(self) -> int:
        """Runs a process; returns its exit code. Raises OSError and RuntimeError."""
        ours, theirs = socket.socketpair()
        ours.setblocking(True)
        with contextlib.ExitStack() as on_error:
            on_error.callback(ours.close)
            with theirs:
                # Not the event loop's method, whose fork would make gRPC's handlers stop its threads. In a session of
                # its own: only the server gets the terminal's Ctrl+C, and it then stops this process.
                process = subprocess.Popen(
                    [sys.executable, "-m", _MODULE],
                    stdin=theirs.fileno(),
                    stdout=DEVNULL,
                    stderr=PIPE,
                    env={**os.environ, METRICS_VARIABLE: str(self._settings.host.metrics)},
                    start_new_session=True,
                )
            self.process, self._pid = process, process.pid
            with contextlib.suppress(OSError):  # it has ended
                send_settings(ours, self._settings)
            self._control = control = await ControlChannel.over(ours)
            on_error.pop_all()
        if self._serves:
            control.send(Serve())
        if self._leaves:
            control.send(Leave())
        logging_its_lines = asyncio.create_task(self._log(process))
        hearing = asyncio.create_task(self._receive_heartbeats(control, process))
        code = await in_thread(process.wait)
        self.process = self._control = None
        # Wait for its last lines; a process that it left behind may keep its standard error open.
        await asyncio.wait((logging_its_lines, hearing), timeout=_LAST_LINES_S)
        control.close()
        self._on_end(self._settings.number)
        try:
            await in_thread(add_ended, self._settings.host.metrics, process.pid)  # waits for a scrape
        except (OSError, RuntimeError) as error:
            log.error("the counters of %s (process %d) cannot be read: %s", self._settings.name, process.pid, error)
        return code

    async def _receive_heartbeats(self, control: ControlChannel, process: subprocess.Popen[bytes]) -> None:
        """Reads messages until the process ends. Before it serves, it may be silent for any length of time."""
        message, num_silent = await control.receive(), 0
        while isinstance(message, Serving):
            if not self.first_serves.done():
                self.first_serves.set_result(None)
            try:
                async with asyncio.timeout(self._silence_s / _SILENT_WAITS):
                    message, num_silent = await control.receive(), 0
            except TimeoutError:
                num_silent += 1
                if num_silent < _SILENT_WAITS:
                    continue
                log.error("%s (process %d) hangs; killing it", self._settings.name, process.pid)
                process.kill()
                return

    async def _log(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        reader = asyncio.StreamReader(limit=_LINE_BYTES)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stderr)
        while True:
            try:
                line = await reader.readline()
            except ValueError:  # longer than _LINE_BYTES
                continue
            if not line:
                return
            log_line(line, self._settings.name, process.pid)
