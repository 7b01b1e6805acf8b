"""What a server and its engines use: memory, descriptors, threads, processes, CPU time.

Used by soak, overload and idle. Independent of load. Invariant: a process that ends during the measurement counts as
gone, never as an error.
Source: /proc, through psutil.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

MIB = 1 << 20
RSS_TOLERANCE_SHARE = 0.05
RSS_TOLERANCE_MIB = 20.0


@dataclass(frozen=True)
class Sample:
    """At one moment. host: the server process; engines: all processes below it, together (engines and fork servers).
    kv_usage: share of KV blocks in use, summed over models; 0 when it was not asked for."""

    time_s: float
    host_rss_mib: float
    host_fds: int
    host_threads: int
    engines: int
    engines_rss_mib: float
    engines_fds: int
    engines_threads: int
    kv_usage: float = 0.0


def take_sample(pid: int, time_s: float, kv_usage: float = 0.0) -> Sample:
    host = psutil.Process(pid)
    engines: list[tuple[float, int, int]] = []
    for child in host.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            engines.append((child.memory_info().rss / MIB, child.num_fds(), child.num_threads()))
    return Sample(
        time_s=time_s,
        host_rss_mib=host.memory_info().rss / MIB,
        host_fds=host.num_fds(),
        host_threads=host.num_threads(),
        engines=len(engines),
        engines_rss_mib=sum(rss for rss, _, _ in engines),
        engines_fds=sum(fds for _, fds, _ in engines),
        engines_threads=sum(threads for _, _, threads in engines),
        kv_usage=kv_usage,
    )


def differences(begin: Sample, end: Sample) -> list[str]:
    """Where a server does not end where it began; both samples idle, with no client connected.

    Descriptors, threads, processes and KV blocks must be equal. Memory may grow by 5 % or 20 MiB, whichever is more:
    allocators keep arenas, and a leak of 100 bytes a token would be over 100 MiB in 20 minutes of load. The engines' is
    compared at the same age, since each kill replaces the process: the sampling code kills them as long before
    both.
    """
    found = []
    for name in ("host_fds", "host_threads", "engines", "engines_fds", "engines_threads", "kv_usage"):
        before, after = getattr(begin, name), getattr(end, name)
        if before != after:
            found.append(f"{name} began at {before} and ended at {after}")
    for name in ("host_rss_mib", "engines_rss_mib"):
        before, after = getattr(begin, name), getattr(end, name)
        if after - before > max(RSS_TOLERANCE_MIB, RSS_TOLERANCE_SHARE * before):
            found.append(f"{name} began at {before:.1f} and ended at {after:.1f}")
    return found


def cpu_seconds(pid: int) -> dict[str, float]:
    """CPU time of a process and its children so far, by role."""
    host = psutil.Process(pid)
    seconds = {f"host {pid}": _cpu_s(host)}
    for child in host.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            seconds[f"engine {child.pid}"] = _cpu_s(child)
    return seconds


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def slope_per_hour(times_s: Sequence[float], values: Sequence[float]) -> float:
    """Least squares; 0 for fewer than two points."""
    count = len(times_s)
    if count < 2:
        return 0.0
    mean_time, mean_value = sum(times_s) / count, sum(values) / count
    spread = sum((time_s - mean_time) ** 2 for time_s in times_s)
    rise = sum((time_s - mean_time) * (value - mean_value) for time_s, value in zip(times_s, values, strict=True))
    return 3600.0 * rise / spread if spread else 0.0
