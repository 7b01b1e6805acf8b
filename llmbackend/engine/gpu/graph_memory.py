"""How much memory the graphs of an engine will take, found by capturing two of each kind.

For: start.py, before KV blocks are made. Does not know: steps, KV memory. Invariants: tensors are counted by the
allocator of this process, so that other processes on the device change nothing; what the driver keeps of a graph's
launches is seen in the device's free memory alone, and is bounded, because others change that too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from .device import Device
from .device_rows import Padded
from .graphs import StepGraphs

MOST_OF_LAUNCHES_BYTES = 32 << 20
"""Of one graph."""


class _Used(NamedTuple):
    held_bytes: int
    beside_bytes: int


def graph_bytes(graphs: StepGraphs, device: Device, sizes: Sequence[Padded]) -> int:
    """Leaves no graphs."""
    kinds = [[size for size in sizes if size.is_decode == is_decode] for is_decode in (True, False)]
    total = sum(_bytes_of_kind(graphs, device, kind) for kind in kinds if kind)
    graphs.forget()
    return total


def _bytes_of_kind(graphs: StepGraphs, device: Device, sizes: Sequence[Padded]) -> int:
    """The largest brings the tensors that the others share; each may need some of its own, and has launches."""
    used = [_with_graphs(graphs, device, some) for some in (sizes[:0], sizes[-1:], sizes[-2:])]
    first, second = (max(after.held_bytes - before.held_bytes, 0) for before, after in pairwise(used))
    launches = min(after.beside_bytes - before.beside_bytes for before, after in pairwise(used[: len(sizes) + 1]))
    each = min(max(launches, 0), MOST_OF_LAUNCHES_BYTES)
    return first + second * (len(sizes) - 1) + each * len(sizes)


def _with_graphs(graphs: StepGraphs, device: Device, sizes: Sequence[Padded]) -> _Used:
    graphs.forget()
    graphs.capture(sizes)
    device.synchronize()
    device.trim()
    memory, held_bytes = device.memory(), device.held_bytes
    return _Used(held_bytes, memory.total_bytes - memory.free_bytes - held_bytes)
