"""Rounds in which the host dies: SIGKILL between two steps, after which another host takes over the same store.

Used by the runner. Independent of how responses are stored. Invariant: readers resume by cursor on whichever host is
available; everything they saw is compared with an undisturbed run on the stage's own server.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

from tests.helpers.server_process import ServerProcess, start_server

from .clients import StreamClient
from .clients.patience import Patience
from .clients.responses_api import ResponsesClient
from .load import Load
from .specs import StreamSpec
from .stage import Stage
from .table import Row

_PATIENCE_S = 120.0
"""For a host that is gone: the next one loads its models first."""
_LIVE = 12


class _Hosts:
    """One host after the other, on the models of a stage and on one store."""

    def __init__(self, stage: Stage, store: str) -> None:
        self._directory = stage.server.directory
        self._store = store
        self._process: ServerProcess | None = None

    @property
    def http(self) -> str:
        assert self._process is not None
        return self._process.http

    async def start(self) -> None:
        command = ("--model-repository", str(self._directory / "models"), "--response-store", self._store)
        with (self._directory / "hosts.log").open("a") as log:
            self._process = await asyncio.to_thread(start_server, *command, log=log)

    def kill(self) -> None:
        assert self._process is not None and self._process.process.stdout is not None
        self._process.process.kill()
        self._process.process.wait()
        self._process.process.stdout.close()


class _Readers:
    """Clients of whatever host there is."""

    def __init__(self, hosts: _Hosts) -> None:
        self._client = ResponsesClient(lambda: hosts.http, patience=Patience(_PATIENCE_S))

    def of(self, spec: StreamSpec) -> StreamClient:
        return self._client

    async def close(self) -> None:
        await self._client.close()


@contextlib.asynccontextmanager
async def _hosts(stage: Stage) -> AsyncIterator[_Hosts]:
    path: Path = stage.server.directory / "responses.sqlite"
    hosts = _Hosts(stage, f"sqlite:{path}")
    await hosts.start()
    try:
        yield hosts
    finally:
        hosts.kill()


async def host_deaths(stage: Stage, model: str, seed: int, times: int = 3) -> Row:
    """SIGKILL of the host while background responses are read; the readers go on behind what they have."""
    row = Row(f"SIGKILL of the host, its store stays ({model})")
    rng = random.Random(seed)
    specs = [spec for spec in stage.specs(model) if spec.protocol == "background"]
    async with _hosts(stage) as hosts:
        readers = _Readers(hosts)
        load = Load(readers, specs, _LIVE)
        async with load:
            for _ in range(times):
                await _until_flowing(load)
                await asyncio.sleep(rng.uniform(0.1, 0.8))
                hosts.kill()
                killed_s = time.monotonic()
                row.injected += 1
                await hosts.start()
                await _until_flowing(load)
                row.recoveries_s.append(time.monotonic() - killed_s)
        await readers.close()
    stage.judge(row, load.runs)
    return row


async def _until_flowing(load: Load, timeout_s: float = 90.0) -> None:
    """Until events come."""
    since_s = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while load.arrivals.count_after(since_s) < 2 * _LIVE:
            await asyncio.sleep(0.01)
