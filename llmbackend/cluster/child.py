"""A child process of the launcher that is started again when it ends.

For: the launcher. Does not know: what it does. Invariants: after each end a pause, which grows while it ends soon; its
standard input stays open while the launcher lives, and tells it the launcher's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from subprocess import PIPE
from typing import Final

from llmbackend.fork_server.client import restart_pause_s

from ..server.process_end import in_thread
from ..server.readiness import READY_DESCRIPTOR

log = logging.getLogger(__name__)

LASTED_S: Final = 60.0
"""One that ran for so long is started again without a pause."""


class Child:
    """On the launcher's event loop."""

    def __init__(self, name: str, command: Sequence[str], order: Callable[[], bytes], environment: Mapping[str, str]):
        """order: what each process is told on its standard input."""
        self.name = name
        self._command = command
        self._order = order
        self._environment = environment
        self._is_stopping = False
        self._process: subprocess.Popen[bytes] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def start(self) -> bytes:
        """The first line of the first process on the descriptor of READY_DESCRIPTOR; b"" when it ended before that, and
        then it is not started again."""
        self._keeping = asyncio.create_task(self._keep())
        return await self._first

    @property
    def exit_code(self) -> int:
        """Of a process that has ended."""
        return 0 if self._process is None else self._process.returncode or 0

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, timeout_s: float) -> int:
        """Ends it in order, or else by force. Its exit code."""
        self._is_stopping = True
        self.signal(signal.SIGTERM)
        if self._keeping is not None:
            if not (await asyncio.wait((self._keeping,), timeout=timeout_s))[0]:
                log.warning("%s did not end in time and is killed", self.name)
                self.signal(signal.SIGKILL)
            await self._keeping
        return self.exit_code

    async def _keep(self) -> None:
        loop, num_failures = asyncio.get_running_loop(), 0
        while not self._is_stopping:
            began_s = loop.time()
            await self._run_once()
            if self._is_stopping or not self._first.result():
                return
            num_failures = 0 if loop.time() - began_s >= LASTED_S else num_failures + 1
            pause_s = restart_pause_s(num_failures - 1)
            log.error(
                "%s (process %d) ended with exit code %d; it is started again in %.1f s",
                *(self.name, self.pid, self.exit_code, pause_s),
            )
            await asyncio.sleep(pause_s)

    async def _run_once(self) -> None:
        reader, writer = os.pipe()
        # A session of its own: a Ctrl+C at the terminal is for the launcher, which ends this process.
        process = subprocess.Popen(
            self._command,
            stdin=PIPE,
            env={**self._environment, READY_DESCRIPTOR: str(writer)},
            pass_fds=(writer,),
            start_new_session=True,
        )
        os.close(writer)
        self._process = process
        assert process.stdin is not None
        with process.stdin as commands, contextlib.suppress(BrokenPipeError):
            commands.write(self._order())
            commands.flush()
            said = await in_thread(_read_line, reader)
            if not self._first.done():
                self._first.set_result(said)
            await in_thread(process.wait)
        await in_thread(process.wait)
        if not self._first.done():
            self._first.set_result(b"")


def _read_line(descriptor: int) -> bytes:
    with open(descriptor, "rb") as pipe:
        return pipe.readline()
