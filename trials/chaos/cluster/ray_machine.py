"""One machine of a Ray cluster: `llmbackend serve --cluster` at its own address, and everything that belongs to it.

Used by RayCluster. Independent of other machines and rounds. Invariant: processes are found from the outside (the
launcher's children, the run folder), anew each time, because the product restarts what was killed.
"""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmbackend.engine.process.served.served_order import EngineRecord
from llmbackend.server.frontend_server import STREAMS_COPIED
from tests.helpers.cluster import engines_of, head_of, processes_of, start_machine
from tests.helpers.ports import free_port
from tests.helpers.server_process import ServerProcess, stop_server

from .machine import what_is_held
from .processes import children_of, is_listening, is_there
from .returning import Address

NODE, HEAD, ACTOR = "raylet/raylet", "gcs/gcs_server", "ray::EngineActor"
AGENT, HOST = "llmbackend.cluster.agent", "llmbackend.cluster.host_process"
_FRONTEND = "llmbackend.server.frontend_process"


class RayMachine:
    """Its methods block."""

    def __init__(self, name: str, folder: Path, server: ServerProcess, *, is_head: bool) -> None:
        self.name = name
        self.is_head = is_head
        self.address = Address(server.http, server.grpc)
        self._folder = folder
        self._server = server

    @classmethod
    def start(
        cls, bind: str, folder: Path, secrets: Path, log: Path, arguments: Sequence[str], cluster: str = "auto"
    ) -> RayMachine:
        """Returns when it serves."""
        own = ("--cluster-bind", bind, "--cluster-cpus", "2", *arguments)
        with log.open("a") as lines:
            # A host that is started again has the port of the one before.
            server = start_machine(folder, secrets, *own, cluster=cluster, log=lines, metrics_port=free_port())
        return cls(bind, folder, server, is_head=cluster == "auto")

    @property
    def head(self) -> str:
        """The address at which others join."""
        return head_of(self._folder)

    def engines(self) -> list[EngineRecord]:
        """Those that run."""
        with contextlib.suppress(FileNotFoundError):  # one that ends just now
            return [one for one in engines_of(self._folder) if is_there(one.pid) and is_there(one.news.pid)]
        return []

    def of_ray(self, mark: str) -> list[int]:
        """Ids of processes that belong to this machine's Ray node."""
        return [pid for pid, command in processes_of(self._folder).items() if mark in command]

    def children(self, mark: str) -> list[int]:
        return [one.pid for one in children_of(self._server.process.pid, mark)]

    def listening(self) -> list[int]:
        """Frontends that take connections."""
        port = int(self.address.http.rpartition(":")[2])
        return [pid for pid in self.children(_FRONTEND) if is_listening(pid, port)]

    def what_is_missing(self) -> str:
        """Of what the machine consists of; "" for nothing."""
        missing = [mark for mark in (AGENT, HOST) if not self.children(mark)]
        missing += [mark for mark in ((NODE, HEAD) if self.is_head else (NODE,)) if not self.of_ray(mark)]
        if not self.listening():
            missing.append("a frontend")
        if not missing and not self._has_copies():
            missing.append("copies of its streams")
        return ", ".join(missing)

    def held(self) -> str:
        """What the host still has of requests, "" for nothing."""
        return what_is_held(self._metrics())

    def stop(self) -> int:
        return stop_server(self._server)

    def _has_copies(self) -> bool:
        try:
            return f"{STREAMS_COPIED} 1\n" in self._metrics()
        except OSError:  # the host is on its way
            return False

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self._server.metrics}/metrics", timeout=30) as answer:
            text: str = answer.read().decode()
        return text


@contextlib.contextmanager
def ended(machines: Sequence[RayMachine]) -> Iterator[None]:
    """The last one that came ends first. Raises RuntimeError for one that does not end in order."""
    try:
        yield
    finally:
        codes = {machine.name: machine.stop() for machine in reversed(machines)}
    if any(codes.values()):
        raise RuntimeError(f"exit codes of machines: {codes}, expected 0")
