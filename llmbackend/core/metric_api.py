"""Metrics of backends, and memory usage of instances.

Source: TRITONSERVER_MetricFamily and TRITONSERVER_Metric; the message MemoryUsage of Triton's statistics with its types
CPU and GPU. The types of the parts are this server's own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple, Protocol


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricFamily(Protocol):
    """One Prometheus metric family."""

    def declare(self, buckets: Sequence[float] | None = None, /, **labels: str) -> None:
        """Creates the metric with these labels at 0 unless it exists. buckets: upper bounds of the histogram,
        ascending, replacing those of its family. Raises TritonError INVALID_ARG for invalid labels or buckets."""

    def increment(self, value: float = 1.0, /, **labels: str) -> None: ...
    def set(self, value: float, /, **labels: str) -> None: ...
    def observe(self, value: float, /, **labels: str) -> None: ...
    def observe_all(self, values: Sequence[float], /, **labels: str) -> None:
        """Calls `observe` for each value."""

    def value(self, /, **labels: str) -> float:
        """The current value of a counter or gauge."""

    def remove(self, /, **labels: str) -> None:
        """Removes the metric with exactly these labels, if it exists."""


_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class MemoryType(Enum):
    """CPU and GPU are totals, the others are parts of them. CPU_KV_CACHE is reserved memory; CPU includes only its
    resident part."""

    CPU = "CPU"
    """Resident memory of the instance's process, including shared pages; without its own process, the memory that the
    instance is known to hold."""
    CPU_WEIGHTS = "CPU_WEIGHTS"
    CPU_KV_CACHE = "CPU_KV_CACHE"
    GPU = "GPU"
    """Memory for tensors and graphs, including free memory in the allocator's pools."""
    GPU_WEIGHTS = "GPU_WEIGHTS"
    GPU_KV_CACHE = "GPU_KV_CACHE"


class MemoryUsage(NamedTuple):
    """device_id: 0 for CPU memory, as in Triton"""

    type: MemoryType
    device_id: int
    byte_size: int


def process_memory(pid: int) -> list[MemoryUsage]:
    """The resident memory of a process; [] if it has ended. Takes microseconds."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            resident_pages = int(file.read().split()[1])
    except (OSError, IndexError):
        return []
    return [MemoryUsage(MemoryType.CPU, 0, resident_pages * _PAGE_BYTES)]
