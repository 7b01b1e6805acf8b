"""Ragged batches over paged keys and values for tests of the native attention, with neighbours that must have no
effect."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmbackend.engine.kernels.library import NativeKernels, op_pointers
from llmbackend.engine.kernels.operations import AttentionOp, Kind, RotaryOp, Step, Type

from .fixed_point import fixed_point
from .native_engines import Array, from_bf16, to_bf16

STALE = 3e38
"""What unwritten slots hold: a weight of zero must not let it through."""


def rounded(x: Array, kind: Type) -> Array:
    return x if kind is Type.FLOAT32 else from_bf16(to_bf16(x))


def stored(k: Array, v: Array, kind: Type) -> tuple[Array, Array]:
    return fixed_point(k, v) if kind is Type.FIXED16 else (rounded(k, kind), rounded(v, kind))


@dataclass(frozen=True)
class Shape:
    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 32
    kv_type: Type = Type.BFLOAT16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    out_type: Type = Type.FLOAT32
    slopes: bool = False
    """A bias by distance (ALiBi)"""
    latent_dim: int = 0
    """Values are the last ones of keys; 0: they are numbers of their own."""

    @property
    def value_dim(self) -> int:
        return self.latent_dim or self.dim


@dataclass(frozen=True)
class Tokens:
    """q [tokens, heads, dim], k [tokens, kv_heads, dim] and v [tokens, kv_heads, value_dim] of a whole sequence."""

    q: Array
    k: Array
    v: Array

    @staticmethod
    def random(shape: Shape, length: int, seed: int) -> Tokens:
        rng = np.random.default_rng(seed)
        q, k, v = (
            rng.standard_normal((length, heads, shape.dim)).astype(np.float32)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        return Tokens(q * 2, k, k[..., -shape.latent_dim :] if shape.latent_dim else v)

    def __len__(self) -> int:
        return len(self.q)


SINKS = np.linspace(-3, 4, 32, dtype=np.float32)
SLOPES = (2.0 ** -np.linspace(1, 8, 32)).astype(np.float32)


class Pages:
    """KV memory of one layer and the block tables of some sequences, in blocks drawn at random."""

    def __init__(self, shape: Shape, lengths: Sequence[int], seed: int = 0) -> None:
        self.shape = shape
        counts = [-(-length // shape.block_size) for length in lengths]
        order = np.random.default_rng(seed).permutation(sum(counts) + 3)
        self.table = np.zeros((len(lengths), max(counts) + 2), np.int32)
        for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
            self.table[row, :count] = order[end - count : end]
        size = len(order) * shape.kv_heads * shape.block_size * shape.dim
        stale = (
            np.full(size, STALE, np.float32) if shape.kv_type is not Type.FIXED16 else np.full(size, 0xFFFF, np.uint16)
        )
        self.keys, self.values = (to_bf16(stale) if shape.kv_type is Type.BFLOAT16 else stale.copy() for _ in "kv")

    def slots(self, row: int, positions: Array) -> Array:
        size = self.shape.block_size
        return np.asarray(self.table[row, positions // size] * size + positions % size, np.int32)


@dataclass
class Batch:
    """The arrays of a step: (row, first position, number of tokens) per entry."""

    pages: Pages
    parts: Sequence[tuple[int, int, int]]

    def __post_init__(self) -> None:
        counts = [count for _, _, count in self.parts]
        self.positions = np.concatenate([np.arange(a, a + n) for _, a, n in self.parts]).astype(np.int32)
        self.slots = np.concatenate([self.pages.slots(row, np.arange(a, a + n)) for row, a, n in self.parts])
        self.query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        self.seq_lens = np.array([a + n for _, a, n in self.parts], np.int32)
        self.table = np.ascontiguousarray(self.pages.table[[row for row, _, _ in self.parts]])
        self.step = Step(
            num_tokens=len(self.positions),
            num_rows=len(self.parts),
            block_table_stride=self.table.shape[1],
            positions=self.positions.ctypes.data,
            slots=self.slots.ctypes.data,
            query_start=self.query_start.ctypes.data,
            seq_lens=self.seq_lens.ctypes.data,
            block_table=self.table.ctypes.data,
        )


def gather(sequences: Sequence[Tokens], parts: Sequence[tuple[int, int, int]], name: str, stride: int) -> Array:
    """The batch's rows of q, k or v, `stride` elements apart, with NaN between them."""
    rows = np.concatenate([getattr(sequences[row], name)[a : a + n] for row, a, n in parts])
    out = np.full((len(rows), stride), np.nan, np.float32)
    out[:, : rows[0].size] = rows.reshape(len(rows), -1)
    return out


def run(team: NativeKernels, ops: Sequence[ctypes.Structure], step: Step) -> None:
    team.run(op_pointers(ops), len(ops), step)


def attend(
    team: NativeKernels, pages: Pages, sequences: Sequence[Tokens], parts: Sequence[tuple[int, int, int]]
) -> list[Array]:
    """Writes the parts' keys and values and attends: bits [tokens, heads * value_dim] per part."""
    shape, batch = pages.shape, Batch(pages, parts)
    width = shape.heads * shape.value_dim
    stride, out_stride = shape.heads * shape.dim + 16, width + 7
    q, k, v = (gather(sequences, parts, name, stride) for name in "qkv")
    out = np.full((len(q), out_stride), np.nan, np.float32)
    if shape.out_type is Type.BFLOAT16:
        out = to_bf16(out)
    before = out.copy()
    common = {"head_dim": shape.dim, "block_size": shape.block_size, "kv_type": shape.kv_type,
              "num_heads": shape.heads, "num_kv_heads": shape.kv_heads,
              "keys": pages.keys.ctypes.data,
              "values": None if shape.latent_dim else pages.values.ctypes.data}  # fmt: skip
    write = RotaryOp(kind=Kind.ROTARY, q=q.ctypes.data, k=k.ctypes.data, v=v.ctypes.data, stride=stride, **common)
    op = AttentionOp(kind=Kind.ATTENTION, q=q.ctypes.data, out=out.ctypes.data, q_stride=stride, out_stride=out_stride,
                     window=shape.window, softcap=shape.softcap, scaling=shape.dim**-0.5, out_type=shape.out_type,
                     sinks=SINKS.ctypes.data if shape.sinks else None,
                     slopes=SLOPES.ctypes.data if shape.slopes else None, value_dim=shape.latent_dim,
                     **common)  # fmt: skip
    run(team, [write, op], batch.step)
    border = (slice(None), slice(width, None))
    assert out[border].tobytes() == before[border].tobytes()
    return np.split(out[:, :width].copy(), batch.query_start[1:-1])
