"""What an engine needs of a node, and what a cluster has: for Ray, and for people when there is no room.

For: the agent. Does not know: actors. Invariant: an engine that fits nowhere is named with what it needs and what each
node has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from llmbackend.engine.config import EngineConfig

CPU: Final = "CPU"
GPU: Final = "GPU"
_MEMORY: Final = "memory"


def needs(config: EngineConfig) -> dict[str, float]:
    """Ray's resources by name, of each rank. An engine without a number of threads counts as one CPU."""
    gpus = 1 if config.device.startswith("cuda") else 0
    return {CPU: float(max(1, config.num_threads)), GPU: float(gpus)} | config.cluster_resources


def actor_options(wanted: Mapping[str, float]) -> dict[str, Any]:
    """The same as options of an actor."""
    own = {CPU: "num_cpus", GPU: "num_gpus", _MEMORY: "memory"}
    options: dict[str, Any] = {option: wanted[name] for name, option in own.items() if name in wanted}
    return options | {"resources": {name: amount for name, amount in wanted.items() if name not in own}}


def room_problem(
    wanted: Mapping[str, float], nodes: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]
) -> str:
    """Why no node has room now, "" when one has. nodes: as ray.nodes(); free: of each node, by its id."""
    if any(fits(wanted, free.get(node["NodeID"], {})) for node in nodes if node["Alive"]):
        return ""
    return no_room(wanted, nodes, free)


def no_room(
    wanted: Mapping[str, float], nodes: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]
) -> str:
    """As room_problem, where there is none."""
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
        f"no node of the cluster has room for an engine, which needs {needed}{unknown}; the nodes have: "
        f"{have or 'there is none'}"
    )


def _amounts(names: Iterable[str], resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0.0):g} {name}" for name in names)


def fits(wanted: Mapping[str, float], free: Mapping[str, float]) -> bool:
    return all(free.get(name, 0.0) >= amount for name, amount in wanted.items())
