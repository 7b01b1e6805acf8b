"""Two machines on Ray, as users start them: two addresses of this computer, with one Ray node each.

Used by the acts. Independent of rounds. Invariants: nothing here restarts what was killed; links are not cut, because
Ray chooses its own ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from llmbackend.cluster.secrets_folder import SecretsFolder
from tests.helpers.cluster import run_folder

from ..server import ModelSetup, write_model
from .hosts_cluster import BUSY_TIMEOUT_S, KEEPER_SHARE
from .kills import Ends, Kill, Kind
from .processes import until_in_thread
from .ray_machine import ACTOR, HEAD, HOST, NODE, RayMachine, ended
from .returning import Address
from .shared_store import shared_store

ADDRESSES = ("127.0.0.2", "127.0.0.3")
WHOLE_TIMEOUT_S = 300.0
"""Members notice within a minute that their head is another one, and start their nodes anew."""


class RayCluster:
    def __init__(self, machines: Sequence[RayMachine], num_engines: int) -> None:
        self._machines = machines
        self._num_engines = num_engines

    @property
    def addresses(self) -> list[Address]:
        return [machine.address for machine in self._machines]

    async def until_whole(self) -> None:
        await until_in_thread(lambda: not self._missing(), self._missing, WHOLE_TIMEOUT_S)

    def _missing(self) -> str:
        """Engines may be more than are wanted: where an actor went to another machine, hosts still use the one that it
        had."""
        missing = [f"{one.name}: {what}" for one in self._machines if (what := one.what_is_missing())]
        counts = {
            "engines": sum(len(machine.engines()) for machine in self._machines),
            "actors of engines": sum(len(machine.of_ray(ACTOR)) for machine in self._machines),
        }
        missing += [f"{count} {what}" for what, count in counts.items() if count < self._num_engines]
        return "; ".join(missing)

    async def strike(self, kind: Kind, rng: random.Random) -> Kill:
        return await asyncio.to_thread(self._strike, kind, rng)

    def _strike(self, kind: Kind, rng: random.Random) -> Kill:
        victims, ends = self._victims(kind, rng), Ends.NONE
        if not victims:
            raise RuntimeError(f"no process of the kind '{kind}' runs")
        if kind is Kind.HOST:
            ends = Ends.PASSED_ON
        elif kind is Kind.FRONTEND:
            ends = Ends.ALL
        name, pid = rng.choice(sorted(victims))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        now_s = time.monotonic()
        return Kill(kind, now_s, now_s, f"of {name} ({pid})", ends)

    def _victims(self, kind: Kind, rng: random.Random) -> list[tuple[str, int]]:
        """(machine, process id) of each."""
        is_keeper = kind is Kind.ENGINE and rng.random() < KEEPER_SHARE
        return [(machine.name, pid) for machine in self._machines for pid in _pids(machine, kind, is_keeper)]

    async def still_busy(self) -> str:
        deadline_s = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            held = [f"{one.name}: {found}" for one in self._machines if (found := await asyncio.to_thread(one.held))]
            if not held or time.monotonic() > deadline_s:
                return "; ".join(held)
            await asyncio.sleep(0.2)


def _pids(machine: RayMachine, kind: Kind, is_keeper: bool) -> list[int]:
    match kind:
        case Kind.NODE:
            return [] if machine.is_head else machine.of_ray(NODE)  # the head ends with its node
        case Kind.HEAD:
            return machine.of_ray(HEAD)
        case Kind.ACTOR:
            return machine.of_ray(ACTOR)
        case Kind.HOST:
            return machine.children(HOST)
        case Kind.FRONTEND:
            return machine.listening()
        case _:
            return [engine.pid if is_keeper else engine.news.pid for engine in machine.engines()]


@contextlib.asynccontextmanager
async def ray_cluster(model: ModelSetup) -> AsyncIterator[RayCluster]:
    """With stored responses in Redis. The directory, with the log, is kept when a round raises."""
    directory = Path(tempfile.mkdtemp(prefix="llmb-chaos-"))
    write_model(directory, model)
    secrets, log = SecretsFolder.create(directory / "secrets").path, directory / "cluster.log"
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(shared_store(directory))
        folders = [stack.enter_context(run_folder()) for _ in ADDRESSES]
        arguments = ("--model-repository", str(directory / "models"), "--response-store", store)
        machines: list[RayMachine] = []
        stack.enter_context(ended(machines))
        try:
            for bind, folder in zip(ADDRESSES, folders, strict=True):
                joins = machines[0].head if machines else "auto"
                start = RayMachine.start
                machines.append(await asyncio.to_thread(start, bind, folder, secrets, log, arguments, joins))
            yield RayCluster(machines, model.instances)
        except BaseException:
            print(f"the cluster's log: {log}")
            raise
    shutil.rmtree(directory)
