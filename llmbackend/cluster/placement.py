"""What an engine needs of a node, and what a cluster has: for Ray, and for people when there is no room.

For: the agent. Does not know: actors. Invariant: an engine that fits nowhere is named with what it needs and what each
node has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from llmbackend.engine.config import EngineConfig

CPU: Final = "CPU"
GPU: Final = "GPU"


def needs(config: EngineConfig) -> dict[str, float]:
    """Ray's resources by name, of each rank. An engine without a number of threads counts as one CPU."""
    gpus = 1 if config.device.startswith("cuda") else 0
    return {CPU: float(max(1, config.num_threads)), GPU: float(gpus)}


def no_room(wanted: Mapping[str, float], nodes: Sequence[Mapping[str, Any]], free: Mapping[str, float]) -> str:
    """nodes: as ray.nodes(); free: as ray.available_resources()."""
    alive = [node for node in nodes if node["Alive"]]
    have = ", ".join(
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}) {_amounts(node['Resources'])}" for node in alive
    )
    return (
        f"no node of the cluster has room for an engine, which needs {_amounts(wanted, only_used=True)}; free in the "
        f"whole cluster: {_amounts(free)}; the nodes have: {have or 'there is none'}"
    )


def _amounts(resources: Mapping[str, float], *, only_used: bool = False) -> str:
    amounts = {name: resources.get(name, 0.0) for name in (CPU, GPU)}
    return " and ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount or not only_used)


def fits(wanted: Mapping[str, float], free: Mapping[str, float]) -> bool:
    return all(free.get(name, 0.0) >= amount for name, amount in wanted.items())
