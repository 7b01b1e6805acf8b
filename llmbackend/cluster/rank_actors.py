"""Ranks 1 and up of a split model: one actor each, in one placement group. Also, engines' resources in Ray.

Used by the engine's actor, whose node has rank 0. Independent of hosts and of what ranks compute. Invariants: the ranks
end with the actor that created them; a rank whose process or node is lost is restarted and waits for the next rank 0;
the rendezvous stays the same as long as rank 0's process runs, even if the engine's actor is restarted.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import ray
import ray.util
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.gpu.parallel.rank_process import RankKeeper
from llmbackend.engine.process.served.served_order import with_paths
from llmbackend.engine.rank_order import RankMeeting, RankOrder

from .messages import EngineSpec
from .model_cache import ModelFilesError, local_files
from .model_manifest import ModelManifest
from .model_source import remote_model

NAMESPACE: Final = "llmbackend"
DETACHED: Final[dict[str, Any]] = {
    "lifetime": "detached",
    "get_if_exists": True,
    "max_restarts": -1,
    "namespace": NAMESPACE,
    "max_concurrency": 1000,
}


def free_resources() -> dict[str, dict[str, float]]:
    """The free resources by node id. Ray's public functions report only those of the whole cluster."""
    found: dict[str, dict[str, float]] = available_resources_per_node()
    return found


async def answer(reference: Any) -> Any:
    """Raises RayError."""
    return await asyncio.wrap_future(reference.future())


CPU: Final = "CPU"
GPU: Final = "GPU"
_MEMORY: Final = "memory"


def needs(config: EngineConfig) -> dict[str, float]:
    """Ray's resources for each rank, by name. An engine without a number of threads counts as one CPU."""
    gpus = 1 if config.device.startswith("cuda") else 0
    return {CPU: float(max(1, config.num_threads)), GPU: float(gpus)} | config.cluster_resources


def actor_options(wanted: Mapping[str, float]) -> dict[str, Any]:
    """`wanted` as options of an actor."""
    own = {CPU: "num_cpus", GPU: "num_gpus", _MEMORY: "memory"}
    options: dict[str, Any] = {option: wanted[name] for name, option in own.items() if name in wanted}
    return options | {"resources": {name: amount for name, amount in wanted.items() if name not in own}}


def placement_problem(
    wanted: Mapping[str, float], nodes: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]
) -> str:
    """Why no node has enough free resources now; "" = one has. nodes: from ray.nodes(). free: from free_resources()."""
    if any(fits(wanted, free.get(node["NodeID"], {})) for node in nodes if node["Alive"]):
        return ""
    return insufficient_resources(wanted, nodes, free)


def insufficient_resources(
    wanted: Mapping[str, float], nodes: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]
) -> str:
    """The text of `placement_problem` if there is no such node."""
    alive = [node for node in nodes if node["Alive"]]
    lacking = [name for name in wanted if wanted[name] and not any(node["Resources"].get(name) for node in alive)]
    unknown = f" (no node has any {' or '.join(lacking)})" if lacking else ""
    names = (CPU, GPU, *(name for name in wanted if name not in (CPU, GPU)))
    have = ", ".join(
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}) {_amounts(names, node['Resources'])}, "
        f"free {_amounts(names, free.get(node['NodeID'], {}))}"
        for node in alive
    )
    needed = _amounts([name for name in names if wanted.get(name)], wanted)
    return (
        f"no node of the cluster can hold an engine, which needs {needed}{unknown}; the nodes have: {have or 'no node'}"
    )


def _amounts(names: Iterable[str], resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0.0):g} {name}" for name in names)


def fits(wanted: Mapping[str, float], free: Mapping[str, float]) -> bool:
    return all(free.get(name, 0.0) >= amount for name, amount in wanted.items())


PLACEMENT_S: Final = 10.0
"""How long to wait before a placement group counts as impossible for lack of resources."""
_decode_models = msgspec.msgpack.Decoder(tuple[ModelManifest, ...]).decode


class RankActor:
    def __init__(self, order: bytes, models: bytes, machines: Sequence[str]) -> None:
        """order: a RankOrder as JSON; models: its ModelManifests in msgpack; machines: Ray's ids of machines that have
        the models."""
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
        """Why the rank cannot start here; "" = it has started."""
        return self._problem


class RankGroup:
    """For one thread at a time."""

    def __init__(self, spec: EngineSpec, meeting: RankMeeting) -> None:
        self._config = spec.config
        self._models = spec.models
        self._meeting = meeting
        self._group: Any = None
        self._actors: list[Any] = []

    def start(self, machines: Sequence[str]) -> str:
        """Blocks until the ranks have their nodes and files. machines: Ray's ids of machines that have the files.
        Returns why the ranks cannot start; "" = they have started."""
        config, wanted = self._config, needs(self._config)
        count = config.num_ranks - 1
        self._group = ray.util.placement_group([{k: v for k, v in wanted.items() if v}] * count, strategy="PACK")
        if not self._group.wait(PLACEMENT_S):
            return f"{count} more ranks: {insufficient_resources(wanted, ray.nodes(), free_resources())}"
        self._actors = [self._actor(i, wanted, machines) for i in range(count)]
        return next(filter(None, ray.get([actor.problem.remote() for actor in self._actors])), "")

    def end(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)

    def _actor(self, index: int, wanted: dict[str, float], machines: Sequence[str]) -> Any:
        """An actor's process sees only the GPU of its actor, as cuda:0."""
        device = "cuda:0" if wanted[GPU] else self._config.device
        order = RankOrder(msgspec.structs.replace(self._config, device=device), index + 1, self._meeting)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        options = actor_options(wanted) | {"max_restarts": -1, "scheduling_strategy": strategy}
        actor = ray.remote(RankActor).options(**options)
        return actor.remote(msgspec.json.encode(order), msgspec.msgpack.encode(self._models), machines)


def meeting_at(address: str, file: Path, is_running: bool) -> RankMeeting:
    """The rendezvous of the ranks of an engine on this machine. file: stores it. is_running: whether rank 0's process
    is already running, started by an earlier process of the engine's actor; it uses the stored rendezvous."""
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
