"""How many threads an engine has on CPU, if its config does not say.

Used wherever an engine, its loader or its weight cache starts threads; independent of what they compute. Invariants: a
limit of CPU time counts like a smaller machine, since the kernel stops all threads of a cgroup that has used its time,
in the middle of an operation that others wait for; where there are many CPUs, one is the host's, because each thread
of an engine waits for the slowest one.
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
    """`num_threads`; if 0, all usable CPUs, but one less if there are eight or more."""
    cpus = usable_cpus()
    return config.num_threads or (cpus - 1 if cpus >= _FEWEST_WITH_ONE_FOR_THE_HOST else cpus)


def usable_cpus() -> int:
    """CPUs of this process's affinity, or as many as its cgroups allow time for, if that is less. At least 1."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *cgroup_limits_cpus()])))


def cgroup_limits_cpus(own_cgroups: Path = _OWN_CGROUPS, mount: Path = _CGROUPS) -> Iterator[float]:
    """The limits of this process's cgroups and of those above them, of both versions. In a container the own one may be
    the mount itself, whatever its path is."""
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
