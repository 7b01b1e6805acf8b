"""Hosts in one process whose frontends share an event loop and reach each other by calls, which can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from llmbackend.core.errors import unavailable
from llmbackend.core.inference_server import InferenceServer
from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.access.keyed_server import KeyedServer
from llmbackend.frontends.grpc import resumable
from llmbackend.frontends.journals.resumable_streams import regenerate
from llmbackend.frontends.journals.stream_copies import StreamCopies
from tests.helpers.kserve_runner import Running
from tests.helpers.mock_llm_host import mock_llm_host
from tests.helpers.waiting import eventually

Handler = Callable[[str, bytes], Awaitable[bytes]]


class Network:
    """Who can reach whom."""

    def __init__(self) -> None:
        self.handlers: dict[tuple[str, str], Handler] = {}
        self.down: set[str] = set()
        self.known: list[str] = []
        self.num_calls = 0
        self.watchers: list[Callable[[], object]] = []

    def peers(self, host: str) -> LinkedPeers:
        self.known.append(host)
        self.tell()
        return LinkedPeers(self, host)

    def tell(self) -> None:
        """All hosts look who there is. What is cut they notice by the next call."""
        for watcher in self.watchers:
            watcher()


class LinkedPeers:
    """Peers of one host. A host may be on another event loop."""

    def __init__(self, network: Network, host: str) -> None:
        self._network = network
        self._host = host
        self._loops: dict[str, asyncio.AbstractEventLoop] = {}

    def live(self) -> Sequence[str]:
        network = self._network
        return [one for one in network.known if one != self._host and one not in network.down]

    def are_all_live(self) -> bool:
        return len(self.live()) == len(self._network.known) - 1

    def on_change(self, callback: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._network.watchers.append(lambda: loop.call_soon_threadsafe(callback))

    async def call(self, peer: str, topic: str, payload: bytes) -> bytes:
        network = self._network
        network.num_calls += 1
        handler = network.handlers[peer, topic]
        await asyncio.sleep(0.001)
        if {self._host, peer} & network.down:
            raise unavailable(f"host '{peer}' is gone")
        return await handler(self._host, payload)

    def on_call(self, topic: str, handler: Handler) -> None:
        loop: asyncio.AbstractEventLoop | None = None

        async def answer(peer: str, payload: bytes) -> bytes:
            if loop is None or loop is asyncio.get_running_loop():
                return await handler(peer, payload)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_run(handler, peer, payload), loop))

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        self._network.handlers[self._host, topic] = answer


async def _run(handler: Handler, peer: str, payload: bytes) -> bytes:
    return await handler(peer, payload)


class Hosts:
    """Three hosts; "a" has the streams."""

    def __init__(self, root: Path, access: AccessControl | None = None, **engine: Any) -> None:
        self.network = Network()
        self.all = {name: self._host(root / name, name, access, engine) for name in ("a", "b", "c")}

    def _host(self, root: Path, name: str, access: AccessControl | None, engine: dict[str, Any]) -> Running:
        kind = InferenceServer if access is None else KeyedServer
        running = Running(root, start=mock_llm_host, access=access, engine=engine, kind=kind)
        running.call(self._link(running, name))
        return running

    async def _link(self, running: Running, name: str) -> None:
        makers = {
            resumable.PATH: partial(resumable.regenerate, running.gate, running.streams),
            "/": partial(regenerate, running.app),
        }
        running.streams.copies = StreamCopies(self.network.peers(name), makers, running.streams.hand_over)

    def copies(self, name: str) -> StreamCopies:
        copies = self.all[name].streams.copies
        assert isinstance(copies, StreamCopies)
        return copies

    def client(self, name: str) -> httpx.Client:
        return httpx.Client(base_url=f"http://{self.all[name].http}", timeout=30)

    def reset(self) -> None:
        """All reach each other again, and have no streams."""
        self.network.down.clear()
        self.network.tell()
        for running in self.all.values():
            running.call(running.streams.close())
            eventually(lambda running=running: not running.gate.open_inferences)  # type: ignore[misc]
        for name in self.all:
            eventually(lambda name=name: self.copies(name)._flushing is None)  # type: ignore[misc]

    def stop(self) -> None:
        self.network.down.update(self.all)
        for running in self.all.values():
            running.stop()
