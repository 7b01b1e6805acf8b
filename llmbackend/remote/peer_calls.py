"""Calls between hosts, over their endpoints for frontends.

Used for copies of streams on other hosts. Independent of what calls mean. Invariants: a call ends with its answer or an
error, immediately if its host is lost; hosts of different releases refuse each other's calls; the loss of a host is
reported before it can be called again. Used on one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, cast

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from llmbackend import __version__
from llmbackend.core.errors import TritonError, internal, unavailable
from llmbackend.links.secrets import ClusterSecrets
from llmbackend.links.sockets import new_socket

from .endpoints import FRONTEND_HEARTBEAT_TIMEOUT_S
from .host_endpoint import HostEndpoint
from .wire import Call, CallResult, HostPeer, WireError, decode_to_frontend, encode

log = logging.getLogger(__name__)
Handler = Callable[[str, bytes], Awaitable[bytes]]
"""(id of the calling host, payload) → answer"""
_EVENTS: Final = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


class PeerCalls:
    """The calls made and answered by one host."""

    def __init__(
        self,
        endpoint: HostEndpoint,
        host_id: str,
        keys: ClusterSecrets | None = None,
        heartbeat_timeout_s: float = FRONTEND_HEARTBEAT_TIMEOUT_S,
        release: str = __version__,
    ) -> None:
        """endpoint: this host's, already started; its peers can be called. To be created on the event loop."""
        self._host_id = host_id
        self._keys = keys
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._release = release
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._links: dict[str, _Link] = {}
        self._wanted: dict[str, str] = {}
        """The endpoints of the hosts that this host was told about last."""
        self._handlers: dict[str, Handler] = {}
        self._on_change: Callable[[], None] = lambda: None
        self._is_told = False
        """Whether this host has been told about the other hosts."""
        self._is_closed = False
        endpoint.serve_calls(partial(self._in_loop, self._answer), partial(self._in_loop, self._set_peers))

    def live(self) -> Sequence[str]:
        """Connected hosts in cyclic order of ids, starting after this host's, so that hosts choose different ones."""
        ids = sorted(id for id, link in self._links.items() if link.is_connected)
        return sorted(ids, key=lambda id: id < self._host_id)

    def are_all_live(self) -> bool:
        """Whether all other hosts are known and connected."""
        return self._is_told and all(link.is_connected for link in self._links.values())

    def on_change(self, callback: Callable[[], None]) -> None:
        """Registers `callback`, which is called when a host is connected or lost."""
        self._on_change = callback

    async def call(self, peer: str, topic: str, payload: bytes) -> bytes:
        """Raises TritonError: UNAVAILABLE if the host is lost, or whatever its handler raised."""
        link = self._links.get(peer)
        if link is None or not link.is_connected:
            raise unavailable(f"host '{peer}' is gone")
        return await link.call(self._release, self._host_id, topic, payload)

    def on_call(self, topic: str, handler: Handler) -> None:
        """Registers `handler` for calls of `topic`."""
        self._handlers[topic] = handler

    def close(self) -> None:
        """Ends all links. To be called before the endpoint is closed."""
        self._is_closed, self._on_change = True, lambda: None
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._context.destroy(linger=0)

    # --- other hosts --------------------------------------------------------------------------------------------------

    def _set_peers(self, peers: Sequence[HostPeer] | None) -> None:
        if self._is_closed or peers is None:
            return
        self._is_told = True
        self._wanted = {peer.id: peer.endpoint for peer in peers if peer.id != self._host_id and peer.endpoint}
        self._drop_unwanted()
        for id, endpoint in self._wanted.items():
            if id not in self._links:
                context = cast("zmq.Context[zmq.Socket[bytes]]", self._context)
                socket = new_socket(context, zmq.DEALER, self._keys, self._heartbeat_timeout_s)
                self._links[id] = _Link(id, endpoint, cast(zmq.asyncio.Socket, socket), self._link_changed)

    def _drop_unwanted(self) -> None:
        """Keeps connected hosts that are missing from the list: it is empty when the cluster's registry was lost."""
        for id, link in list(self._links.items()):
            if self._wanted.get(id, link.endpoint if link.is_connected else "") != link.endpoint:
                self._links.pop(id).close()

    def _link_changed(self) -> None:
        self._on_change()
        self._loop.call_soon(self._drop_unwanted)  # a link must not be closed by its own task

    # --- calls of other hosts -----------------------------------------------------------------------------------------

    def _answer(self, call: Call, answer: Callable[[CallResult], object]) -> None:
        task = self._loop.create_task(self._result(call))
        task.add_done_callback(lambda done: None if done.cancelled() else answer(done.result()))

    async def _result(self, call: Call) -> CallResult:
        try:
            handler = self._handlers.get(call.topic)
            if handler is None:
                raise unavailable(f"this host has no handler for calls about '{call.topic}'")
            return CallResult(call.number, await handler(call.host_id, call.payload))
        except TritonError as error:
            return CallResult(call.number, error=WireError.of(error))
        except Exception:
            log.exception("a call of host '%s' about '%s' failed", call.host_id, call.topic)
            return CallResult(call.number, error=WireError.of(internal("internal error, see the host's log")))

    def _in_loop(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(work, *arguments)
        except RuntimeError:  # the loop is closed
            return


class _Link:
    """The connection to one host."""

    def __init__(self, id: str, endpoint: str, socket: zmq.asyncio.Socket, on_change: Callable[[], None]) -> None:
        self.endpoint = endpoint
        self.is_connected = False
        self._id = id
        self._on_change = on_change
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._monitor: zmq.asyncio.Socket = socket.get_monitor_socket(_EVENTS)
        socket.connect(endpoint)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._read()), loop.create_task(self._watch())]

    async def call(self, release: str, host_id: str, topic: str, payload: bytes) -> bytes:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._socket.send(encode(Call(number, release, host_id, topic, payload)))
            result: bytes = await answer
            return result
        finally:
            del self._waiting[number]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._lost()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    async def _read(self) -> None:
        while True:
            data = await self._socket.recv()
            try:
                message = decode_to_frontend(data)
            except msgspec.DecodeError as error:
                log.error("host '%s' sent a message that cannot be read: %s", self._id, error)
                continue
            if not isinstance(message, CallResult):
                continue
            answer = self._waiting.get(message.number)
            if answer is None or answer.done():
                continue  # given up
            if message.error is None:
                answer.set_result(message.payload)
            else:
                answer.set_exception(message.error.error())

    async def _watch(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.is_connected = True
                self._on_change()
            elif event == zmq.Event.DISCONNECTED:
                self._lost()

    def _lost(self) -> None:
        self.is_connected = False
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(unavailable(f"host '{self._id}' is gone"))
        self._on_change()
