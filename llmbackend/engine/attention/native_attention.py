"""Paged attention on the native kernels, for modules.

Used for models that run as transformers modules on CPU, if every layer fits the layout of native KV memory
(cpu/native_memory.py). Invariants: the keys and values of a step are written before they are read, and are finite (the
kernel that writes replaces others); the result of a query depends, bit by bit, only on its own row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ..cpu.native_memory import LayerKV, NativeKVMemory, NativeLayerCache, can_hold
from ..kernels.library import NativeKernels, op_pointers
from ..kernels.operations import AttentionOp, Kind, RotaryOp, Step
from ..kernels.weights import TYPE_OF
from ..step import FlatStep
from .interface import AttentionOptions, LayerShape

_POINTERS = ("positions", "slots", "query_start", "seq_lens", "block_table")


class NativePagedAttention:
    """The context of consecutive steps: `begin` selects the step to which the next calls of `attend` belong."""

    def __init__(self, kernels: NativeKernels, layers: Iterable[nn.Module], memory: NativeKVMemory) -> None:
        """layers: those of the memory, in the same order"""
        self._kernels, self._memory = kernels, memory
        self._layers = {layer: _LayerOps(cache) for layer, cache in zip(layers, memory.layers, strict=True)}
        self._step = Step()
        self._arrays: tuple[npt.NDArray[np.int32], ...] = ()

    def begin(self, step: FlatStep, block_table: npt.NDArray[np.int32]) -> None:
        """block_table int32 [rows, blocks]: of the rows of the step, contiguous."""
        slots, blocks = self._memory.kernels_slots(step.slots), self._memory.kernels_blocks(block_table)
        self._arrays = (step.positions, slots, step.query_start, step.seq_lens, blocks)
        assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in self._arrays)
        pointers = (array.ctypes.data for array in self._arrays)
        self._step = Step(
            num_tokens=len(step.positions),
            num_rows=len(step.seq_lens),
            block_table_stride=block_table.shape[1],
            **dict(zip(_POINTERS, pointers, strict=True)),
        )

    def attend(
        self, layer: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        ops = self._layers[layer]
        rows = torch.cat((query, key, value), dim=1).float()
        output = torch.empty(query.shape, dtype=query.dtype if query.dtype in TYPE_OF else torch.float32)
        ops.point_at(rows, query.shape[1], output, options)
        self._kernels.run(ops.pointers, 2, self._step)
        return output.to(query.dtype)


class _LayerOps:
    """The two operations of one layer: write its keys and values, and attend."""

    def __init__(self, cache: NativeLayerCache) -> None:
        self._cache = cache
        self._sinks: torch.Tensor | None = None
        self._slopes: torch.Tensor | None = None
        common = {
            "kv_type": cache.type,
            "num_kv_heads": cache.num_kv_heads,
            "head_dim": cache.head_dim,
            "block_size": cache.block_size,
            "keys": cache.keys,
            "values": cache.values,
        }
        # Without angles and norms, this only writes: queries and keys are already rotated.
        self._write = RotaryOp(kind=Kind.ROTARY, **common)
        self._attend = AttentionOp(kind=Kind.ATTENTION, **common)
        self.pointers = op_pointers([self._write, self._attend])

    def point_at(self, rows: torch.Tensor, num_heads: int, output: torch.Tensor, options: AttentionOptions) -> None:
        """rows float32 [tokens, heads + 2 * kv_heads, dim]: queries, keys and values concatenated; output [tokens,
        heads, dim]."""
        write, attend, dim = self._write, self._attend, self._cache.head_dim
        address, head_bytes = rows.data_ptr(), 4 * dim
        write.q = attend.q = address
        write.k = address + num_heads * head_bytes
        write.v = write.k + self._cache.num_kv_heads * head_bytes
        write.stride = attend.q_stride = rows.shape[1] * dim
        write.num_heads = attend.num_heads = num_heads
        attend.out, attend.out_stride, attend.out_type = output.data_ptr(), num_heads * dim, TYPE_OF[output.dtype]
        attend.scaling = options.scaling
        attend.softcap = options.softcap or 0.0
        attend.window = options.sliding_window or 0
        self._sinks, self._slopes = _floats(options.sinks), _floats(options.slopes)
        attend.sinks = None if self._sinks is None else self._sinks.data_ptr()
        attend.slopes = None if self._slopes is None else self._slopes.data_ptr()


def _floats(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().float().contiguous()


def native_kv_memory(
    kernels: NativeKernels, shapes: Mapping[nn.Module, LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype
) -> NativeKVMemory | None:
    """Memory for the layers, in their order; None = one of them does not fit the native layout. Raises MemoryError."""
    fits = dtype in TYPE_OF and all(can_hold(each.key_dim, each.value_dim, block_size) for each in shapes.values())
    if not fits:
        return None
    layers = [LayerKV(shape.num_kv_heads, shape.key_dim) for shape in shapes.values()]
    return NativeKVMemory(kernels.library, layers, num_blocks, block_size, TYPE_OF[dtype])
