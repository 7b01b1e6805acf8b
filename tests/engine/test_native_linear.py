"""The native linear layer against float64, and its law: a row of y depends on that row of x alone, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.library import NativeKernels, op_pointers, packed_bytes
from llmbackend.engine.kernels.operations import Epilogue, Kind, LinearOp, Rows, Step, Type
from tests.helpers.native_engines import (
    NAN_BFLOAT16,
    Array,
    best_is_fast,
    check_margins,
    engine,
    from_bf16,
    gated,
    in_tiles,
    numbers,
    out_of_tiles,
    stored,
    stride,
    to_bf16,
)

VARIANTS = [name for name in library.available() if name != "amx"]
TYPES = [(Type.FLOAT32, Type.FLOAT32), (Type.BFLOAT16, Type.FLOAT32), (Type.BFLOAT16, Type.BFLOAT16)]
"""Of weights and rows."""

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no native kernels are built")


def poison(rows: int, stride: int, kind: Type) -> Array:
    return stored(np.full((rows, stride), np.nan, np.float32), kind)


@dataclass
class Layer:
    """A linear layer with random weights of one type, packed by one engine."""

    engine: NativeKernels
    n: int
    k: int
    weight_type: Type = Type.BFLOAT16
    x_type: Type = Type.FLOAT32
    y_type: Type = Type.FLOAT32
    epilogue: Epilogue = Epilogue.STORE
    with_bias: bool = True
    factor: float = 1.0
    keep: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.n * 1000 + self.k)
        shape = (2, self.n, self.k)
        self.weights = numbers(stored(random.standard_normal(shape) / self.k**0.5, self.weight_type), self.weight_type)
        self.biases = random.standard_normal((2, self.n)).astype(np.float32) * self.with_bias
        self.packed = [self._pack(weight) for weight in self.weights]

    def _pack(self, weight: Array) -> Array:
        packed = self.engine.library.memory(packed_bytes(self.n, self.k, self.weight_type))
        packed[:] = 0xFF  # padding must be written too
        raw = stored(weight, self.weight_type)
        shape = (self.n, self.k)
        self.engine.pack(raw.ctypes.data, self.weight_type, shape, self.k, packed.ctypes.data, self.weight_type)
        return packed

    def two(self) -> bool:
        return self.epilogue >= Epilogue.SILU_MUL

    def x(self, rows: int, seed: int = 0) -> Array:
        """[rows, k], surrounded by NaN."""
        x = poison(rows, self.k + 21, self.x_type)
        values = np.random.default_rng(seed).standard_normal((rows, self.k))
        x[:, : self.k] = stored(values, self.x_type)
        return x

    def old_y(self, rows: int) -> Array:
        """What y holds before: NaN, or what is added to."""
        y = poison(rows + 1, self.n + 19, self.y_type)
        if self.epilogue is Epilogue.ADD:
            y[:rows, : self.n] = np.random.default_rng(1).standard_normal((rows, self.n))
        return y

    def run(
        self, x: Array, y: Array | None = None, rows: Rows = Rows.TOKENS, runner: NativeKernels | None = None
    ) -> Array:
        count = len(x)
        y = self.old_y(count) if y is None else y
        before = y.copy()
        if self.y_type is Type.BFLOAT16_TILES:
            y = in_tiles(y[:count, : self.n])
        if self.x_type is Type.BFLOAT16_TILES:
            x = in_tiles(x[:, : self.k])
        addresses = {
            "weight": self.packed[0].ctypes.data,
            "weight2": self.packed[1].ctypes.data if self.two() else None,
            "bias": self.biases[0].ctypes.data if self.with_bias else None,
            "bias2": self.biases[1].ctypes.data if self.with_bias and self.two() else None,
            "x": x.ctypes.data,
            "y": y.ctypes.data,
        }
        op = LinearOp(
            kind=Kind.LINEAR, rows=rows, n=self.n, k=self.k, x_stride=stride(x), y_stride=stride(y),
            weight_type=self.weight_type, x_type=self.x_type, y_type=self.y_type, epilogue=self.epilogue,
            factor=self.factor, **addresses,
        )  # fmt: skip
        tokens, sampled = (count, 0) if rows is Rows.TOKENS else (0, count)
        (runner or self.engine).run(op_pointers([op]), 1, Step(num_tokens=tokens, num_sampled=sampled))
        if self.y_type is Type.BFLOAT16_TILES:
            y = out_of_tiles(y)
            assert not y[:count, self.n :].any(), "the padding is not zero"
            assert (y[count:] == NAN_BFLOAT16).all(), "wrote past the rows"
            return y[:count, : self.n]
        check_margins(y, before, count, self.n)
        return y[:count, : self.n]

    def expected(self, x: Array) -> Array:
        wide = numbers(x[:, : self.k], self.x_type).astype(np.float64)
        first: Array
        second: Array
        first, second = (wide @ w.T.astype(np.float64) + b for w, b in zip(self.weights, self.biases, strict=True))
        if self.epilogue is Epilogue.ADD:
            return np.asarray(self.old_y(len(x))[: len(x), : self.n] + first * self.factor)
        if self.two():
            first = first * self.factor
        return gated(first, second, self.epilogue)


def assert_close(layer: Layer, y: Array, expected: Array) -> None:
    got = numbers(y, layer.y_type)
    relative = 0.0 if layer.y_type is Type.FLOAT32 else 2.0**-8
    np.testing.assert_allclose(got, expected, rtol=relative, atol=2e-6 * layer.k**0.5)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("shape", [(32, 32), (1, 1), (33, 7), (100, 64), (64, 2051)])
@pytest.mark.parametrize("rows", [1, 5, 13, 30])
def test_it_multiplies(variant: str, types: tuple[Type, Type], shape: tuple[int, int], rows: int) -> None:
    layer = Layer(engine(variant), *shape, *types)
    x = layer.x(rows)
    assert_close(layer, layer.run(x), layer.expected(x))


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("n", [64, 70])
def test_epilogues(variant: str, epilogue: Epilogue, with_bias: bool, n: int) -> None:
    layer = Layer(engine(variant), n, 40, epilogue=epilogue, with_bias=with_bias, factor=0.25)
    x = layer.x(7)
    assert_close(layer, layer.run(x), layer.expected(x))


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("epilogue", [Epilogue.STORE, Epilogue.SILU_MUL])
@pytest.mark.parametrize("types", [(Type.BFLOAT16, Type.FLOAT32), (Type.BFLOAT16, Type.BFLOAT16)])
def test_bfloat16_rows(variant: str, epilogue: Epilogue, types: tuple[Type, Type]) -> None:
    layer = Layer(engine(variant), 70, 66, Type.BFLOAT16, *types, epilogue)
    x = layer.x(9)
    assert_close(layer, layer.run(x), layer.expected(x))


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("epilogue", [Epilogue.SILU_MUL, Epilogue.GELU_MUL])
def test_activations_of_large_arguments(variant: str, epilogue: Epilogue) -> None:
    layer = Layer(engine(variant), 32, 1, Type.FLOAT32, epilogue=epilogue, with_bias=False)
    layer.weights[:] = 1.0
    layer.packed = [layer._pack(weight) for weight in layer.weights]
    x = layer.x(6)
    x[:, 0] = (-1e4, -200, -90, 0, 90, 1e4)
    expected = np.array([0, 0, 0, 0, 90**2, 1e8])[:, None].repeat(32, 1)
    np.testing.assert_allclose(layer.run(x), expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
def test_a_row_that_is_no_number_stays_alone(variant: str) -> None:
    layer = Layer(engine(variant), 64, 64, epilogue=Epilogue.SILU_MUL)
    x = layer.x(20)
    clean = layer.run(x)
    x[11, 5] = np.nan
    y = layer.run(x)
    assert np.isnan(y[11]).all()
    assert np.array_equal(np.delete(y, 11, 0), np.delete(clean, 11, 0))


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("rows", list(Rows))
def test_it_counts_tokens_or_samples(variant: str, rows: Rows) -> None:
    layer = Layer(engine(variant), 32, 32)
    x = layer.x(3)
    assert_close(layer, layer.run(x, rows=rows), layer.expected(x))


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("epilogue", [Epilogue.ADD, Epilogue.SILU_MUL])
def test_a_row_does_not_know_its_batch(variant: str, types: tuple[Type, Type], epilogue: Epilogue) -> None:
    layer = Layer(engine(variant), 160, 2300, *types, epilogue=epilogue)
    most = 300
    x = layer.x(most)
    old = layer.old_y(most)
    alone = np.concatenate([layer.run(x[i : i + 1], old[[i, most]]) for i in range(most)])
    assert_close(layer, alone, layer.expected(x))
    for count in (*range(1, 71), 128, 133, 271, 300):
        first = (count * 37) % (most - count + 1)
        for threads in (1, 2, 3) if count in (1, 2, 13, 64, 70, 300) else (1,):
            rows = np.arange(first, first + count)
            y = layer.run(x[rows], old[[*rows, most]], runner=engine(variant, threads))
            assert np.array_equal(y, alone[rows]), f"{count} rows from {first} on, {threads} threads"


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("weight_type", [Type.FLOAT32, Type.BFLOAT16])
@pytest.mark.parametrize("packed_type", [Type.FLOAT32, Type.BFLOAT16])
def test_packing(variant: str, weight_type: Type, packed_type: Type) -> None:
    n, k, stride = 50, 37, 41
    weight = stored(np.random.default_rng(2).standard_normal((n, stride)), weight_type)
    loaded = engine(variant).library
    packed = loaded.memory(packed_bytes(n, k, packed_type))
    packed[:] = 0xFF
    engine(variant).pack(weight.ctypes.data, weight_type, (n, k), stride, packed.ctypes.data, packed_type)
    padded: Array = np.zeros((64, 64), np.float32)
    padded[:n, :k] = numbers(weight, weight_type)[:, :k]
    expected: Array
    if packed_type is Type.FLOAT32:
        expected = padded[:, :k].reshape(2, 32, k).transpose(0, 2, 1)
    else:
        expected = to_bf16(padded).reshape(2, 32, 32, 2).transpose(0, 2, 1, 3)
    assert packed.tobytes() == np.ascontiguousarray(expected).tobytes()


def tile_product(x: Array, weight: Array) -> Array:
    """What Intel documents for TDPBF16PS, chained over k: in each 32 of k, even and odd ones are summed apart."""
    k = -(-x.shape[1] // 32) * 32
    x, weight = (np.pad(matrix, ((0, 0), (0, k - matrix.shape[1]))).astype(np.float32) for matrix in (x, weight))
    total = np.zeros((len(x), len(weight)), np.float32)
    for begin in range(0, k, 32):
        halves = [np.zeros_like(total), np.zeros_like(total)]
        for i in range(32):
            halves[i % 2] += x[:, begin + i, None] * weight[None, :, begin + i]
        total += halves[0] + halves[1]
    return total


TILE_SHAPES = [(32, 32), (33, 7), (70, 1100)]


@pytest.mark.parametrize("shape", TILE_SHAPES)
@pytest.mark.parametrize("x_type", [Type.BFLOAT16, Type.BFLOAT16_TILES])
@pytest.mark.parametrize("rows", [1, 16, 17, 53])
def test_tiles_compute_what_is_documented(
    tiles: NativeKernels, shape: tuple[int, int], x_type: Type, rows: int
) -> None:
    layer = Layer(tiles, *shape, x_type=x_type, with_bias=False)
    x = layer.x(rows)
    assert np.array_equal(layer.run(x), tile_product(from_bf16(x[:, : layer.k]), layer.weights[0]))


def test_a_chunk_of_many_rows_goes_in_slabs_of_k(tiles: NativeKernels) -> None:
    layer = Layer(tiles, 100, 2100, x_type=Type.BFLOAT16_TILES)
    x = layer.x(530)
    whole = layer.run(x)
    assert np.array_equal(layer.run(x[500:]), whole[500:])
    pair = NativeKernels(tiles.library, 2)
    assert np.array_equal(layer.run(x, runner=pair), whole)
    pair.close()


@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("y_type", [Type.FLOAT32, Type.BFLOAT16, Type.BFLOAT16_TILES])
@pytest.mark.parametrize("with_bias", [True, False])
def test_epilogues_on_tiles(tiles: NativeKernels, epilogue: Epilogue, y_type: Type, with_bias: bool) -> None:
    if epilogue is Epilogue.ADD and y_type is not Type.FLOAT32:
        pytest.skip("the residual stream is float32")
    layer = Layer(tiles, 70, 70, x_type=Type.BFLOAT16, y_type=y_type, epilogue=epilogue, with_bias=with_bias)
    for rows in (1, 21, 40):
        x = layer.x(rows)
        assert_close(layer, layer.run(x), layer.expected(x))


@pytest.mark.parametrize("x_type", [Type.BFLOAT16, Type.BFLOAT16_TILES])
def test_a_row_on_tiles_does_not_know_its_batch(tiles: NativeKernels, x_type: Type) -> None:
    layer = Layer(tiles, 40, 1090, x_type=x_type, epilogue=Epilogue.SILU_MUL)
    x = layer.x(290)
    y = layer.run(x)
    pair = NativeKernels(tiles.library, 2)
    for count in (*range(1, 36), 257):
        first = (count * 37) % (len(x) - count + 1)
        assert np.array_equal(layer.run(x[first : first + count]), y[first : first + count]), f"{count} from {first} on"
    assert np.array_equal(layer.run(x[:99], runner=pair), y[:99])
    pair.close()
