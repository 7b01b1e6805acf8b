"""One engine that this machine's host needs: its actor is made or found, and what it says is passed on.

For: the agent. Does not know: hosts, sockets. Invariants: an engine that Ray finds no room for is told within seconds,
with what it needs; an actor that is gone is made again.
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
from .messages import EngineLost, EngineSpec, EngineState, WantedEngine
from .model_files import ModelFilesError, manifests
from .placement import actor_options, needs, room_problem
from .ray_calls import DETACHED, NAMESPACE, answer, free_resources

log = logging.getLogger(__name__)

ROOM_S: Final = 5.0
"""How long there must be no room until that is an error: Ray counts late what has just ended."""
PLACEMENT_S: Final = 30.0
"""For an actor's first answer, where there was room: others may have taken it. A busy machine needs seconds to start
an actor's process, which has the room by then."""
RETRY_S: Final = 0.5


class EngineWatch:
    """On the agent's event loop."""

    def __init__(self, wanted: WantedEngine, host: str, tell: Callable[[EngineState], None]) -> None:
        self._wanted = wanted
        self._host = host
        self._tell = tell
        self._actor: Any = None
        self.state: EngineState | None = None
        """What was told last."""
        self._task = asyncio.create_task(self._watch())

    def stop(self) -> None:
        self._task.cancel()

    async def release(self) -> None:
        if self._actor is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                await answer(self._actor.release.remote(self._host))

    async def lost(self, loss: EngineLost) -> None:
        log.warning("%s: the host lost process %d: %s", loss.key, loss.incarnation, loss.cause)

    async def _watch(self) -> None:
        while True:
            try:
                await self._wait_for_room()
                self._actor = await asyncio.to_thread(self._make_actor)
                await self._listen()
            except ModelFilesError as error:
                self._show(EngineState(self._wanted.key, error=str(error), is_final=True))
            except ray.exceptions.RayError as error:
                log.warning("%s: %s", self._wanted.key, error)
            except ValueError as error:  # the name is being given up
                log.warning("%s: %s", self._wanted.key, error)
            await asyncio.sleep(RETRY_S)

    def _make_actor(self) -> Any:
        """Or finds it. Raises ModelFilesError."""
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
            if problem := await asyncio.to_thread(self._room_problem):
                self._show(EngineState(self._wanted.key, error=problem, is_final=True))
        while True:
            state = msgspec.msgpack.decode(await call, type=EngineState)
            if state.version != version:
                version = state.version
                self._show(state)
            call = asyncio.ensure_future(answer(self._actor.watch.remote(self._host, version, node)))

    async def _wait_for_room(self) -> None:
        """Returns at once where the actor exists."""
        began_s = time.monotonic()
        while not await asyncio.to_thread(self._exists):
            problem = await asyncio.to_thread(self._room_problem)
            if not problem:
                return
            if time.monotonic() - began_s >= ROOM_S:
                self._show(EngineState(self._wanted.key, error=problem, is_final=True))
            await asyncio.sleep(RETRY_S)

    def _exists(self) -> bool:
        try:
            ray.get_actor(self._wanted.key, NAMESPACE)
        except ValueError:
            return False
        return True

    def _room_problem(self) -> str:
        """Why no node can take the engine, "" = one may."""
        return room_problem(needs(self._wanted.config), ray.nodes(), free_resources())

    def _show(self, state: EngineState) -> None:
        if state != self.state:
            self.state = state
            self._tell(state)
