"""One machine: `llmbackend serve --frontend-processes N`, whose process is the host, with engines as its children.

Used by the acts. Independent of rounds. Invariant: only frontends and engines are killed, because the host's death ends
everything.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence

from ..server import ModelSetup, ServerUnderTest, running
from .kills import Ends, Kill, Kind
from .processes import children_of, is_listening, until
from .returning import Address

_FRONTEND = "llmbackend.server.frontend_process"


class FrontendsCluster:
    def __init__(self, server: ServerUnderTest, models: Sequence[ModelSetup], frontends: int) -> None:
        self.server = server
        self._engines = {model.name: model.instances for model in models}
        self._frontends = frontends

    @property
    def addresses(self) -> list[Address]:
        return [Address(self.server.address.http, self.server.address.grpc)]

    async def until_whole(self) -> None:
        await until(lambda: len(self._listening()) == self._frontends, "all frontends listen")
        for model, count in self._engines.items():
            await until(lambda: len(self.server.engine_pids(model)) >= count, f"{model} has all engines")  # noqa: B023

    async def strike(self, kind: Kind, rng: random.Random) -> Kill:
        if kind is Kind.FRONTEND:
            await until(lambda: len(self._listening()) > 1, "another frontend listens")
            pids = self._listening()
        else:
            pids = [pid for model in self._engines for pid in self.server.engine_pids(model)]
        if not pids:
            raise RuntimeError(f"no process of the kind {kind.name} runs")
        pid = rng.choice(pids)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        now_s = time.monotonic()
        return Kill(kind, now_s, now_s, str(pid), Ends.ALL if kind is Kind.FRONTEND else Ends.NONE)

    async def still_busy(self) -> str:
        return "; ".join([reason for model in self._engines if (reason := await self.server.still_busy(model))])

    def _listening(self) -> list[int]:
        port = int(self.server.address.http.rpartition(":")[2])
        return [one.pid for one in children_of(self.server.pid, _FRONTEND) if is_listening(one.pid, port)]


@contextlib.asynccontextmanager
async def frontends_cluster(models: Sequence[ModelSetup], frontends: int = 2) -> AsyncIterator[FrontendsCluster]:
    """Raises RuntimeError when the server does not end as it should, or leaves processes behind."""
    arguments = ("--frontend-processes", str(frontends))
    async with running(*models, arguments=arguments) as server:
        yield FrontendsCluster(server, models, frontends)
        server.remember_processes()
        server.terminate()
        if code := await server.exit_code():
            raise RuntimeError(f"the server ended with exit code {code}, expected 0")
        if left := await server.processes_left():
            raise RuntimeError(f"processes outlived the server: {left}")
