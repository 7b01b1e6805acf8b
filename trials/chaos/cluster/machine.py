"""One machine of a cluster without Ray: its host, and frontends that outlive it, as with the launcher.

Used by HostsCluster. Independent of engines and rounds. Invariant: a killed host is restarted immediately in the same
folder.
"""

from __future__ import annotations

import json
import pickle
import urllib.request
from pathlib import Path

from llmbackend.cluster.host_process import HostOrder
from llmbackend.cluster.launcher import MachineFrontends
from llmbackend.links.secrets import ClusterSecrets
from llmbackend.server.frontend_server import STREAMS_COPIED
from llmbackend.server.settings import ServerSettings

from .kept_process import KeptProcess
from .processes import is_listening, until
from .returning import Address

_ADDRESS = "127.0.0.1"
_HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


class Machine:
    """Made on the event loop."""

    def __init__(self, name: str, settings: ServerSettings, directory: Path, secrets: Path, log: Path) -> None:
        self.name = name
        folder, keys = directory / name, ClusterSecrets.load(secrets)
        self.agent = directory / f"{name}.sock"
        self.frontends = MachineFrontends(settings, folder, keys)
        self._secrets = secrets
        self._urls: dict[str, str] = {}
        """Of the host that runs; {} while it starts."""
        module = "llmbackend.cluster.host_process"
        self.host = KeptProcess(f"host of {name}", module, self._order, self._heard, log)

    @property
    def address(self) -> Address:
        return Address(f"{_ADDRESS}:{self.frontends.http_port}", f"{_ADDRESS}:{self.frontends.grpc_port}")

    @property
    def has_host(self) -> bool:
        return bool(self._urls and self.host.pid)

    async def start(self) -> None:
        """Returns when it serves."""
        self.frontends.processes.start()
        self.host.start()
        await until(lambda: self.has_host, f"{self.host.name} serves")
        await self.frontends.processes.serve()

    def listening(self) -> list[int]:
        """Frontend processes that take connections."""
        port = self.frontends.http_port or 0
        return [pid for pid in self.frontends.processes.pids if is_listening(pid, port)]

    def held(self) -> str:
        """What the host still has of requests, "" for nothing."""
        return what_is_held(self._metrics())

    def metric(self, name: str) -> float:
        """Of all models of its host. Blocks."""
        lines = self._metrics().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))

    def has_copies(self) -> bool:
        """Whether another host has copies of its resumable streams. Blocks."""
        try:
            return f"{STREAMS_COPIED} 1\n" in self._metrics()
        except (OSError, KeyError):  # it has just been killed
            return False

    def _metrics(self) -> str:
        with urllib.request.urlopen(self._urls["metrics"], timeout=30) as answer:
            text: str = answer.read().decode()
        return text

    async def stop(self) -> int:
        """The exit code of the host."""
        await self.frontends.stop(5.0)
        return await self.host.stop()

    def _order(self) -> bytes:
        self._urls = {}
        settings = self.frontends.host_settings
        return pickle.dumps(HostOrder(settings, self.agent, self._secrets, self.name, _ADDRESS))

    async def _heard(self, line: bytes) -> None:
        if line.startswith(b'{"'):
            self._urls = json.loads(line)


def what_is_held(metrics: str) -> str:
    """By a host with these metrics; "" for nothing."""
    lines = [line for line in metrics.splitlines() if line.startswith(_HELD)]
    busy = [line for line in lines if float(line.rpartition(" ")[2])]
    return "; ".join(busy) if lines else "no metrics of engines"
