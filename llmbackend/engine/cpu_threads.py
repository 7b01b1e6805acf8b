"""The number of CPU threads of an engine.

Used wherever an engine, its loader or its weight cache starts threads; independent of what they compute. Invariants:
there are no more threads than a cgroup's CPU limit allows, because the kernel pauses all threads of a cgroup that has
used up its quota; with many CPUs, one is left to the host, because a preempted thread delays all others of its engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .config import EngineConfig

_FEWEST_WITH_ONE_FOR_THE_HOST: Final = 8
_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUPS: Final = Path("/proc/self/cgroup")


def engine_threads(config: EngineConfig) -> int:
    """`num_threads`; if 0, one per usable CPU, one fewer with eight or more CPUs."""
    if config.num_threads:
        return config.num_threads
    cpus = usable_cpus()
    return cpus - 1 if cpus >= _FEWEST_WITH_ONE_FOR_THE_HOST else cpus


def usable_cpus() -> int:
    """The CPUs of this process's affinity mask; if lower, its cgroup's CPU limit, rounded down. At least 1."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *cgroup_limits_cpus()])))


def cgroup_limits_cpus(own_cgroups: Path = _OWN_CGROUPS, mount: Path = _CGROUPS) -> Iterator[float]:
    """The CPU limits (quota / period) of this process's cgroups and their ancestors, in cgroup v1 and v2.

    In a container, the path in /proc/self/cgroup may not exist below the mount: the mount is then the container's own
    cgroup, and is read too.
    """
    try:
        lines = own_cgroups.read_text().splitlines()
    except OSError:  # no cgroups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = mount / controllers
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            yield from _limits_cpus(folder)
            if folder == top:
                break


def _limits_cpus(cgroup: Path) -> Iterator[float]:
    try:
        if (limits := cgroup / "cpu.max").exists():
            quota, period = limits.read_text().split()
        else:
            quota, period = ((cgroup / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except OSError:  # has no limit: another controller's, the root, or outside this namespace
        return
    if quota not in ("max", "-1"):
        yield int(quota) / int(period)
