"""CUDA graphs of whole steps (decode steps by number of sequences, mixed steps by number of tokens) and their memory.

Used by the runner. A step of a small model is a few hundred launches of a few microseconds each; as a graph it is one
launch. Invariants: everything that changes between steps is at fixed addresses, including the layout of a mixed step; a
step is padded up to the next size, with sequences and tokens that write no KV and whose results are not used. The graph
of a mixed step ends before the logits, which are computed only for the sampled tokens.

The memory of all graphs of an engine is estimated by capturing two of each kind before KV blocks are made. Tensors are
counted by the allocator of this process, so other processes on the device have no effect. The driver's own memory for
a graph can only be seen as a decrease of the device's free memory. Other processes change that too, so the estimate has
an upper bound.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch

from ..step import StepPlan
from .device import Device, Graph
from .device_rows import DeviceRows, Padded, StepShape
from .program import GpuProgram
from .row_messages import num_sequences

logger = logging.getLogger(__name__)

MAX_CAPTURE_S = 60.0
"""No more sizes are captured after this time; steps of those sizes use a larger graph or none."""

_MAX_MIXED_TOKENS = 2048
"""Larger steps keep a device busy for longer than the host needs to launch their kernels."""

_ADVICE = "expected a lower engine argument 'gpu_memory_utilization', fewer 'cudagraph_capture_sizes', or enforce_eager"


def ladder(most: int, wanted: Sequence[int] | None = None) -> list[int]:
    """Ascending batch sizes up to `most`: the wanted ones, or 1, 2, 4, 8, then steps of 8, steps of 16 from 256 on, and
    `most` itself (vLLM's sizes)."""
    if wanted is not None:
        return sorted({size for size in wanted if size <= most})
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16), most]
    return sorted({size for size in sizes if size <= most})


def mixed_ladder(max_tokens: int, wanted: Sequence[int] | None = None) -> list[int]:
    """Ascending numbers of tokens up to max_tokens: the wanted ones, or steps of 64, of 128 from 512 on, and of 256
    from 1024 to _MAX_MIXED_TOKENS; and max_tokens itself, if it is smaller."""
    if wanted is not None:
        return sorted({size for size in wanted if 1 < size <= max_tokens})
    most = min(max_tokens, _MAX_MIXED_TOKENS)
    sizes = {*range(64, 512, 64), *range(512, 1024, 128), *range(1024, most, 256), most}
    return sorted(size for size in sizes if 1 < size <= most)


class StepGraphs:
    def __init__(
        self,
        device: Device,
        program: GpuProgram,
        rows: DeviceRows,
        max_model_len: int,
        most: Callable[[int], int] | None = None,
    ) -> None:
        """most: for several ranks that capture together, returns the maximum of their numbers (if only some ranks ran a
        step as a graph, it would never end). None = there is one rank."""
        self._device, self._program, self._rows, self._max_model_len = device, program, rows, max_model_len
        self._most = most
        self._graphs: dict[Padded, Graph] = {}
        self._logits: dict[Padded, torch.Tensor] = {}
        """Of decode steps."""
        self._sizes: list[Padded] = []
        """Decode steps first, smaller sizes first."""

    @property
    def decode_sizes(self) -> list[int]:
        return sorted({size.num_rows for size in self._sizes if size.is_decode})

    @property
    def mixed_sizes(self) -> list[int]:
        return [size.num_tokens for size in self._sizes if not size.is_decode]

    def capture(self, sizes: Sequence[Padded]) -> float:
        """Captures decode steps before mixed ones, and the largest of a kind first, because the others fit in its
        memory. Returns the seconds it took. Sizes beyond MAX_CAPTURE_S are left out; with one rank, so are sizes that
        do not fit in memory.

        With several ranks, raises ValueError for the latter, because the other ranks would wait for the step.
        """
        start_s = time.monotonic()
        for size in sorted(sizes, key=lambda size: (size.is_decode, size.num_tokens), reverse=True):
            if self._spent_s(start_s) > MAX_CAPTURE_S:
                logger.warning("no graphs from %s on: capture took %g s", size, MAX_CAPTURE_S)
                break
            self._device.enqueue(partial(self._rows.forget_step, size))
            try:
                self._graphs[size] = self._device.capture(lambda size=size: self._run(size))  # type: ignore[misc]
            except torch.OutOfMemoryError as error:
                if self._most is not None:
                    raise ValueError(f"no memory for graphs of {size}: {_ADVICE}") from error
                logger.warning("no graphs from %s on: out of memory", size)
                self._logits.pop(size, None)
                break
        self._sizes = sorted(self._graphs, key=lambda size: (not size.is_decode, size.num_tokens, size.adapts))
        return time.monotonic() - start_s

    def _spent_s(self, start_s: float) -> float:
        """The maximum over ranks."""
        spent_s = time.monotonic() - start_s
        return spent_s if self._most is None else self._most(int(spent_s * 1e3)) / 1e3

    def forget(self) -> None:
        """Drops all graphs and frees their memory."""
        self._graphs.clear()
        self._sizes = []
        self._logits.clear()
        self._device.trim()

    def size_for(self, plan: StepPlan, adapts: bool = False) -> Padded | None:
        """The size to which this step is padded, a decode size if each sequence decodes one token; None = no graph is
        large enough. adapts: whether a row has a LoRA adapter."""
        num_rows, num_tokens = num_sequences(plan), plan.num_tokens
        is_decode = num_tokens == num_rows and bool(plan.sample_rows.all())
        for size in self._sizes:
            fits = size.num_rows >= num_rows and size.num_tokens >= num_tokens
            if fits and is_decode >= size.is_decode and size.adapts >= adapts:
                return size
        return None

    def replay(self, size: Padded, num_samples: int) -> torch.Tensor:
        """Device work: computes the most recently uploaded step. Returns logits [num_samples, vocab], valid until the
        next step."""
        self._graphs[size].replay()
        if size.is_decode:
            return self._logits[size][:num_samples]
        return self._program.logits_behind(self._rows.sampled_tokens(num_samples))

    def _run(self, size: Padded) -> None:
        with torch.inference_mode():
            num_samples, max_query_len = (size.num_rows, 1) if size.is_decode else (0, size.num_tokens)
            bounds = num_samples, max_query_len, self._max_model_len
            shape = StepShape(size.num_rows, size.num_tokens, *bounds, size.adapts)
            layout = self._rows.layout(shape)
            if size.is_decode:
                self._logits[size] = self._program.forward(layout, self._rows.block_table)
            else:
                self._program.run_layers(layout, self._rows.block_table)


MAX_LAUNCH_BYTES_PER_GRAPH = 32 << 20


class _Used(NamedTuple):
    held_bytes: int
    beside_bytes: int


def graph_bytes(graphs: StepGraphs, device: Device, sizes: Sequence[Padded]) -> int:
    """Estimates the memory of graphs of these sizes. Leaves no graphs behind."""
    kinds = [[size for size in sizes if size.is_decode == is_decode] for is_decode in (True, False)]
    total = sum(_bytes_of_kind(graphs, device, kind) for kind in kinds if kind)
    graphs.forget()
    return total


def _bytes_of_kind(graphs: StepGraphs, device: Device, sizes: Sequence[Padded]) -> int:
    """The largest graph allocates the tensors shared by all; each has launches and may need tensors of its own."""
    used = [_with_graphs(graphs, device, some) for some in (sizes[:0], sizes[-1:], sizes[-2:])]
    first, second = (max(after.held_bytes - before.held_bytes, 0) for before, after in pairwise(used))
    launches = min(after.beside_bytes - before.beside_bytes for before, after in pairwise(used[: len(sizes) + 1]))
    each = min(max(launches, 0), MAX_LAUNCH_BYTES_PER_GRAPH)
    return first + second * (len(sizes) - 1) + each * len(sizes)


def _with_graphs(graphs: StepGraphs, device: Device, sizes: Sequence[Padded]) -> _Used:
    graphs.forget()
    graphs.capture(sizes)
    device.synchronize()
    device.trim()
    memory, held_bytes = device.memory(), device.held_bytes
    return _Used(held_bytes, memory.total_bytes - memory.free_bytes - held_bytes)
