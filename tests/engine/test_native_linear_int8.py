"""The native int8 linear layer against the same scheme in numpy, and its laws: integers are exact, rows independent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.library import KernelLibrary, NativeKernels, fault_of, op_pointers, packed_bytes
from llmbackend.engine.kernels.operations import Epilogue, Kind, LinearOp, Rows, Step, Type
from tests.helpers.native_engines import (
    COMPILER,
    NAN_BFLOAT16,
    Array,
    best_is_fast,
    check_bad_row,
    check_dominating_element,
    check_margins,
    check_sampled_rows,
    compiled,
    engine,
    gated,
    in_tiles,
    numbers,
    out_of_tiles,
    stored,
    stride,
)

VARIANTS = list(library.available())

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no native kernels are built")


def quantised(x: Array, limit: Array | None = None) -> tuple[Array, Array]:
    """Integers and the scale of each row, in float32 arithmetic as the kernel does it. limit: the magnitude of each
    row [rows, 1] that becomes 127; None: its largest one, as for weights."""
    if limit is None:
        limit = np.abs(x).max(axis=1, keepdims=True).astype(np.float32)
    factor = np.where(limit > 0, np.float32(127) / np.maximum(limit, np.float32(1e-35)), 0).astype(np.float32)
    return np.rint(x * factor).astype(np.int64), limit / np.float32(127)


def narrow_limits(x: Array, times: float = 12) -> Array:
    """The magnitude [rows, 1] that becomes 127 in rows of activations: so many typical ones of a row, but no less than
    their mean and the largest one's 32,768th, and so that at most one element in 32 is beyond it."""
    rows, k = x.shape
    magnitudes = np.zeros((rows, -(-k // 64) * 64), np.float32)
    magnitudes[:, :k] = np.abs(x)
    sums = np.zeros((rows, 64), np.float32)
    for begin in range(0, magnitudes.shape[1], 64):
        sums += magnitudes[:, begin : begin + 64]
    mean = by_halves(sums) / np.float32(k)
    typical = by_halves(np.minimum(sums[:, :32], sums[:, 32:])) * np.float32(2) / np.float32(k)
    largest = magnitudes.max(axis=1, keepdims=True)
    least = np.maximum(mean, largest / np.float32(32768))
    limit: Array = np.minimum(np.maximum(typical * np.float32(times), least), largest)
    while (crowded := (np.abs(quantised(x, limit)[0]) > 127).sum(axis=1, keepdims=True) > k // 32).any():
        limit = np.where(crowded, np.minimum(limit * np.float32(1.5), largest), limit)
    return limit


def by_halves(sums: Array) -> Array:
    """float32 [rows, 1]: the sum of each row, its halves added again and again."""
    while (half := sums.shape[1] // 2) > 0:
        sums = sums[:, :half] + sums[:, half:]
    return sums


@dataclass
class Packed:
    """One weight in the kernel's layout, and the integers it stands for."""

    engine: NativeKernels
    weight: Array
    weight_type: Type = Type.FLOAT32

    def __post_init__(self) -> None:
        n, k = self.weight.shape
        raw = np.full((n, k + 5), 0xFFFF if self.weight_type is Type.BFLOAT16 else np.nan)
        raw = raw.astype(np.uint16 if self.weight_type is Type.BFLOAT16 else np.float32)
        raw[:, :k] = stored(self.weight, self.weight_type)
        self.panels = self.engine.library.memory(packed_bytes(n, k, Type.INT8))
        self.panels[:] = 0x55  # padding must be written too
        self.scale, self.sums = np.full(n + 1, -7.0, np.float32), np.full(n + 1, -7, np.int32)
        self.engine.pack(
            raw.ctypes.data, self.weight_type, (n, k), k + 5, self.panels.ctypes.data, Type.INT8,
            self.scale.ctypes.data, self.sums.ctypes.data,
        )  # fmt: skip
        self.integers, self.expected_scale = quantised(numbers(raw[:, :k], self.weight_type))


class Layer:
    """A linear layer with random weights, run on random rows and compared with the same scheme in float64."""

    def __init__(
        self, engine: NativeKernels, n: int, k: int, epilogue: Epilogue = Epilogue.STORE, *,
        x_type: Type = Type.FLOAT32, y_type: Type = Type.FLOAT32, with_bias: bool = True, factor: float = 1.0,
    ) -> None:  # fmt: skip
        random = np.random.default_rng(n * 1000 + k)
        self.engine, self.n, self.k, self.epilogue, self.factor = engine, n, k, epilogue, factor
        self.x_type, self.y_type, self.with_bias = x_type, y_type, with_bias
        self.two = epilogue >= Epilogue.SILU_MUL
        self.packed = [
            Packed(engine, (random.standard_normal((n, k)) / k**0.5).astype(np.float32)) for _ in range(1 + self.two)
        ]
        self.biases = random.standard_normal((2, n)).astype(np.float32) * with_bias

    def x(self, rows: int, seed: int = 0) -> Array:
        """[rows, k], surrounded by NaN."""
        x = stored(np.full((rows, self.k + 21), np.nan), self.x_type)
        x[:, : self.k] = stored(np.random.default_rng(seed).standard_normal((rows, self.k)), self.x_type)
        return x

    def x_with_outliers(self, rows: int) -> Array:
        """Rows of real models: some elements are 20 to 10,000 times larger than the others. Row 0 has none, row 1 more
        than can be wide."""
        x = numbers(self.x(rows), self.x_type)
        random = np.random.default_rng(3)
        for row in range(1, rows):
            places = random.integers(0, self.k, self.k if row == 1 else max(1, self.k // 40))
            x[row, places] *= 20.0 ** random.uniform(1, 3, len(places)) * random.choice((-1, 1), len(places))
        return stored(x, self.x_type)

    def old_y(self, rows: int) -> Array:
        """What y holds before: NaN, or what is added to."""
        y = stored(np.full((rows + 1, self.n + 19), np.nan), self.y_type)
        if self.epilogue is Epilogue.ADD:
            y[:rows, : self.n] = np.random.default_rng(1).standard_normal((rows, self.n))
        return y

    def op(self, x: Array, y: Array, rows: Rows) -> LinearOp:
        first, second = self.packed[0], self.packed[-1]
        return LinearOp(
            kind=Kind.LINEAR, rows=rows, n=self.n, k=self.k, x_stride=stride(x), y_stride=stride(y),
            weight_type=Type.INT8, x_type=self.x_type, y_type=self.y_type, epilogue=self.epilogue, factor=self.factor,
            weight=first.panels.ctypes.data, scale=first.scale.ctypes.data, sums=first.sums.ctypes.data,
            weight2=second.panels.ctypes.data if self.two else None,
            scale2=second.scale.ctypes.data if self.two else None,
            sums2=second.sums.ctypes.data if self.two else None,
            bias=self.biases[0].ctypes.data if self.with_bias else None,
            bias2=self.biases[1].ctypes.data if self.with_bias and self.two else None,
            x=x.ctypes.data, y=y.ctypes.data,
        )  # fmt: skip

    def run(self, x: Array, rows: Rows = Rows.TOKENS, threads: int = 1) -> Array:
        count = len(x)
        y = self.old_y(count)
        before = y.copy()
        tokens, sampled = (count, 0) if rows is Rows.TOKENS else (0, count)
        runner = self.engine if threads == 1 else NativeKernels(self.engine.library, threads)
        if self.y_type is Type.BFLOAT16_TILES:
            y = in_tiles(y[:count, : self.n])
        if self.x_type is Type.BFLOAT16_TILES:
            x = in_tiles(x[:, : self.k])
        op = self.op(x, y, rows)
        runner.run(op_pointers([op]), 1, Step(num_tokens=tokens, num_sampled=sampled))
        if self.y_type is Type.BFLOAT16_TILES:
            return out_of_tiles(y)[:count, : self.n]
        check_margins(y, before, count, self.n)
        return y[:count, : self.n]

    def expected(self, x: Array) -> Array:
        row = numbers(x[:, : self.k], self.x_type)
        integers, scale = quantised(row, narrow_limits(row))
        first, second = (
            (integers @ packed.integers.T) * scale.astype(np.float64) * packed.expected_scale[:, 0] + bias
            for packed, bias in zip((self.packed[0], self.packed[-1]), self.biases, strict=True)
        )
        if self.epilogue is Epilogue.ADD:
            old: Array = self.old_y(len(x))[: len(x), : self.n]
            return np.asarray(old + first * self.factor)
        if self.epilogue is not Epilogue.STORE:
            first = first * self.factor
        return gated(first, second, self.epilogue)

    def check(self, rows: int, threads: int = 1) -> None:
        x = self.x(rows)
        relative = 2e-6 if self.y_type is Type.FLOAT32 else 2.0**-8
        got = numbers(self.run(x, threads=threads), self.y_type)
        np.testing.assert_allclose(got, self.expected(x), rtol=relative, atol=2e-6)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("weight_type", [Type.FLOAT32, Type.BFLOAT16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 7), (64, 64), (40, 200)])
def test_weights_are_rounded_per_channel_and_packed_in_panels(variant: str, weight_type: Type, n: int, k: int) -> None:
    weight = np.random.default_rng(n).standard_normal((n, k)).astype(np.float32)
    weight[n // 2] = 0
    packed = Packed(engine(variant, 2), weight, weight_type)
    padded = np.zeros((-(-n // 32) * 32, -(-k // 64) * 64), np.int8)
    padded[:n, :k] = packed.integers
    panels = padded.reshape(len(padded) // 32, 32, -1, 4).transpose(0, 2, 1, 3)
    assert np.array_equal(packed.panels, panels.reshape(-1).view(np.uint8))
    assert np.array_equal(packed.scale[:n], packed.expected_scale[:, 0])
    assert np.array_equal(packed.sums[:n], packed.integers.sum(axis=1))
    assert (packed.scale[n], packed.sums[n]) == (-7, -7), "wrote past the channels"


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize(("n", "k"), [(32, 64), (1, 1), (33, 7), (100, 515), (64, 6272)])
@pytest.mark.parametrize("rows", [1, 5, 13, 30])
def test_it_multiplies(variant: str, n: int, k: int, rows: int) -> None:
    Layer(engine(variant), n, k).check(rows)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("y_type", [Type.FLOAT32, Type.BFLOAT16])
def test_it_finishes(variant: str, epilogue: Epilogue, with_bias: bool, y_type: Type) -> None:
    if epilogue is Epilogue.ADD:
        y_type = Type.FLOAT32
    for n, k in ((72, 130), (40, 6200)):
        layer = Layer(
            engine(variant), n, k, epilogue, x_type=Type.BFLOAT16, y_type=y_type, with_bias=with_bias, factor=0.5
        )
        layer.check(17)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("epilogue", [Epilogue.STORE, Epilogue.SILU_MUL])
@pytest.mark.parametrize("x_type", [Type.FLOAT32, Type.BFLOAT16])
def test_elements_beyond_the_limit_keep_their_integers(variant: str, epilogue: Epilogue, x_type: Type) -> None:
    for n, k in ((33, 7), (72, 130), (40, 6200)):
        layer = Layer(engine(variant), n, k, epilogue, x_type=x_type)
        x = layer.x_with_outliers(9)
        got = layer.run(x)
        np.testing.assert_allclose(got, layer.expected(x), rtol=2e-5, atol=2e-5)
        assert np.array_equal(np.concatenate([layer.run(x[row : row + 1], threads=2) for row in range(9)]), got)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("k", [576, 4864])
def test_a_huge_element_costs_the_others_nothing(variant: str, k: int) -> None:
    """One scale for a whole row would round all of them to zero."""
    layer = Layer(engine(variant), 64, k, with_bias=False)
    layer.packed[0].weight[:, 5] = 0  # what the element itself gives is not looked at
    layer.packed = [Packed(layer.engine, layer.packed[0].weight)]
    x = layer.x(4)
    x[:, 5] = [0.0, 20.0, 100.0, -3000.0]
    exact = x[:, :k].astype(np.float64) @ layer.packed[0].weight.T.astype(np.float64)
    error = np.linalg.norm(layer.run(x) - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert (error < 0.03).all(), error


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("n", "k", "epilogue"), [(70, 129, Epilogue.SILU_MUL), (33, 6400, Epilogue.ADD)])
def test_a_row_is_the_same_in_every_batch(variant: str, threads: int, n: int, k: int, epilogue: Epilogue) -> None:
    layer = Layer(engine(variant), n, k, epilogue)
    x = layer.x(140)
    whole = layer.run(x, threads=threads)
    for rows in (*range(1, 14), 23, 24, 25, 31, 33, 47, 48, 64, 70, 97, 128):
        assert np.array_equal(layer.run(x[:rows], threads=threads), whole[:rows]), f"{rows} rows"
    if epilogue is not Epilogue.ADD:  # what is added to differs from row to row
        alone = np.concatenate([layer.run(x[row : row + 1]) for row in range(140)])
        assert np.array_equal(alone, whole)


@pytest.mark.parametrize("epilogue", list(Epilogue))
def test_variants_with_fused_operations_agree_bit_by_bit(epilogue: Epilogue) -> None:
    fused = [variant for variant in VARIANTS if variant != "generic"]
    results = []
    for variant in fused:
        layer = Layer(engine(variant), 45, 333, epilogue)
        results.append(np.concatenate([layer.run(layer.x(29)), layer.run(layer.x_with_outliers(29))]))
    for variant, result in zip(fused, results, strict=True):
        assert np.array_equal(result, results[0]), variant


@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("shape", [(70, 333), (70, 2500)])
def test_tiles_of_bfloat16_give_the_same_bits_as_rows(
    tiles: NativeKernels, epilogue: Epilogue, shape: tuple[int, int]
) -> None:
    if shape[1] > 2048 and tiles.library.variant != "amx":
        pytest.skip("an emulated tile unit is too slow for k in slabs")
    of_rows = Layer(tiles, *shape, epilogue, x_type=Type.BFLOAT16)
    of_tiles = Layer(tiles, *shape, epilogue, x_type=Type.BFLOAT16_TILES)
    for rows in (1, 4, 5, 17, 530) if shape[1] > 2048 else (1, 4, 5, 16, 17, 50):
        for x in (of_rows.x(rows), of_rows.x_with_outliers(rows)):
            x[rows // 2, 3] = NAN_BFLOAT16 if rows > 5 else 0
            assert np.array_equal(of_tiles.run(x), of_rows.run(x), equal_nan=True), f"{rows} rows"
            assert np.array_equal(of_tiles.run(x, threads=2), of_rows.run(x), equal_nan=True), f"{rows} rows"


@pytest.mark.parametrize("epilogue", [Epilogue.STORE, Epilogue.SILU_MUL, Epilogue.GELU_MUL])
def test_it_writes_tiles(tiles: NativeKernels, epilogue: Epilogue) -> None:
    rounded, in_tiles_too = (
        Layer(tiles, 70, 333, epilogue, x_type=Type.BFLOAT16, y_type=y_type)
        for y_type in (Type.BFLOAT16, Type.BFLOAT16_TILES)
    )
    for rows in (1, 4, 5, 40):
        x = rounded.x(rows)
        assert np.array_equal(in_tiles_too.run(x), rounded.run(x)), f"{rows} rows"


@pytest.fixture(scope="module")
def avx_vnni() -> NativeKernels:
    """The library for AVX-VNNI, with its one instruction written in AVX2."""
    if COMPILER is None or "avx2" not in VARIANTS:
        pytest.skip("no C++ compiler, or no AVX2")
    source = Path(library.__file__).parent / "native" / "variants" / "avx_vnni.cpp"
    target = compiled(source, "-mavx2", "-mfma", "-mbmi2", "-DLLMB_EMULATE_AVX_VNNI")
    return NativeKernels(KernelLibrary("emulated avx_vnni", target), 1)


@pytest.mark.slow
@pytest.mark.parametrize("epilogue", list(Epilogue))
def test_avx_vnni_agrees_bit_by_bit(avx_vnni: NativeKernels, epilogue: Epilogue) -> None:
    assert fault_of(avx_vnni.library) == ""
    for n, k in ((45, 333), (64, 7000)):
        emulated, plain = (Layer(kernels, n, k, epilogue) for kernels in (avx_vnni, engine("avx2")))
        for rows in (1, 2, 6, 7, 29):
            emulated.check(rows)
            for x in (emulated.x(rows), emulated.x_with_outliers(rows)):
                assert np.array_equal(emulated.run(x), plain.run(x)), f"{rows} rows"


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
def test_largest_numbers_do_not_saturate(variant: str) -> None:
    layer = Layer(engine(variant), 32, 4096)
    for sign in (1, -1):
        layer.packed = [Packed(layer.engine, np.full((32, 4096), sign * 0.25, np.float32))]
        x = np.full((3, 4096), [[1e30], [-1e30], [1e-30]], np.float32)
        np.testing.assert_allclose(layer.run(x), layer.expected(x), rtol=1e-6)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
def test_an_element_may_be_all_of_a_wide_row(variant: str) -> None:
    layer = Layer(engine(variant), 32, 53248)
    check_dominating_element(layer, layer.packed[0].integers * layer.packed[0].expected_scale)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_row_is_nan_and_no_other(variant: str, bad: float) -> None:
    check_bad_row(Layer(engine(variant), 40, 70), bad)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
def test_a_row_of_zeros_gives_the_bias(variant: str) -> None:
    layer = Layer(engine(variant), 40, 70)
    x = np.zeros((2, 70), np.float32)
    x[1] = 1e-40  # next to nothing: no division by it
    assert np.array_equal(layer.run(x), layer.biases[:1].repeat(2, axis=0))


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
def test_sampled_rows_and_no_rows(variant: str) -> None:
    check_sampled_rows(Layer(engine(variant, 2), 40, 70))
