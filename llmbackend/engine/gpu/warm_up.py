"""The steps that an engine runs before its first request: the largest one, and one of each kind.

For: start.py. Does not know: requests, graphs, how memory is measured. Invariants: a step of a running engine needs no
kernel that these did not, so that no request waits for a compiler; what they need of memory is at least what any step
needs beside weights, buffers and KV blocks; they write to the first KV block alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..config import EngineConfig
from ..infer_request import ModelInfo
from ..step import RowTable, Runner, StepPlan
from .runner import GpuRunner, RunnerParts

_SIZES = 1, 65, 257
"""Numbers of rows for which products may be compiled anew (kernels/matmul.py)."""


def warm_up(config: EngineConfig, parts: RunnerParts, info: ModelInfo) -> None:
    """The memory it used counts as used from then on (Device.memory). Raises torch.OutOfMemoryError."""
    runner = GpuRunner(parts, info)
    for counts, length in (_largest(config, info.max_model_len), *_kinds(config, info.max_model_len)):
        _run(runner, config, counts, length)


def run_largest(runner: Runner, config: EngineConfig) -> None:
    """The largest step alone. Raises torch.OutOfMemoryError."""
    _run(runner, config, *_largest(config, runner.info.max_model_len))


def _largest(config: EngineConfig, max_model_len: int) -> tuple[list[int], int]:
    """As many tokens and samples as a step can have."""
    num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    count = max(1, min(config.max_num_batched_tokens // num_rows, max_model_len - 1))
    return [count] * num_rows, count


def _kinds(config: EngineConfig, max_model_len: int) -> Iterator[tuple[list[int], int]]:
    """Tokens of each row, and the length of all: decoded tokens and a prompt's end, behind as many keys as can be. (The
    sampled token has a place of its own.)"""
    length = max_model_len - 1
    for size in _SIZES:
        for counts in ([1] * size, [size + 1]):
            fits = len(counts) <= config.max_num_seqs and sum(counts) <= config.max_num_batched_tokens
            if fits and max(counts) <= length:
                yield counts, length


def _run(runner: Runner, config: EngineConfig, counts: Sequence[int], length: int) -> None:
    table = RowTable(len(counts), length, config.block_size)
    table.num_tokens[:] = length
    table.num_computed_tokens[:] = length - np.array(counts, np.int32)
    rows = np.arange(len(counts), dtype=np.int32)
    runner.execute(StepPlan(rows, np.array(counts, np.int32), np.ones(len(counts), np.bool_)), table)
