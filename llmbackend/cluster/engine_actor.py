"""The Ray actor of one engine: starts the engine on its node, watches it, and tells hosts' agents where it is.

Created by Ray on a node with enough free resources, and again on another node if that one is lost. Independent of
tokens, which hosts and the engine exchange directly. Invariants: `watch` waits for news, so agents need not poll; an
actor that no host has held for ORPHAN_S ends, together with its engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import ray
import ray.util

from llmbackend.engine.process.served.served_order import ServedEngineNews, ServedEngineOrder, read_record
from llmbackend.engine.rank_order import RankMeeting

from .messages import EngineLocation, EngineSpec
from .model_cache import Fetch, LocalFiles, ModelFilesError, local_files
from .model_manifest import ModelManifest
from .model_source import remote_model
from .processes import EngineKeeper, Launch
from .rank_actors import RankGroup, meeting_at
from .ray_node import RUN_FOLDER_VARIABLE, SECRETS_VARIABLE
from .settings import DEFAULT_SECRETS, default_run_folder

NEWS_WAIT_S: Final = 20.0
"""The longest time that `watch` waits; a live agent then calls again."""
ORPHAN_S: Final = 60.0
"""Several times NEWS_WAIT_S: after the loss of the cluster's head, agents need time to return."""


class _Holder(NamedTuple):
    """heard_at_s: time of its last call; node: Ray's id of its machine."""

    heard_at_s: float
    node: str


class EngineActor:
    def __init__(self, spec: bytes) -> None:
        """spec: an EngineSpec in msgpack."""
        self._spec = msgspec.msgpack.decode(spec, type=EngineSpec)
        address = ray.util.get_node_ip_address()
        self._node = f"{socket.gethostname()} ({address})"
        self._state = EngineLocation(self._spec.key, version=time.time_ns(), node=self._node)
        self._changed = asyncio.Event()
        self._holders: dict[str, _Holder] = {}
        """By host id."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._files: LocalFiles | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ranks: RankGroup | None = None
        """Ranks 1 and up of a split model."""
        self._folder = Path(os.environ.get(RUN_FOLDER_VARIABLE, str(default_run_folder())))
        self._meeting: RankMeeting | None = None
        if self._spec.config.num_ranks > 1:
            is_running = read_record(self._folder / f"{self._spec.key}.json") is not None
            self._meeting = meeting_at(address, self._folder / f"{self._spec.key}.meeting", is_running)
            self._ranks = RankGroup(self._spec, self._meeting)
        self._keeper = EngineKeeper(self._prepare, self._folder, self._spec.key, self._heard)
        # Its host may have left before the actor was there; Ray restarts actors also if no host needs them any more.
        unwatched = threading.Timer(ORPHAN_S, self._end_unwatched, (ray.get_runtime_context().current_actor,))
        unwatched.daemon = True
        unwatched.start()

    def _end_unwatched(self, this_actor: Any) -> None:
        if self._loop is None:
            ray.kill(this_actor)

    async def watch(self, host: str, version: int, node: str) -> bytes:
        """Returns the EngineLocation in msgpack: immediately if its version is not `version`, else at its next change
        or after NEWS_WAIT_S. From now on, the host holds the engine. node: Ray's id of the host's machine."""
        self._holders[host] = _Holder(time.monotonic(), node)
        await self._begin()
        if self._state.version == version:
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), NEWS_WAIT_S)
        return msgspec.msgpack.encode(self._state)

    async def release(self, host: str) -> None:
        self._holders.pop(host, None)
        if not self._holders:
            await self._end()

    async def _begin(self) -> None:
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._keeper.start()
        self._tasks = [asyncio.create_task(self._end_when_orphaned())]
        if self._ranks is not None:
            self._tasks.append(asyncio.create_task(self._start_ranks(self._ranks)))

    async def _start_ranks(self, ranks: RankGroup) -> None:
        if error := await asyncio.to_thread(ranks.start, self._machines()):
            self._set(EngineLocation(self._spec.key, node=self._node, error=error, is_final=True))

    async def _end_when_orphaned(self) -> None:
        while True:
            await asyncio.sleep(NEWS_WAIT_S)
            now_s = time.monotonic()
            self._holders = {id: holder for id, holder in self._holders.items() if now_s - holder.heard_at_s < ORPHAN_S}
            if not self._holders:
                await self._end()

    async def _end(self) -> None:
        await asyncio.to_thread(self._keeper.end)
        if self._ranks is not None:
            await asyncio.to_thread(self._ranks.end)
        ray.actor.exit_actor()

    def _prepare(self) -> Launch | None:
        """Called on the keeper's thread."""
        try:
            self._files = self._files or local_files(self._spec.models, self._connect)
        except ModelFilesError as error:
            location = EngineLocation(self._spec.key, node=self._node, error=f"{self._node}: {error}", is_final=True)
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._set, location)
            return None
        order = ServedEngineOrder(
            config=self._spec.config,
            paths=self._files.paths,
            meeting=self._meeting,
            secrets_folder=os.environ.get(SECRETS_VARIABLE, str(DEFAULT_SECRETS.expanduser())),
            host=ray.util.get_node_ip_address(),
            node=self._node,
            outlives_parent=True,
            orphan_timeout_s=ORPHAN_S,
        )
        return Launch(order, self._files.descriptors)

    def _connect(self, model: ModelManifest) -> AbstractContextManager[Fetch]:
        return remote_model(self._machines(), model)

    def _machines(self) -> tuple[str, ...]:
        """Ray's ids of the machines whose hosts hold the engine and which therefore have its files."""
        return tuple(dict.fromkeys(holder.node for holder in tuple(self._holders.values())))

    def _heard(self, news: ServedEngineNews) -> None:
        """Called on the keeper's thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._take, news)

    def _take(self, news: ServedEngineNews) -> None:
        if news.error:
            self._set(EngineLocation(self._spec.key, node=self._node, error=f"{self._node}: {news.error}"))
            return
        address = ray.util.get_node_ip_address()
        endpoint = f"tcp://[{address}]:{news.port}" if ":" in address else f"tcp://{address}:{news.port}"
        self._set(EngineLocation(self._spec.key, endpoint=endpoint, incarnation=news.incarnation, node=self._node))

    def _set(self, state: EngineLocation) -> None:
        self._state = msgspec.structs.replace(state, version=self._state.version + 1)
        self._changed.set()
        self._changed = asyncio.Event()
