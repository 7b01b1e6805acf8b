"""EngineWatch: the location of one engine that this machine's host needs. HostRegistry: the cluster's list of hosts.

Used by the agent. Independent of sockets. Invariants: if no node has the resources for an engine, the host is told
within seconds what is missing; a lost actor is recreated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import ray
import ray.exceptions

from .engine_actor import EngineActor
from .messages import EngineLocation, EngineSpec, HostAddress, Versions, WantedEngine
from .model_cache import ModelFilesError, manifests
from .rank_actors import DETACHED, NAMESPACE, actor_options, answer, free_resources, needs, placement_problem

NEWS_WAIT_S: Final = 10.0
LEASE_S: Final = 25.0
"""Several times NEWS_WAIT_S, so that a late call does not remove its host."""
NAME: Final = "hosts"


class HostRegistry:
    def __init__(self) -> None:
        self._hosts: dict[str, HostAddress] = {}
        self._heard_at_s: dict[str, float] = {}
        self._versions: Versions | None = None
        self._key_name = ""
        self._version = time.time_ns()
        self._changed = asyncio.Event()

    async def join(self, host: bytes, versions: bytes, key_name: str) -> str:
        """host, versions: a HostAddress and its Versions in msgpack. key_name: the name of its CURVE key. Returns why
        the host is refused; "" = it has joined."""
        self._forget_silent()
        peer = msgspec.msgpack.decode(host, type=HostAddress)
        own = msgspec.msgpack.decode(versions, type=Versions)
        if self._hosts.keys() - {peer.id}:
            if own != self._versions:
                return f"this machine has {own}, the cluster has {self._versions}: expected the same on all machines"
            if key_name != self._key_name:
                return (
                    f"this machine's curve.key is the key {key_name}, but the cluster's is {self._key_name}: copy the "
                    "whole secrets folder of its first machine"
                )
        self._versions, self._key_name = own, key_name
        self._heard_at_s[peer.id] = time.monotonic()
        if self._hosts.get(peer.id) != peer:
            self._hosts[peer.id] = peer
            self._change()
        return ""

    async def watch(self, host: str, version: int) -> tuple[int, list[bytes]]:
        """The version of the list, and all hosts. Waits like `EngineActor.watch`. Hosts not listed should join."""
        if host in self._hosts:
            self._heard_at_s[host] = time.monotonic()
        self._forget_silent()
        if self._version == version:
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), NEWS_WAIT_S)
            except TimeoutError:
                self._forget_silent()
        return self._version, [msgspec.msgpack.encode(peer) for peer in self._hosts.values()]

    async def leave(self, host: str) -> None:
        self._heard_at_s.pop(host, None)
        if self._hosts.pop(host, None) is not None:
            self._change()

    def _forget_silent(self) -> None:
        limit_s = time.monotonic() - LEASE_S
        silent = [host for host in self._hosts if self._heard_at_s.get(host, 0.0) < limit_s]
        for host in silent:
            del self._hosts[host], self._heard_at_s[host]
        if silent:
            self._change()

    def _change(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()


log = logging.getLogger(__name__)

SHORTAGE_S: Final = 5.0
"""How long resources must be insufficient before this is an error: Ray frees those of ended actors late."""
PLACEMENT_S: Final = 30.0
"""How long to wait for an actor's first answer before resources are checked again, because others may have taken them.
A busy machine needs seconds to start an actor's process."""
RETRY_S: Final = 0.5


class EngineWatch:
    """Used on the agent's event loop."""

    def __init__(self, wanted: WantedEngine, host: str, tell: Callable[[EngineLocation], None]) -> None:
        self._wanted = wanted
        self._host = host
        self._tell = tell
        self._actor: Any = None
        self.state: EngineLocation | None = None
        """The last state passed to `tell`."""
        self._task = asyncio.create_task(self._watch())

    def stop(self) -> None:
        self._task.cancel()

    async def release(self) -> None:
        if self._actor is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                await answer(self._actor.release.remote(self._host))

    async def _watch(self) -> None:
        while True:
            try:
                await self._wait_for_resources()
                self._actor = await asyncio.to_thread(self._make_actor)
                await self._listen()
            except ModelFilesError as error:
                self._show(EngineLocation(self._wanted.key, error=str(error), is_final=True))
            except (ray.exceptions.RayError, ValueError) as error:  # ValueError: Ray is removing the actor's name
                log.warning("%s: %s", self._wanted.key, error)
            await asyncio.sleep(RETRY_S)

    def _make_actor(self) -> Any:
        """Finds or creates the actor. Raises ModelFilesError."""
        if self._exists():
            return ray.get_actor(self._wanted.key, NAMESPACE)
        spec = msgspec.msgpack.encode(EngineSpec(self._wanted.key, self._wanted.config, manifests(self._wanted.config)))
        options = DETACHED | {"name": self._wanted.key, "scheduling_strategy": "SPREAD"}
        options |= actor_options(needs(self._wanted.config))
        return ray.remote(EngineActor).options(**options).remote(spec)

    async def _listen(self) -> None:
        version, node = 0, ray.get_runtime_context().get_node_id()
        call = asyncio.ensure_future(answer(self._actor.watch.remote(self._host, version, node)))
        while not (await asyncio.wait((call,), timeout=PLACEMENT_S))[0]:
            if problem := await asyncio.to_thread(self._placement_problem):
                self._show(EngineLocation(self._wanted.key, error=problem, is_final=True))
        while True:
            state = msgspec.msgpack.decode(await call, type=EngineLocation)
            if state.version != version:
                version = state.version
                self._show(state)
            call = asyncio.ensure_future(answer(self._actor.watch.remote(self._host, version, node)))

    async def _wait_for_resources(self) -> None:
        """Returns immediately if the actor exists."""
        began_s = time.monotonic()
        while not await asyncio.to_thread(self._exists):
            problem = await asyncio.to_thread(self._placement_problem)
            if not problem:
                return
            if time.monotonic() - began_s >= SHORTAGE_S:
                self._show(EngineLocation(self._wanted.key, error=problem, is_final=True))
            await asyncio.sleep(RETRY_S)

    def _exists(self) -> bool:
        try:
            ray.get_actor(self._wanted.key, NAMESPACE)
        except ValueError:
            return False
        return True

    def _placement_problem(self) -> str:
        """Why no node can take the engine; "" = one may be able to."""
        return placement_problem(needs(self._wanted.config), ray.nodes(), free_resources())

    def _show(self, state: EngineLocation) -> None:
        if state != self.state:
            self.state = state
            self._tell(state)
