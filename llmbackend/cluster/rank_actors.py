"""The other ranks of an engine whose model is split: an actor for each, in one placement group.

For: the engine's actor, whose node has rank 0. Does not know: what ranks compute, hosts. Invariants: the ranks end with
the actor that made them; a rank whose process or node is gone is started again, and waits for the next rank 0; the
meeting is the same as long as rank 0's command runs, also for the next life of the engine's actor.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import ray
import ray.util
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from llmbackend.engine.process.served.served_order import with_paths
from llmbackend.engine.ranks.rank_keeper import RankKeeper
from llmbackend.engine.ranks.rank_order import RankMeeting, RankOrder

from .messages import EngineSpec
from .model_files import ModelFilesError, local_files
from .model_manifest import ModelManifest
from .model_source import remote_model
from .placement import GPU, actor_options, needs, no_room
from .ray_calls import free_resources

PLACEMENT_S: Final = 10.0
"""For a placement group, after which there is no room for it."""
_decode_models = msgspec.msgpack.Decoder(tuple[ModelManifest, ...]).decode


class RankActor:
    def __init__(self, order: bytes, models: bytes, machines: Sequence[str]) -> None:
        """order: a RankOrder as JSON; models: its ModelManifests in msgpack; machines: Ray's ids of those that have
        them."""
        said, self._problem = msgspec.json.decode(order, type=RankOrder), ""
        try:
            self._files = local_files(_decode_models(models), partial(remote_model, machines))
        except ModelFilesError as error:
            where = f"rank {said.rank} on {socket.gethostname()} ({ray.util.get_node_ip_address()})"
            self._problem = f"{where}: {error}"
            return
        config = with_paths(said.config, self._files.paths)
        self._keeper = RankKeeper(msgspec.structs.replace(said, config=config))
        self._keeper.start()

    def problem(self) -> str:
        """Why it can not start here, "" when it can."""
        return self._problem


class RankGroup:
    """One thread at a time uses it."""

    def __init__(self, spec: EngineSpec, meeting: RankMeeting) -> None:
        self._config = spec.config
        self._models = spec.models
        self._meeting = meeting
        self._group: Any = None
        self._actors: list[Any] = []

    def start(self, machines: Sequence[str]) -> str:
        """Blocks until the ranks have their places and files. machines: Ray's ids of those that have the files. Why
        they can not be started, "" when they are."""
        config, wanted = self._config, needs(self._config)
        count = config.num_ranks - 1
        self._group = ray.util.placement_group([{k: v for k, v in wanted.items() if v}] * count, strategy="PACK")
        if not self._group.wait(PLACEMENT_S):
            return f"{count} more ranks: {no_room(wanted, ray.nodes(), free_resources())}"
        self._actors = [self._actor(i, wanted, machines) for i in range(count)]
        return next(filter(None, ray.get([actor.problem.remote() for actor in self._actors])), "")

    def end(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)

    def _actor(self, index: int, wanted: dict[str, float], machines: Sequence[str]) -> Any:
        """On a GPU a process sees that of its actor alone."""
        device = "cuda:0" if wanted[GPU] else self._config.device
        order = RankOrder(msgspec.structs.replace(self._config, device=device), index + 1, self._meeting)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        options = actor_options(wanted) | {"max_restarts": -1, "scheduling_strategy": strategy}
        actor = ray.remote(RankActor).options(**options)
        return actor.remote(msgspec.json.encode(order), msgspec.msgpack.encode(self._models), machines)


def meeting_at(address: str, file: Path, is_running: bool) -> RankMeeting:
    """Where the ranks of an engine on this machine meet. file: keeps it. is_running: whether an earlier life of the
    engine's actor has started rank 0's command, which knows the kept one."""
    if is_running and file.exists():
        return msgspec.json.decode(file.read_bytes(), type=RankMeeting)
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
        meeting = RankMeeting(address, free.getsockname()[1], secrets.token_urlsafe(32))
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as kept:
        kept.write(msgspec.json.encode(meeting))
    return meeting
