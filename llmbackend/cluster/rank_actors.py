"""The other ranks of an engine whose model is split: an actor for each, in one placement group.

For: the engine's actor, whose node has rank 0. Does not know: what ranks compute, hosts. Invariants: the ranks end with
the actor that made them; a rank whose process or node is gone is started again, and waits for the next rank 0; the
meeting is the same as long as rank 0's command runs, also for the next life of the engine's actor.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Any, Final

import msgspec
import ray
import ray.util
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.process.rank_keeper import RankKeeper
from llmbackend.engine.rank_order import RankMeeting, RankOrder

from .model_files import unreadable
from .placement import CPU, GPU, needs, no_room

PLACEMENT_S: Final = 10.0
"""For a placement group, after which there is no room for it."""


class RankActor:
    def __init__(self, order: bytes) -> None:
        """order: a RankOrder as JSON."""
        self._order = msgspec.json.decode(order, type=RankOrder)
        self._keeper = RankKeeper(self._order)
        self._problem = unreadable(self._order.config)
        if not self._problem:
            self._keeper.start()

    def problem(self) -> str:
        """Why it can not start here, "" when it can."""
        if not self._problem:
            return ""
        return f"rank {self._order.rank} on {socket.gethostname()} ({ray.util.get_node_ip_address()}): {self._problem}"


class RankGroup:
    """One thread at a time uses it."""

    def __init__(self, config: EngineConfig, meeting: RankMeeting) -> None:
        self._config = config
        self._meeting = meeting
        self._group: Any = None
        self._actors: list[Any] = []

    def start(self) -> str:
        """Blocks until the ranks have their places. Why they can not be started, "" when they are."""
        config, wanted = self._config, needs(self._config)
        count = config.num_ranks - 1
        self._group = ray.util.placement_group([{k: v for k, v in wanted.items() if v}] * count, strategy="PACK")
        if not self._group.wait(PLACEMENT_S):
            return f"{count} more ranks: {no_room(wanted, ray.nodes(), ray.available_resources())}"
        self._actors = [self._actor(i, wanted) for i in range(count)]
        return next(filter(None, ray.get([actor.problem.remote() for actor in self._actors])), "")

    def end(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)

    def _actor(self, index: int, wanted: dict[str, float]) -> Any:
        """On a GPU a process sees that of its actor alone."""
        device = "cuda:0" if wanted[GPU] else self._config.device
        order = RankOrder(msgspec.structs.replace(self._config, device=device), index + 1, self._meeting)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        options = {"num_cpus": wanted[CPU], "num_gpus": wanted[GPU], "max_restarts": -1}
        actor = ray.remote(RankActor).options(scheduling_strategy=strategy, **options)
        return actor.remote(msgspec.json.encode(order))


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
