"""Engines, and a replacement for Ray and its agents that tells hosts where the engines are. Each host reaches each
engine over its own link, which can be cut.

Used by clusters without Ray. Independent of hosts' requests. Invariants: hosts talk to it as to an agent
(llmbackend/cluster/messages.py); hosts with equal engine configurations share engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from llmbackend.cluster.messages import (
    EngineLocation,
    FromAgent,
    FromHost,
    HostAddress,
    HostServing,
    Peers,
    WantedEngine,
    Wants,
)
from llmbackend.engine.process.served.served_order import ServedEngineNews, ServedEngineOrder

from .kept_process import KeptProcess
from .links import Links

_LINE_BYTES = 1 << 22
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(FromHost).decode


def _short(key: str) -> str:
    """For people, and still of one engine: several models may have the same checkpoint."""
    kind, digest, index = key.split("-")
    return f"{kind}-{digest[:6]}-{index}"


class Engine:
    """One engine and its keeper."""

    def __init__(self, wanted: WantedEngine, engines: Engines) -> None:
        self.key = wanted.key
        self.name = f"{_short(wanted.key)} ({Path(wanted.config.model).name})"
        self.news = ServedEngineNews()
        self._engines = engines
        order = ServedEngineOrder(
            config=wanted.config,
            secrets_folder=str(engines.secrets),
            node="this machine",
            heartbeat_timeout_s=engines.heartbeat_timeout_s,
        )
        line = msgspec.json.encode(order) + b"\n"
        module = "llmbackend.engine.process.served.served_engine"
        self.keeper = KeptProcess(self.name, module, lambda: line, self._heard, engines.log)
        self.keeper.start()

    async def _heard(self, line: bytes) -> None:
        self.news = msgspec.json.decode(line, type=ServedEngineNews)
        if self.news.error:
            raise RuntimeError(f"{self.name}: {self.news.error}")
        await self._engines.changed(self)

    def link_of(self, host: str) -> str:
        return f"{host} - {self.name}"

    async def state_for(self, host: str) -> EngineLocation | None:
        """None: it is not up."""
        if not self.news.port:
            return None
        port = await self._engines.links.lead(self.link_of(host), self.news.port)
        return EngineLocation(
            self.key, time.time_ns(), f"tcp://127.0.0.1:{port}", self.news.incarnation, "this machine"
        )


@dataclass
class Engines:
    """All engines of a cluster, and the agents of its hosts. Used on one event loop."""

    secrets: Path
    log: Path
    links: Links
    heartbeat_timeout_s: float
    all: dict[str, Engine] = field(default_factory=dict)
    _hosts: dict[str, asyncio.StreamWriter] = field(default_factory=dict)
    _endpoints: dict[str, str] = field(default_factory=dict)
    _wanted: dict[str, set[str]] = field(default_factory=dict)
    _servers: list[asyncio.Server] = field(default_factory=list)

    async def open_agent(self, host: str, socket: Path) -> None:
        """Listens for this host."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._hosts[host] = writer
            with contextlib.suppress(ConnectionError), contextlib.closing(writer):
                async for line in reader:
                    message = _decode(line)
                    if isinstance(message, Wants):
                        await self._take(host, message)
                    elif isinstance(message, HostServing):
                        self._endpoints[host] = message.endpoint
                        await self._tell_peers()

        self._servers.append(await asyncio.start_unix_server(serve, socket, limit=_LINE_BYTES))

    async def _take(self, host: str, wants: Wants) -> None:
        self._wanted[host] = {wanted.key for wanted in wants.engines}
        for wanted in wants.engines:
            if wanted.key not in self.all:
                self.all[wanted.key] = Engine(wanted, self)
            await self._tell(host, self.all[wanted.key])

    async def changed(self, engine: Engine) -> None:
        for host in self.hosts_of(engine):
            await self._tell(host, engine)

    async def _tell_peers(self) -> None:
        """Each host of the others, behind a link of its own."""
        for host in list(self._hosts):
            others = [other for other in self._endpoints if other != host]
            peers = [HostAddress(other, await self._linked(host, other)) for other in others]
            self.tell(host, Peers(tuple(peers)))

    async def _linked(self, host: str, other: str) -> str:
        port = int(self._endpoints[other].rpartition(":")[2])
        return f"tcp://127.0.0.1:{await self.links.lead(_between(host, other), port)}"

    def link_names(self) -> list[str]:
        """Those that can be cut."""
        of_engines = [engine.link_of(host) for engine in self.all.values() for host in self.hosts_of(engine)]
        of_hosts = [_between(host, other) for host in self._endpoints for other in self._endpoints if host != other]
        return of_engines + of_hosts

    def links_of(self, host: str) -> list[str]:
        """All that it has to engines and to other hosts."""
        of_engines = [engine.link_of(host) for engine in self.all.values() if host in self.hosts_of(engine)]
        others = [other for other in self._endpoints if other != host]
        return of_engines + [name for other in others for name in (_between(host, other), _between(other, host))]

    def hosts_of(self, engine: Engine) -> list[str]:
        return [host for host, wanted in self._wanted.items() if engine.key in wanted]  # a copy: it changes meanwhile

    async def _tell(self, host: str, engine: Engine) -> None:
        if (state := await engine.state_for(host)) is not None:
            self.tell(host, state)

    def tell(self, host: str, message: FromAgent) -> None:
        if host in self._hosts:
            self._hosts[host].write(_encode(message) + b"\n")

    async def close(self) -> list[int]:
        """Exit codes of the keepers."""
        for server in self._servers:
            server.close()
        for writer in self._hosts.values():
            writer.close()
        return list(await asyncio.gather(*(engine.keeper.stop() for engine in self.all.values())))


def _between(host: str, other: str) -> str:
    return f"{host} - host of {other}"
