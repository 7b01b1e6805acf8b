"""A process of a cluster that is restarted immediately when it ends: like a launcher, but without pauses.

Used by clusters whose processes are started here. Independent of what the process does. Invariants: its standard input
stays open until it should end; its standard error goes to the cluster's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from llmbackend.server.process import READY_DESCRIPTOR

_END_TIMEOUT_S = 60.0


class KeptProcess:
    """On the event loop. `python -m module`, which is told `order()` on its standard input.

    heard: awaited with each line that it writes on the descriptor of READY_DESCRIPTOR, or on its standard output
    """

    def __init__(
        self,
        name: str,
        module: str,
        order: Callable[[], bytes],
        heard: Callable[[bytes], Awaitable[None]],
        log: Path,
        options: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.num_started = 0
        self._command = [sys.executable, "-m", module, *options]
        self._order = order
        self._heard = heard
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._is_stopping = False
        self.exit_codes: list[int] = []

    @property
    def pid(self) -> int:
        """0 while there is none."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        self._keeping = asyncio.create_task(self._keep())

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)

    async def stop(self) -> int:
        """Ends it in order; its exit code."""
        self._is_stopping = True
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
        if self._keeping is not None:
            done, _ = await asyncio.wait((self._keeping,), timeout=_END_TIMEOUT_S)
            if not done:
                self.kill()
            await self._keeping
        return self.exit_codes[-1] if self.exit_codes else 0

    async def _keep(self) -> None:
        while not self._is_stopping:
            self.exit_codes.append(await self._run_once())

    async def _run_once(self) -> int:
        reader, writer = os.pipe()
        environment = os.environ | {READY_DESCRIPTOR: str(writer), "NO_COLOR": "1"}
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=writer,
                stderr=log,
                env=environment,
                pass_fds=(writer,),
                start_new_session=True,
            )
        os.close(writer)
        self._process, self.num_started = process, self.num_started + 1
        hearing = asyncio.create_task(self._hear(reader))
        assert process.stdin is not None
        with process.stdin, contextlib.suppress(BrokenPipeError):
            process.stdin.write(self._order())
            process.stdin.flush()
            await _ended(process.pid)
            code = process.wait()
        self._process = None
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        return code

    async def _hear(self, descriptor: int) -> None:
        stream = asyncio.StreamReader()
        pipe = os.fdopen(descriptor, "rb")
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), pipe
        )
        try:
            async for line in stream:
                await self._heard(line)
        finally:
            transport.close()


async def _ended(pid: int) -> None:
    """Without a thread: a cluster has more processes than an event loop has threads."""
    loop, descriptor = asyncio.get_running_loop(), os.pidfd_open(pid)
    ended = loop.create_future()
    loop.add_reader(descriptor, ended.set_result, None)
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
