"""Hosts in processes of their own, and a relay that can stop forwarding between a frontend and a host."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from tests.helpers.server_process import ROOT


class HostProcess:
    """Ready once made."""

    def __init__(self, endpoint: str, repository: Path) -> None:
        command = [sys.executable, "-m", "tests.remote.host_process", endpoint, str(repository)]
        self.endpoint = endpoint
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n", "the host did not start"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def tell_to_end(self) -> None:
        """It ends when its requests have ended or moved."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def end(self) -> None:
        assert self.process.stdout is not None
        self.tell_to_end()
        self.process.wait()
        self.process.stdout.close()


@contextlib.contextmanager
def hosts(repository: Path, *endpoints: str) -> Iterator[list[HostProcess]]:
    """One for each endpoint."""
    started = [HostProcess(endpoint, repository) for endpoint in endpoints]
    try:
        for host in started:
            host.wait_until_ready()
        yield started
    finally:
        for host in started:
            host.end()


class Relay:
    """Forwards between unix sockets; after `cut` it forwards nothing, and closes nothing."""

    def __init__(self) -> None:
        self.is_cut = False

    def cut(self) -> None:
        self.is_cut = True

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not self.is_cut:
                writer.write(data)


@contextlib.asynccontextmanager
async def relayed(to: Path, at: Path) -> AsyncIterator[Relay]:
    """A relay that listens on the socket `at` for those who want to speak to the socket `to`."""
    relay = Relay()
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(to)
        writers.extend((writer, far_writer))
        for one, other in ((reader, far_writer), (far_reader, writer)):
            tasks.add(asyncio.create_task(relay.forward(one, other)))

    server = await asyncio.start_unix_server(accept, at)
    try:
        yield relay
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.close()
