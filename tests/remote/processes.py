"""Hosts in processes of their own, and relays that can stop forwarding between a frontend and a host."""

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
    """Forwards between sockets; after `cut` it forwards nothing, and closes nothing."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.is_cut = False

    def cut(self) -> None:
        self.is_cut = True

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not self.is_cut:
                writer.write(data)


@contextlib.asynccontextmanager
async def relayed(to: str, folder: Path) -> AsyncIterator[Relay]:
    """A relay at an endpoint of its own, for those who want to speak to the endpoint `to`; of the same kind."""
    relay = Relay()
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await _connect(to)
        writers.extend((writer, far_writer))
        for one, other in ((reader, far_writer), (far_reader, writer)):
            tasks.add(asyncio.create_task(relay.forward(one, other)))

    if to.startswith("ipc://"):
        relay.endpoint = f"ipc://{folder}/relay"
        server = await asyncio.start_unix_server(accept, folder / "relay")
    else:
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        relay.endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield relay
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.close()


async def _connect(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    kind, address = endpoint.split("://")
    if kind == "ipc":
        return await asyncio.open_unix_connection(address)
    name, port = address.split(":")
    return await asyncio.open_connection(name, int(port))
