"""Several machines whose hosts share engines over TCP, all started here: a cluster without Ray.

Used by the acts. Independent of rounds. Invariant: each link between machines, and between a host and an engine, can be
cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from llmbackend.core.server_options import ServerOptions
from llmbackend.engine.process.served.locating import ENGINE_HEARTBEAT_TIMEOUT_S
from llmbackend.frontends.journals.store_settings import StoreSettings
from llmbackend.links.secrets import ClusterSecrets
from llmbackend.server.ports import Endpoint
from llmbackend.server.settings import ServerSettings

from ..server import ModelSetup, write_model
from .kills import Ends, Kill, Kind
from .links import Links
from .machine import Machine
from .processes import is_there, until, until_in_thread
from .returning import Address
from .shared_store import shared_store
from .stand_in_agent import Engines

CUT_S = (0.5, 2 * ENGINE_HEARTBEAT_TIMEOUT_S)
PARTITION_S = (4.0, 12.0)
KEEPER_SHARE = 0.2
"""Of kills of engines, those of the process that keeps one, which ends with it."""
BUSY_TIMEOUT_S = 30.0


class HostsCluster:
    def __init__(self, machines: Sequence[Machine], engines: Engines, num_engines: int) -> None:
        self.machines = machines
        self._engines = engines
        self._num_engines = num_engines
        self._healing: set[asyncio.Task[None]] = set()

    @property
    def addresses(self) -> list[Address]:
        return [machine.address for machine in self.machines]

    async def until_whole(self) -> None:
        for machine in self.machines:
            await until(lambda: machine.has_host, f"{machine.host.name} serves")  # noqa: B023
            await until(lambda: bool(machine.listening()), f"a frontend of {machine.name} listens")  # noqa: B023
        await until(lambda: len(self._engines.all) == self._num_engines, "all engines are wanted")
        for engine in self._engines.all.values():
            await until(lambda: engine.news.port > 0 and is_there(engine.news.pid), f"{engine.name} runs")  # noqa: B023
        for machine in self.machines:
            await until_in_thread(machine.has_copies, f"the streams of {machine.host.name} are copied")

    async def strike(self, kind: Kind, rng: random.Random) -> Kill:
        if kind is Kind.CUT:
            link = rng.choice(self._engines.link_names())
            return await self._cut(kind, link, [link], rng.uniform(*CUT_S))
        if kind is Kind.PARTITION:
            host = rng.choice(self.machines).name
            return await self._cut(kind, host, self._engines.links_of(host), rng.uniform(*PARTITION_S))
        if kind is Kind.HOST:
            await until(lambda: sum(machine.has_host for machine in self.machines) > 1, "another host serves")
            machine = rng.choice([machine for machine in self.machines if machine.has_host])
            machine.host.kill()
            return _now(kind, machine.host.name, Ends.PASSED_ON)
        if kind is Kind.FRONTEND:
            await until(lambda: len(self._listening()) > 1, "another frontend listens")
            return _killed(kind, rng.choice(self._listening()), "frontend", Ends.ALL)
        engine = rng.choice(list(self._engines.all.values()))
        if rng.random() < KEEPER_SHARE:
            engine.keeper.kill()
            return _now(kind, f"keeper of {engine.name}")
        return _killed(kind, engine.news.pid, engine.name)

    def _listening(self) -> list[int]:
        return [pid for machine in self.machines for pid in machine.listening()]

    async def _cut(self, kind: Kind, victim: str, links: Sequence[str], seconds: float) -> Kill:
        """Streams of a host that is cut off can be resumed elsewhere once it is back."""
        for link in links:
            await self._engines.links.cut(link)
        task = asyncio.create_task(self._heal(links, seconds))
        self._healing.add(task)
        task.add_done_callback(self._healing.discard)
        now_s = time.monotonic()
        return Kill(kind, now_s, now_s + seconds, victim, Ends.ALL if kind is Kind.PARTITION else Ends.NONE)

    async def _heal(self, links: Sequence[str], seconds: float) -> None:
        await asyncio.sleep(seconds)
        for link in links:
            await self._engines.links.heal(link)

    async def still_busy(self) -> str:
        deadline_s = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            held = [f"{one.name}: {found}" for one in self.machines if (found := await asyncio.to_thread(one.held))]
            if not held or time.monotonic() > deadline_s:
                return "; ".join(held)
            await asyncio.sleep(0.2)

    async def close(self) -> None:
        """Raises RuntimeError for a process that does not end in order."""
        await asyncio.gather(*self._healing)
        codes = await asyncio.gather(*(machine.stop() for machine in self.machines))
        codes += await self._engines.close()
        await self._engines.links.close()
        if any(codes):
            raise RuntimeError(f"exit codes of hosts and engines: {codes}, expected 0")


def _killed(kind: Kind, pid: int, victim: str, ends: Ends = Ends.NONE) -> Kill:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return _now(kind, f"{victim} ({pid})", ends)


def _now(kind: Kind, victim: str, ends: Ends = Ends.NONE) -> Kill:
    now_s = time.monotonic()
    return Kill(kind, now_s, now_s, victim, ends)


@contextlib.asynccontextmanager
async def hosts_cluster(models: Sequence[ModelSetup], num_machines: int = 3) -> AsyncIterator[HostsCluster]:
    """With stored responses in Redis. The directory, with the log, is kept when a round raises."""
    directory = Path(tempfile.mkdtemp(prefix="llmb-chaos-"))
    for model in models:
        write_model(directory, model)
    secrets, log = directory / "secrets", directory / "cluster.log"
    ClusterSecrets.create(secrets)
    engines = Engines(secrets, log, Links(), ENGINE_HEARTBEAT_TIMEOUT_S)
    any_port = Endpoint("127.0.0.1", 0)
    with shared_store(directory) as store, _logging_to(log):
        settings = ServerSettings(
            options=ServerOptions(model_repositories=(directory / "models",)),
            http=any_port,
            grpc=any_port,
            metrics=any_port,
            store=StoreSettings(url=store),
        )
        names = [f"m{number}" for number in range(1, num_machines + 1)]
        machines = [Machine(name, settings, directory, secrets, log) for name in names]
        cluster = HostsCluster(machines, engines, sum(model.instances for model in models))
        await engines.links.start()
        try:
            for machine in machines:
                await engines.open_agent(machine.name, machine.agent)
            await asyncio.gather(*(machine.start() for machine in machines))
            yield cluster
        except BaseException:
            print(f"the cluster's log: {log}")
            with contextlib.suppress(RuntimeError):
                await cluster.close()
            raise
        await cluster.close()
    shutil.rmtree(directory)


@contextlib.contextmanager
def _logging_to(log: Path) -> Iterator[None]:
    """What is logged here: lines of frontends, which are children of this process."""
    handler, root = logging.FileHandler(log), logging.getLogger("llmbackend")
    root.addHandler(handler)
    propagates, root.propagate = root.propagate, False
    try:
        yield
    finally:
        root.propagate = propagates
        root.removeHandler(handler)
        handler.close()
