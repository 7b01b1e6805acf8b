"""CUDA graphs of decode steps: one for each of a ladder of batch sizes, captured when the engine starts.

For: the runner. A decode step of a small model is a few hundred launches of a few microseconds each; as a graph it is
one. Does not know: requests, sampling. Invariants: what changes from step to step is in memory at fixed addresses; a
step is padded up to the next size with sequences that write no KV and whose results are not used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch

from ..step import StepPlan
from .device import Device, Graph
from .device_rows import DeviceRows, StepShape
from .program import GpuProgram

logger = logging.getLogger(__name__)

MAX_CAPTURE_S = 60.0
"""After so many seconds no more sizes are captured; their steps are padded up to larger ones."""


def ladder(max_num_seqs: int, wanted: Sequence[int] | None = None) -> list[int]:
    """Batch sizes in rising order, none above max_num_seqs: the wanted ones, or 1, 2, 4, 8, then steps of 8, steps of
    16 from 256 on, and max_num_seqs itself (vLLM's sizes)."""
    if wanted is not None:
        return sorted({size for size in wanted if size <= max_num_seqs})
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 1, 16), max_num_seqs]
    return sorted({size for size in sizes if size <= max_num_seqs})


class DecodeGraphs:
    def __init__(self, device: Device, program: GpuProgram, rows: DeviceRows, max_model_len: int) -> None:
        self._device, self._program, self._rows, self._max_model_len = device, program, rows, max_model_len
        self._graphs: dict[int, Graph] = {}
        self._logits: dict[int, torch.Tensor] = {}
        self._sizes = np.empty(0, np.int64)

    @property
    def sizes(self) -> list[int]:
        return self._sizes.tolist()

    def capture(self, sizes: Sequence[int]) -> float:
        """Captures the largest size first, because the others fit into its memory. Returns how many seconds it took.
        Sizes that do not fit into memory, or into MAX_CAPTURE_S, are left out."""
        start_s = time.monotonic()
        self._device.enqueue(self._rows.forget_step)
        for size in sorted(sizes, reverse=True):
            if time.monotonic() - start_s > MAX_CAPTURE_S:
                logger.warning("no decode graphs below %d sequences: capturing took %g s", size + 1, MAX_CAPTURE_S)
                break
            try:
                self._graphs[size] = self._device.capture(lambda size=size: self._run(size))  # type: ignore[misc]
            except torch.OutOfMemoryError:
                logger.warning("no decode graphs of %d sequences and less: out of memory", size)
                self._logits.pop(size, None)
                break
        self._sizes = np.array(sorted(self._graphs), np.int64)
        return time.monotonic() - start_s

    def forget(self) -> None:
        """Drops all graphs and frees their memory."""
        self._graphs.clear()
        self._logits.clear()
        self._sizes = np.empty(0, np.int64)
        self._device.trim()

    def size_for(self, plan: StepPlan) -> int | None:
        """The size that this step is padded to; None when it is not one decoded token of each row, or too large."""
        place = int(np.searchsorted(self._sizes, len(plan.rows)))
        if place == len(self._sizes) or plan.num_tokens != len(plan.rows) or not plan.sample_rows.all():
            return None
        return int(self._sizes[place])

    def replay(self, size: int) -> torch.Tensor:
        """Device work: computes the step whose message was uploaded last. Logits [size, vocab], valid until the next
        step."""
        self._graphs[size].replay()
        return self._logits[size]

    def _run(self, size: int) -> None:
        with torch.inference_mode():
            layout = self._rows.layout(StepShape(size, size, size, 1, self._max_model_len))
            self._logits[size] = self._program.forward(layout, self._rows.block_table)
