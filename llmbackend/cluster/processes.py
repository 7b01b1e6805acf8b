"""A machine's processes in a cluster: the launcher's children, and served engines, which outlive their starters."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Final

import msgspec

from llmbackend.engine.process.served.served_order import ServedEngineNews, ServedEngineOrder, read_record
from llmbackend.fork_server.client import restart_pause_s, wait_readable
from llmbackend.server.process import READY_DESCRIPTOR, in_thread

from .ray_node import THREADS_VARIABLE

log = logging.getLogger(__name__)

_LASTED_S: Final = 60.0
"""A process that ran at least this long is restarted without a pause."""


class Child:
    """A process that is restarted when it ends. Used on the launcher's event loop."""

    def __init__(self, name: str, command: Sequence[str], order: Callable[[], bytes], environment: Mapping[str, str]):
        """order: creates the standard input of each process."""
        self.name = name
        self._command = command
        self._order = order
        self._environment = environment
        self._stopping = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def start(self) -> bytes:
        """Returns the first line that the first process writes to the descriptor READY_DESCRIPTOR, or b"" if it ends
        before that; it is then not restarted."""
        self._keeping = asyncio.create_task(self._keep())
        return await asyncio.shield(self._first)

    @property
    def exit_code(self) -> int:
        """0 while the process runs, and before it is started."""
        return 0 if self._process is None else self._process.returncode or 0

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, timeout_s: float) -> int:
        """Sends SIGTERM, and SIGKILL after `timeout_s`. Returns the exit code."""
        self._stopping.set()
        self.signal(signal.SIGTERM)
        if self._keeping is not None:
            if not (await asyncio.wait((self._keeping,), timeout=timeout_s))[0]:
                log.warning("%s did not exit in time; killing it", self.name)
                self.signal(signal.SIGKILL)
            await self._keeping
        return self.exit_code

    async def _keep(self) -> None:
        loop, num_failures = asyncio.get_running_loop(), 0
        while not self._stopping.is_set():
            began_s = loop.time()
            try:
                process = await self._run_once()
                ended = f"(process {process.pid}) exited with code {process.returncode}"
            except (OSError, RuntimeError, ValueError) as error:
                # Memory, process ids, threads or descriptors are used up, or files of the order are missing.
                self._kill()
                ended = f"could not be started: {error}"
            if not self._first.done():
                log.error("%s %s", self.name, ended)
                self._first.set_result(b"")
            if self._stopping.is_set() or not self._first.result():
                return
            num_failures = 0 if loop.time() - began_s >= _LASTED_S else num_failures + 1
            pause_s = restart_pause_s(num_failures - 1)
            log.error("%s %s; restarting it in %.1f s", self.name, ended, pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    async def _run_once(self) -> subprocess.Popen[bytes]:
        """Returns a process that has ended. Raises OSError, RuntimeError and ValueError."""
        reader, writer = os.pipe()
        # In a session of its own: only the launcher gets the terminal's Ctrl+C, and it then stops this process.
        try:
            process = subprocess.Popen(
                self._command,
                stdin=PIPE,
                env={**self._environment, READY_DESCRIPTOR: str(writer)},
                pass_fds=(writer,),
                start_new_session=True,
            )
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self._process = process
        assert process.stdin is not None
        with open(reader, "rb") as pipe, process.stdin as commands, contextlib.suppress(BrokenPipeError):
            commands.write(self._order())
            commands.flush()
            said = await in_thread(pipe.readline)
            if not self._first.done():
                self._first.set_result(said)
            await in_thread(process.wait)
        await in_thread(process.wait)
        return process


_PROGRAM: Final = "llmbackend.engine.process.served.served_engine"
_DETACHED: Final = """
import os, sys
if os.fork():
    os._exit(0)
os.setsid()
print(os.getpid(), flush=True)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Detaches the engine, because Ray kills a worker's children together with the worker."""
_END_TIMEOUT_S: Final = 15.0


class Launch(msgspec.Struct, frozen=True):
    """descriptors: kept open by the engine while it runs."""

    order: ServedEngineOrder
    descriptors: tuple[int, ...] = ()


class EngineKeeper:
    """Starts and restarts one engine on its own thread. Thread-safe."""

    def __init__(
        self, prepare: Callable[[], Launch | None], folder: Path, name: str, heard: Callable[[ServedEngineNews], None]
    ) -> None:
        """prepare: called on this object's thread before each launch; may take long; None = not now
        folder: the run folder of this machine
        heard: called on this object's thread; news with an error mean that the engine has ended and is being restarted
        """
        self._prepare = prepare
        self._record_file = folder / f"{name}.json"
        self._heard = heard
        self._pid = 0
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="engine-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Ends the engine for good. Blocks until it has ended. `prepare` may still run then; no engine follows it."""
        self._is_ending.set()
        if self._thread.ident is None:
            return
        self._end_process(signal.SIGTERM)
        self._thread.join(_END_TIMEOUT_S)
        if self._end_process(signal.SIGKILL):
            self._thread.join()

    def _end_process(self, number: int) -> bool:
        """Whether there is a process. Without the check, kill(0) would end the caller's process group."""
        if pid := self._pid:
            _signal(pid, number)
        return bool(pid)

    def _keep(self) -> None:
        num_failures = 0
        while not self._is_ending.wait(restart_pause_s(num_failures)):
            began_s = time.monotonic()
            try:
                if not self._adopt() and (launch := self._prepare()) is not None and not self._is_ending.is_set():
                    self._launch(launch)
            except (OSError, ValueError) as error:  # memory, process ids or descriptors are used up
                self._heard(ServedEngineNews(error=f"the engine's process could not be started: {error}"))
            num_failures = 0 if time.monotonic() - began_s >= _LASTED_S else num_failures + 1

    def _adopt(self) -> bool:
        """Waits for the end of an engine started by a previous process of the actor. Returns False if there is none."""
        record = read_record(self._record_file)
        if record is None:
            return False
        self._pid = record.pid
        self._heard(record.news)
        self._wait_for_end(record.pid, None)
        return True

    def _launch(self, launch: Launch) -> None:
        environment = {name: value for name, value in os.environ.items() if name != THREADS_VARIABLE}
        launcher = subprocess.Popen(
            [sys.executable, "-c", _DETACHED, "-m", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            pass_fds=launch.descriptors,
        )
        assert launcher.stdin is not None and launcher.stdout is not None
        with launcher, launcher.stdin as commands, launcher.stdout as news:
            self._pid = int(news.readline())
            launcher.wait()
            if self._is_ending.is_set():  # `end` may have found no process
                self._end_process(signal.SIGTERM)
            order = msgspec.structs.replace(launch.order, record_file=str(self._record_file))
            commands.write(msgspec.json.encode(order) + b"\n")
            commands.flush()
            self._wait_for_end(self._pid, news.fileno())

    def _wait_for_end(self, pid: int, news: int | None) -> None:
        error = ""
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            error = self._hear_until_end(descriptor, news)
            os.close(descriptor)
        self._record_file.unlink(missing_ok=True)
        self._pid = 0
        self._heard(ServedEngineNews(error=error or "the engine's process has exited"))

    def _hear_until_end(self, descriptor: int, news: int | None) -> str:
        """The error reported by the engine, "" if there is none."""
        error, lines = "", b""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if news is not None:
            poll.register(news, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if news in ready:
                data = os.read(news, 1 << 16) if news is not None else b""
                if not data:
                    poll.unregister(news)
                *complete, lines = (lines + data).split(b"\n")
                for line in complete:
                    said = msgspec.json.decode(line, type=ServedEngineNews)
                    error = said.error or error
                    if not said.error:
                        self._heard(said)
            elif descriptor in ready:
                return error


def end_engines(folder: Path) -> None:
    """Ends all engines of this machine after their actors. Blocks until they have ended."""
    files = list(folder.glob("engine-*.json"))
    running = [record.pid for file in files if (record := read_record(file)) is not None]
    for pid in running:
        _signal(pid, signal.SIGTERM)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            if not wait_readable(descriptor, _END_TIMEOUT_S):
                _signal(pid, signal.SIGKILL)
            os.close(descriptor)
    for file in files:
        file.unlink(missing_ok=True)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
