"""Chooses the kernel library for a model: the one that is fastest on a small part of a decoder layer.

Used by the loader when it packs a model; the choice is stored with the packed weights, and `library.load` loads it by
name. Invariants: only libraries that this CPU can execute and that passed their self-test are measured; one process
measures each type of weights once, so all its engines compute the same bits; if the difference is within measurement
noise, the wider instruction set wins.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .library import VARIANTS, KernelLibrary, NativeKernels, available, load, op_pointers, packed_bytes
from .operations import AttentionOp, Epilogue, Kind, LinearOp, Step, Type

_ROUNDS: Final = 7
"""Libraries take turns, and the minimum time of each counts, because other processes rarely disturb every round."""
_TIE: Final = 1.05
"""Real alternatives differ by a factor of two; smaller differences than this are noise."""
_ROWS, _N, _K = 64, 256, 896
_QUERIES, _KEYS, _HEADS, _HEAD_DIM = 32, 128, 4, 64


@dataclass(frozen=True, slots=True)
class Choice:
    library: KernelLibrary
    report: str


@functools.cache
def choose_library(weights: Type) -> Choice | None:
    """The library for a model whose linear layers have weights of this type; None, with a warning = there is none."""
    libraries = _candidates()
    if not libraries:
        best = load()
        return None if best is None else Choice(best, f"{best.variant}: no other kernels can run here")
    pieces = [_Piece(library, weights) for library in libraries]
    seconds = _least_seconds(pieces)
    limit = min(seconds) * _TIE
    chosen = next(i for i, taken in enumerate(seconds) if taken <= limit)
    rates = [_FLOPS / taken / 1e9 for taken in seconds]
    return Choice(libraries[chosen], _report(libraries, rates, chosen))


def _candidates() -> list[KernelLibrary]:
    """The libraries with vector instructions that this CPU can execute, widest first."""
    found = (load(name) for name in available() if name != "generic")
    return [library for library in found if library is not None]


def _report(libraries: Sequence[KernelLibrary], rates: Sequence[float], chosen: int) -> str:
    measured = (f"{library.variant} {rate:.0f} GFLOP/s" for library, rate in zip(libraries, rates, strict=True))
    missing = sorted(set(VARIANTS) - set(available()), key=list(VARIANTS).index)
    text = f"{libraries[chosen].variant} (measured: {', '.join(measured)}"
    return text + (f"; cannot run here: {', '.join(missing)})" if missing else ")")


_FLOPS: Final = 2 * _ROWS * _N * _K + 4 * _QUERIES * _HEADS * _HEAD_DIM * (_KEYS - (_QUERIES - 1) / 2)


def _least_seconds(pieces: Sequence[_Piece]) -> list[float]:
    least = [float("inf")] * len(pieces)
    for piece in pieces:
        piece.run()
    for _ in range(_ROUNDS):
        for i, piece in enumerate(pieces):
            begin = time.perf_counter()
            piece.run()
            least[i] = min(least[i], time.perf_counter() - begin)
    for piece in pieces:
        piece.close()
    return least


class _Piece:
    """Some columns of a linear layer and some heads of an attention, in the proportions of a prefill. They fit in a
    core's caches, because compute is compared, not memory."""

    def __init__(self, library: KernelLibrary, weights: Type) -> None:
        self._kernels = NativeKernels(library, 1)
        self._keep: list[npt.NDArray[Any]] = []
        model_type = Type.FLOAT32 if weights is Type.FLOAT32 else Type.BFLOAT16
        rows = library.activation_type(model_type)
        self._ops = [self._linear(weights, rows), self._attention(library.kv_type(model_type), rows)]
        self._pointers = op_pointers(self._ops)
        starts, lengths = np.array([0, _QUERIES], np.int32), np.array([_KEYS], np.int32)
        blocks = np.zeros(1, np.int32)
        self._step = Step(num_tokens=_ROWS, num_rows=1, block_table_stride=1, query_start=self._kept(starts),
                          seq_lens=self._kept(lengths), block_table=self._kept(blocks))  # fmt: skip

    def run(self) -> None:
        self._kernels.run(self._pointers, len(self._ops), self._step)

    def close(self) -> None:
        self._kernels.close()

    def _kept(self, array: npt.NDArray[Any]) -> int:
        self._keep.append(array)
        return int(array.ctypes.data)

    def _numbers(self, count: int, kind: Type) -> int:
        """Ones: products of all numbers take equally long, except those near zero."""
        if kind is Type.INT8:
            return self._kept(np.ones(count, np.int8))
        ones = np.ones(count, np.float32)
        return self._kept(ones if kind is Type.FLOAT32 else (ones.view(np.uint32) >> 16).astype(np.uint16))

    def _linear(self, weights: Type, rows: Type) -> LinearOp:
        size = packed_bytes(_N, _K, weights) // (1 if weights is Type.INT8 else 4 if weights is Type.FLOAT32 else 2)
        return LinearOp(
            kind=Kind.LINEAR, weight=self._numbers(size, weights), x=self._numbers(_ROWS * _K, rows),
            y=self._numbers(_ROWS * _N, Type.FLOAT32), scale=self._numbers(_N, Type.FLOAT32),
            sums=self._kept(np.zeros(_N, np.int32)), n=_N, k=_K, x_stride=_K, y_stride=_N, weight_type=weights,
            x_type=rows, y_type=Type.FLOAT32, epilogue=Epilogue.STORE, factor=1.0,
        )  # fmt: skip

    def _attention(self, kv_type: Type, rows: Type) -> AttentionOp:
        width = _HEADS * _HEAD_DIM
        return AttentionOp(
            kind=Kind.ATTENTION, kv_type=kv_type, q=self._numbers(_QUERIES * width, Type.FLOAT32),
            keys=self._numbers(_KEYS * _HEAD_DIM, kv_type), values=self._numbers(_KEYS * _HEAD_DIM, kv_type),
            out=self._numbers(_QUERIES * width, rows), q_stride=width, out_stride=width, num_heads=_HEADS,
            num_kv_heads=1, head_dim=_HEAD_DIM, block_size=_KEYS, out_type=rows, scaling=_HEAD_DIM**-0.5,
        )  # fmt: skip
