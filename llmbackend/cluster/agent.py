"""`python -m llmbackend.cluster.agent`: this machine's Ray driver, which connects its host with the cluster.

Started and restarted by the launcher. A separate process, because Ray ends its drivers when the head is away for long,
which hosts must survive. Independent of tokens. Invariants: it ends when its standard input closes; it reports its
start or its refusal as a line of JSON on the descriptor READY_DESCRIPTOR.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Final

import msgspec
import ray
import ray.exceptions

from llmbackend.server.process import take_ready_descriptor

from .engine_watch import NAME as REGISTRY
from .engine_watch import EngineWatch, HostRegistry
from .messages import AgentNews, AgentOrder, FromAgent, FromHost, HostAddress, HostServing, Peers, Wants
from .rank_actors import DETACHED, NAMESPACE, answer

log = logging.getLogger(__name__)

LEAVE_TIMEOUT_S: Final = 5.0
RETRY_S: Final = 1.0
HOST_RESTARTS_S: Final = 120.0
"""How long engines stay loaded for the successor of a dead host."""
MAX_FAILURES: Final = 3
"""After this many consecutive failures to read the list of hosts, RETRY_S apart, the agent ends."""
LINE_BYTES: Final = 1 << 22
_decode = msgspec.json.Decoder(FromHost).decode
_encode = msgspec.json.Encoder().encode


class Agent:
    """Used on one event loop."""

    def __init__(self, order: AgentOrder) -> None:
        self._order = order
        self._me = order.host
        """The address of the current host, as the cluster knows it."""
        self._host: asyncio.StreamWriter | None = None
        self._engines: dict[str, EngineWatch] = {}
        self._wanted: set[str] = set()
        """Keys requested by the current host; `_engines` may also contain those of its predecessor."""
        self._peers: tuple[HostAddress, ...] | None = None
        """None = the cluster's list has not been read yet."""
        self._registry: Any = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def join(self) -> str:
        """Why the cluster refuses this machine; "" = accepted."""
        self._registry = ray.remote(HostRegistry).options(name=REGISTRY, num_cpus=0, **DETACHED).remote()
        host, versions = (msgspec.msgpack.encode(part) for part in (self._me, self._order.versions))
        refusal: str = await answer(self._registry.join.remote(host, versions, self._order.key_name))
        return refusal

    async def run(self) -> None:
        """Serves the host until this task is cancelled, then releases its engines. Raises RayError if Ray no longer
        answers; the next agent connects to the next node."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._order.socket)
        server = await asyncio.start_unix_server(self._serve_host, self._order.socket, limit=LINE_BYTES)
        try:
            await self._watch_peers()
        except asyncio.CancelledError:
            await self._leave()
            raise
        finally:
            server.close()

    async def _leave(self) -> None:
        calls = [watch.release() for watch in self._engines.values()]
        with contextlib.suppress(TimeoutError):
            leaving = answer(self._registry.leave.remote(self._order.host.id))
            await asyncio.wait_for(asyncio.gather(leaving, *calls, return_exceptions=True), LEAVE_TIMEOUT_S)

    async def _serve_host(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """There is one host at a time; the next one connects after the last one has died."""
        self._host, self._wanted = writer, set()
        asyncio.get_running_loop().call_later(HOST_RESTARTS_S, self._release_left, writer)
        if self._peers is not None:
            self._tell(Peers(self._peers))
        with contextlib.suppress(ConnectionError):
            async for line in reader:
                message = _decode(line)
                if isinstance(message, HostServing):
                    self._run(self._join_with(message.endpoint))
                else:
                    self._set_wants(message)
        if self._host is writer:
            self._host = None
            self._run(self._join_with(""))
        writer.close()

    async def _join_with(self, endpoint: str) -> None:
        self._me = msgspec.structs.replace(self._me, endpoint=endpoint)
        with contextlib.suppress(ray.exceptions.RayError):  # `_watch_peers` joins again
            await self.join()

    def _set_wants(self, wants: Wants) -> None:
        wanted = {engine.key: engine for engine in wants.engines}
        self._release(self._wanted - wanted.keys())
        asked = wanted.keys() - self._wanted
        self._wanted = set(wanted)
        for key in asked:
            if (watch := self._engines.get(key)) is None:
                self._engines[key] = EngineWatch(wanted[key], self._order.host.id, self._tell)
            elif watch.state is not None:  # only the previous host has been told
                self._tell(watch.state)

    def _release_left(self, writer: asyncio.StreamWriter) -> None:
        """Releases engines of the previous host that the host of `writer` has not requested."""
        if self._host is writer:
            self._release(self._engines.keys() - self._wanted)

    def _release(self, keys: Iterable[str]) -> None:
        for key in keys:
            watch = self._engines.pop(key)
            watch.stop()
            self._run(watch.release())

    def _tell(self, message: FromAgent) -> None:
        if self._host is not None:
            self._host.write(_encode(message) + b"\n")

    async def _watch_peers(self) -> None:
        version, num_failures = 0, 0
        while True:
            try:
                version, hosts = await answer(self._registry.watch.remote(self._order.host.id, version))
                peers = tuple(msgspec.msgpack.decode(host, type=HostAddress) for host in hosts)
                if self._me not in peers and (refusal := await self.join()):
                    log.error("%s", refusal)
                if (others := _others(self._me, peers)) != self._peers:
                    self._peers = others
                    self._tell(Peers(others))
                num_failures = 0
            except ray.exceptions.RayError as error:
                num_failures += 1
                if num_failures > MAX_FAILURES:
                    raise
                log.warning("the cluster's list of hosts cannot be read: %s", error)
                await asyncio.sleep(RETRY_S)

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _others(me: HostAddress, peers: Sequence[HostAddress]) -> tuple[HostAddress, ...]:
    """Ordered differently on each host, so that frontends do not all choose the same one."""
    others = (peer for peer in peers if peer.id != me.id)
    return tuple(sorted(others, key=lambda peer: (peer.id < me.id, peer.id)))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="agent %(process)d %(levelname)s %(message)s")
    ready_descriptor = take_ready_descriptor()
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=AgentOrder)
    try:
        ray.init(
            address=order.address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address=order.bind,
        )
        code = asyncio.run(_run(order, ready_descriptor))
    except (RuntimeError, ConnectionError, ray.exceptions.RayError) as error:
        _say(AgentNews(error=f"the Ray at {order.address} cannot be used: {error}"), ready_descriptor)
        code = 2
    os._exit(code)  # Ray's own shutdown waits for the head, which may be gone


async def _run(order: AgentOrder, ready_descriptor: int | None) -> int:
    agent = Agent(order)
    if refusal := await agent.join():
        _say(AgentNews(error=refusal), ready_descriptor)
        return 2
    running = asyncio.create_task(agent.run())
    loop = asyncio.get_running_loop()

    def stop() -> None:
        """Cancels once: a second cancel would interrupt leaving the cluster."""
        if loop.remove_reader(sys.stdin.fileno()):
            running.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_reader(sys.stdin.fileno(), stop)
    _say(AgentNews(), ready_descriptor)
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return 0


def _say(news: AgentNews, descriptor: int | None) -> None:
    if descriptor is not None:
        with open(descriptor, "wb") as pipe:
            pipe.write(_encode(news) + b"\n")


if __name__ == "__main__":
    main()
