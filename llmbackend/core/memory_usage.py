"""The memory that an instance of a model holds, as rows of the statistics extension.

For: backends, which say what their instances hold, and statistics. Does not know: models. Source: the message
MemoryUsage of Triton's statistics, whose types are CPU and GPU; the types of the parts are this server's.
"""

from __future__ import annotations

import os
from enum import Enum
from typing import Final, NamedTuple

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class MemoryType(Enum):
    """CPU and GPU are totals, the others parts. CPU_KV_CACHE is reserved memory, of which CPU includes only what has
    been used and so is resident."""

    CPU = "CPU"
    """Resident memory of the instance's process, including shared pages; without a process of its own, what the
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
    """The resident memory of a process of this machine; empty when it has ended. Takes microseconds."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            resident_pages = int(file.read().split()[1])
    except (OSError, IndexError):
        return []
    return [MemoryUsage(MemoryType.CPU, 0, resident_pages * _PAGE_BYTES)]
