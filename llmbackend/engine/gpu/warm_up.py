"""The steps that an engine runs before its first request: the largest one, and one of each kind.

For: make_gpu_runner.py, and models that run as modules on a GPU, whose KV blocks get what the largest step leaves. Does
not know: requests, graphs. Invariants: a step of a running engine needs no kernel that these did not, so that no
request waits for a compiler; what they need of memory is at least what any step needs beside weights, buffers and KV
blocks; they write to the first KV block alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..config import EngineConfig
from ..messages import ModelInfo
from ..model.loader import LoadedModel
from ..step import Int32Array, RowTable, Runner, StepPlan
from .device import Device
from .device_kv_memory import block_bytes, num_kv_blocks
from .gpu_runner import GpuRunner, RunnerParts
from .rows.row_messages import max_sequences

_SIZES = 1, 17, 65, 257
"""Numbers of tokens, and of samples, for which products may be compiled anew (kernels/matmul.py,
kernels/int4_matmul.py)."""


def warm_up(config: EngineConfig, parts: RunnerParts, info: ModelInfo) -> None:
    """The memory it used counts as used from then on (Device.memory). Raises torch.OutOfMemoryError."""
    runner = GpuRunner(parts, info)
    if parts.adapters is not None:
        parts.messages.expect_adapters()
    for step in (_largest(config, info.max_model_len), *_kinds(config, info.max_model_len)):
        _run(runner, config, step)


def run_largest(runner: Runner, config: EngineConfig) -> None:
    """The largest step alone. Raises torch.OutOfMemoryError."""
    _run(runner, config, _largest(config, runner.info.max_model_len))


class _Step(NamedTuple):
    counts: Int32Array
    """Tokens of each row."""
    drafts: Int32Array
    """How many of them."""
    length: int
    """Of all rows, drafts included."""


def _largest(config: EngineConfig, max_model_len: int) -> _Step:
    """As many tokens and samples as a step can have."""
    num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    counts = np.clip(_shares(config.max_num_batched_tokens, num_rows), 1, max(max_model_len - 1, 1))
    drafts = np.minimum(_shares(max_sequences(config) - num_rows, num_rows), counts - 1)
    return _Step(counts, drafts, int(counts.max()))


def _kinds(config: EngineConfig, max_model_len: int) -> Iterator[_Step]:
    """Decoded tokens and drafts, and a prompt's end, behind as many keys as can be. (The sampled token has a place of
    its own.)"""
    length = max_model_len - 1
    for size in _SIZES:
        decoded = _shares(size, min(size, config.max_num_seqs))
        if size <= min(max_sequences(config), config.max_num_batched_tokens) and int(decoded.max()) <= length:
            yield _Step(decoded, decoded - 1, length)
        if size < min(config.max_num_batched_tokens, length):
            yield _Step(np.array([size + 1], np.int32), np.zeros(1, np.int32), length)


def _shares(total: int, count: int) -> Int32Array:
    """`total` in `count` parts, the larger ones first."""
    shares: Int32Array = total // count + (np.arange(count, dtype=np.int32) < total % count).astype(np.int32)
    return shares


def _run(runner: Runner, config: EngineConfig, step: _Step) -> None:
    num_rows = len(step.counts)
    table = RowTable(num_rows, step.length, config.block_size, runner.info.kv_groups.count)
    table.num_tokens[:] = step.length - step.drafts
    table.num_computed_tokens[:] = step.length - step.counts
    drafts = step.drafts if step.drafts.any() else None
    rows = np.arange(num_rows, dtype=np.int32)
    runner.execute(StepPlan(rows, step.counts, np.ones(num_rows, np.bool_), drafts), table)


_COPIES = 4
"""Bytes that attention copies for each byte of a layer's KV that a step reads: the rows' blocks, padded by up to a
third, once in the model's dtype and once in float32."""


def num_module_blocks(config: EngineConfig, loaded: LoadedModel, device: Device, trial: Runner) -> int:
    """trial: the model with one KV block. Raises ValueError when one sequence of max_model_len tokens does not fit,
    torch.OutOfMemoryError when the largest step does not."""
    device.trim()
    run_largest(trial, config)
    device.synchronize()
    layers = loaded.layer_shapes
    with_copies = block_bytes(layers, config.block_size, loaded.dtype) * (len(layers) + _COPIES) // len(layers)
    num_blocks = num_kv_blocks(config, loaded.max_model_len, with_copies, device.memory(), 0)
    # More than all rows at full length need is never used.
    return min(num_blocks, config.max_num_seqs * -(-loaded.max_model_len // config.block_size))
