"""Linear layers of heads against the linear layer of each, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.expert_layout import ExpertMatrix, heads_op, steps_of, steps_of_rows
from llmbackend.engine.kernels.library import NativeKernels, op_pointers
from llmbackend.engine.kernels.operations import Epilogue, Kind, LinearOp, Rows, Step, Type
from llmbackend.engine.kernels.weights import PackedWeight, WeightStore
from tests.helpers.native_engines import (
    COMPILER,
    EMULATED_TILES,
    Array,
    best_is_fast,
    engine,
    from_bf16,
    in_tiles,
    out_of_tiles,
    to_bf16,
)

VARIANTS = list(library.available())
KINDS = [Type.FLOAT32, Type.BFLOAT16, Type.INT8, Type.INT4_MIN]
HEADS, N, K, GAP = 3, 64, 96, 32

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no native kernels are built")


class Heads:
    """A matrix [N, K] for each head: packed one by one, or the last rows of each head's in a larger matrix."""

    def __init__(self, kernels: NativeKernels, kind: Type, is_part: bool = False) -> None:
        torch.manual_seed(1)
        self.kernels, self.kind = kernels, kind
        if is_part:
            size = GAP + N
            whole = WeightStore(kernels, [(HEADS * size, K, kind)]).pack(torch.randn(HEADS * size, K), kind)
            self.packed = [whole.part(head * size + GAP, N) for head in range(HEADS)]
            self.steps = steps_of_rows(size, K, kind)
        else:
            store = WeightStore(kernels, [(N, K, kind)] * HEADS)
            self.packed = [store.pack(torch.randn(N, K), kind) for _ in range(HEADS)]
            self.steps = steps_of(N, K, kind)

    def run(self, x: Array, threads: int = 1, tiles: bool = False) -> Array:
        """x float32 [tokens, HEADS, K + GAP], of which a head's first K are read; [tokens, HEADS * N]."""
        tokens = len(x)
        if tiles:
            y = in_tiles(np.full((tokens, HEADS * N), 7, np.uint16))
            to, y_type = (y.ctypes.data, HEADS * N, N), Type.BFLOAT16_TILES
        else:
            y = np.full((tokens, HEADS * N + 5), np.nan, np.float32)
            to, y_type = (y.ctypes.data, y.shape[1], N), Type.FLOAT32
        rows = (x.ctypes.data, HEADS * (K + GAP), K + GAP)
        op = heads_op(HEADS, matrix_of(self.packed[0]), self.steps, rows, to, y_type)
        kernels = self.kernels if threads == 1 else NativeKernels(self.kernels.library, threads)
        kernels.run(op_pointers([op]), 1, Step(num_tokens=tokens))
        if tiles:
            return from_bf16(out_of_tiles(y)[:tokens])
        assert np.isnan(y[:, HEADS * N :]).all(), "wrote past the columns"
        return y[:, : HEADS * N]

    def expected(self, x: Array) -> Array:
        """By the linear layers of single heads."""
        return np.concatenate([self._linear(x[:, head, :K], packed) for head, packed in enumerate(self.packed)], 1)

    def _linear(self, x: Array, packed: PackedWeight) -> Array:
        x_type, x = Type.FLOAT32, np.ascontiguousarray(x)
        if self.kind is Type.BFLOAT16 and self.kernels.library.activation_type(Type.BFLOAT16) is not Type.FLOAT32:
            x_type, x = Type.BFLOAT16, to_bf16(x)
        y = np.empty((len(x), N), np.float32)
        op = LinearOp(
            kind=Kind.LINEAR, rows=Rows.TOKENS, weight=packed.address, scale=packed.scale or None,
            sums=packed.sums or None, x=x.ctypes.data, y=y.ctypes.data, n=N, k=K, x_stride=K, y_stride=N,
            weight_type=self.kind, x_type=x_type, y_type=Type.FLOAT32, epilogue=Epilogue.STORE, factor=1.0,
        )  # fmt: skip
        self.kernels.run(op_pointers([op]), 1, Step(num_tokens=len(x)))
        return y


def matrix_of(packed: PackedWeight) -> ExpertMatrix:
    return ExpertMatrix(packed.address, packed.scale or None, packed.sums or None, N, K, packed.type, None)


def rows_of(tokens: int) -> Array:
    random = np.random.default_rng(tokens)
    return random.standard_normal((tokens, HEADS, K + GAP)).astype(np.float32)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_part", [False, True])
def test_each_head_is_multiplied_by_its_matrix(variant: str, kind: Type, is_part: bool) -> None:
    heads = Heads(engine(variant), kind, is_part)
    for tokens in (0, 1, 3, 40, 300):
        x = rows_of(tokens)
        expected = heads.expected(x)
        for threads in (1, 3):
            assert np.array_equal(heads.run(x, threads), expected), f"{tokens} tokens"


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_get_the_same_rounded(kind: Type) -> None:
    if not COMPILER:
        pytest.skip("no compiler")
    heads = Heads(engine(EMULATED_TILES), kind)
    for tokens in (1, 17, 40):
        x = rows_of(tokens)
        assert np.array_equal(heads.run(x, threads=2), heads.expected(x))
        assert np.array_equal(heads.run(x, tiles=True), from_bf16(to_bf16(heads.run(x))))
