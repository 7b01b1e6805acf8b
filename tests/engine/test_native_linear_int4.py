"""The native linear layer with weights of 4 bits against the same scheme in numpy, and its laws: rows independent, the
same bits on every instruction set."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.library import FOUR_BITS, GROUP, NativeKernels, op_pointers, packed_bytes, scale_bytes
from llmbackend.engine.kernels.operations import Epilogue, Kind, LinearOp, Rows, Step, Type
from llmbackend.engine.kernels.weights import FourBits, WeightStore
from tests.engine.test_native_linear_int8 import narrow_limits, quantised
from tests.helpers.native_engines import (
    Array,
    best_is_fast,
    check_bad_row,
    check_dominating_element,
    check_rows_in_batches,
    check_sampled_rows,
    check_variants_agree,
    engine,
    fused_vectors,
    gated,
    in_tiles,
    numbers,
    stored,
    stride,
)

VARIANTS = list(library.available())
MIN, ZERO = Type.INT4_MIN, Type.INT4_ZERO

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no native kernels are built")


def rounded(weight: Array, kind: Type = MIN) -> tuple[Array, Array, Array]:
    """Numbers uint8 [n, k], and scales and minima float16 [n, groups], as the kernels' packing rounds them."""
    n, k = weight.shape
    wide = -(-k // 64) * 64
    padded = np.full((n, wide), np.nan, np.float32)
    padded[:, :k] = weight
    groups = padded.reshape(n, -1, GROUP)
    if kind is MIN:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # groups that are padding alone
            found, scales, mins = best_grids(groups)
        return found.reshape(n, -1), scales, mins
    groups = np.nan_to_num(groups)
    farthest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[:, :, None], 2)[:, :, 0]
    scales = (farthest / np.float32(-8)).astype(np.float16)
    exact = scales.astype(np.float32)[:, :, None]
    steps = groups * np.divide(np.float32(1), exact, out=np.zeros_like(exact), where=exact != 0)
    found = np.clip(np.rint(steps) + 8, 0, 15).astype(np.uint8)
    return found.reshape(n, -1), scales, np.zeros_like(scales)


def best_grids(groups: Array) -> tuple[Array, Array, Array]:
    """Of float32 [n, groups, 32], NaN in padding: the scheme of pack_int4.h."""
    f32 = np.float32
    smallest, largest = (np.nan_to_num(each(groups, 2, keepdims=True)) for each in (np.nanmin, np.nanmax))
    is_there = ~np.isnan(groups)
    w = np.nan_to_num(groups)
    count = np.maximum(is_there.sum(2, keepdims=True), 1).astype(f32)
    importance = (np.abs(w) + np.sqrt(lane_sum(w * w) / count)) * is_there

    def numbers_of(scale: Array, begin: Array) -> Array:
        factor = np.divide(f32(1), scale, out=np.zeros_like(scale), where=scale != 0)
        return np.asarray(np.rint(np.minimum(np.maximum(f32(0), (w - begin) * factor), f32(15))))

    def error_of(scale: Array, begin: Array, found: Array) -> Array:
        difference = scale * found + begin - w
        return lane_sum(importance * difference * difference)

    def in_float16(*values: Array) -> list[Array]:
        return [value.astype(np.float16).astype(f32) for value in values]

    best_scale, best_begin = in_float16((largest - smallest) / f32(15), smallest)
    best = numbers_of(best_scale, best_begin)
    least = error_of(best_scale, best_begin, best)
    middle, half = f32(0.5) * smallest + f32(0.5) * largest, f32(0.5) * largest - f32(0.5) * smallest
    for width in map(f32, (1, 0.9, 0.8, 0.7)):
        scale, begin = half * width * f32(f32(2) / f32(15)), middle - half * width
        found = numbers_of(scale, begin)
        weighted = importance * found
        one, q, qq = lane_sum(importance), lane_sum(weighted), lane_sum(weighted * found)
        x, qx = lane_sum(importance * w), lane_sum(weighted * w)
        determinant = one * qq - q * q
        fits = determinant > 0
        scale = np.where(fits, (one * qx - q * x) / determinant, scale)
        begin = np.where(fits, (x - scale * q) / one, begin)
        scale, begin = in_float16(scale, begin)
        found = numbers_of(scale, begin)
        error = error_of(scale, begin, found)
        better = error < least
        least, best = np.where(better, error, least), np.where(better, found, best)
        best_scale, best_begin = np.where(better, scale, best_scale), np.where(better, begin, best_begin)
    return best.astype(np.uint8), best_scale[:, :, 0].astype(np.float16), best_begin[:, :, 0].astype(np.float16)


def lane_sum(values: Array) -> Array:
    """[n, groups, 1] of float32 [n, groups, 32], in the kernels' order."""
    rows = values.reshape(*values.shape[:2], 4, 8)
    lanes = rows[:, :, 0] + rows[:, :, 1] + rows[:, :, 2] + rows[:, :, 3]
    a = [lanes[:, :, i] for i in range(8)]
    total = ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    return np.expand_dims(total, 2)


@pytest.mark.parametrize("kind", FOUR_BITS)
@pytest.mark.parametrize(("n", "k"), [(33, 32), (64, 64), (40, 224), (32, 50)])
def test_matrices_of_checkpoints_are_kept_as_they_are(kind: Type, n: int, k: int) -> None:
    random = np.random.default_rng(n)
    found = random.integers(0, 16, (n, k), np.uint8)
    scales, mins = (random.standard_normal((n, -(-k // GROUP))).astype(np.float16) for _ in range(2))
    zeros = random.integers(0, 16, scales.shape, np.uint8)
    matrix = FourBits(found, scales, mins if kind is MIN else None, zeros if kind is ZERO else None)
    store = WeightStore(engine(VARIANTS[0]), [(n, k, kind)] * 2)
    first, second = (store.pack_four_bits(matrix, kind) for _ in range(2))
    padded = np.pad(found, ((0, 0), (0, -k % 64)))
    offsets = {MIN: [mins], ZERO: [zeros]}.get(kind, [])
    groups = [
        grouped(np.pad(each, ((0, 0), (0, padded.shape[1] // GROUP - each.shape[1]))), n) for each in (scales, *offsets)
    ]
    for packed in (first, second):
        addresses = (packed.address, packed.scale, packed.sums)
        for address, expected in zip(addresses, (panels_of(padded, n), *groups), strict=False):
            begin = address - store.memory.ctypes.data
            assert store.memory[begin : begin + expected.nbytes].tobytes() == expected.tobytes()
        assert bool(packed.sums) == bool(offsets)
    assert (first.joined(second) is not None) == (n % 32 == 0)


def test_matrices_without_zeros_may_join_those_with_some() -> None:
    """Neighbours have one type: 8 is what numbers without zeros are relative to."""
    matrix = FourBits(np.zeros((32, 64), np.uint8), np.ones((32, 2), np.float16), None)
    store = WeightStore(engine(VARIANTS[0]), [(32, 64, ZERO)])
    packed = store.pack_four_bits(matrix, ZERO)
    begin = packed.sums - store.memory.ctypes.data
    assert (store.memory[begin : begin + 64] == 8).all()


def test_neighbours_with_equal_orders_of_inputs_are_joined() -> None:
    random = np.random.default_rng(3)
    numbers_, scales = random.integers(0, 16, (32, 64), np.uint8), np.ones((32, 2), np.float16)
    orders = [random.permutation(64).astype(np.int32) for _ in range(2)]
    store = WeightStore(engine(VARIANTS[0]), [(32, 64, Type.INT4)] * 3, extra_bytes=1024)
    packed = [
        store.pack_four_bits(FourBits(numbers_, scales, None, order=orders[which]), Type.INT4) for which in (0, 0, 1)
    ]
    whole = packed[0].joined(packed[1])
    assert whole is not None and whole.order == packed[0].order
    assert packed[1].joined(packed[2]) is None
    begin = packed[2].order - store.memory.ctypes.data
    assert np.array_equal(store.memory[begin : begin + 256].view(np.int32), orders[1])


def panels_of(found: Array, n: int) -> Array:
    """The kernels' layout of numbers uint8 [n, k]; panels that are not full end with numbers of zero."""
    k = found.shape[1]
    padded = np.zeros((-(-n // 32) * 32, k), np.uint8)
    padded[:n] = found
    quads = padded.reshape(-1, 32, k // 8, 2, 4)
    return np.ascontiguousarray((quads[:, :, :, 0] | quads[:, :, :, 1] << 4).transpose(0, 2, 1, 3))


def grouped(values: Array, n: int) -> Array:
    """[n / 32, groups, 32] of [n, groups], float16 as bits."""
    padded = np.zeros((-(-n // 32) * 32, values.shape[1]), values.dtype)
    padded[:n] = values
    panels = np.ascontiguousarray(padded.reshape(-1, 32, values.shape[1]).transpose(0, 2, 1))
    return panels.view(np.uint16) if values.dtype == np.float16 else panels


class Weight:
    """Random numbers and scales, and the matrix that they stand for."""

    def __init__(self, n: int, k: int, kind: Type, seed: int) -> None:
        random = np.random.default_rng(seed)
        wide = -(-k // 64) * 64
        self.found = random.integers(0, 16, (n, wide), np.uint8)
        scales = (random.standard_normal((n, wide // GROUP)) / 4 / k**0.5).astype(np.float16)
        scales[:, ::3] *= np.float16(1e-4)  # subnormal ones too
        mins = (random.standard_normal(scales.shape) / k**0.5).astype(np.float16)
        zeros = random.integers(0, 17, scales.shape, np.uint8) if kind is ZERO else np.full(scales.shape, 8, np.uint8)
        begins = mins.astype(np.float64) if kind is MIN else -1.0 * zeros * scales.astype(np.float64)
        self.matrix = self.found * np.repeat(scales.astype(np.float64), GROUP, 1) + np.repeat(begins, GROUP, 1)
        self.matrix = self.matrix[:, :k]
        self.panels, self.scales = panels_of(self.found, n), grouped(scales, n)
        self.offsets = grouped(mins if kind is MIN else zeros, n)


class Layer:
    """A linear layer, run on random rows and compared with the same scheme in float64."""

    def __init__(
        self, kernels: NativeKernels, n: int, k: int, epilogue: Epilogue = Epilogue.STORE, kind: Type = Type.INT4,
        x_type: Type = Type.FLOAT32, is_ordered: bool = False,
    ) -> None:  # fmt: skip
        order = np.random.default_rng(9).permutation(k).astype(np.int32)
        self.order = order if is_ordered else None
        self.kernels, self.n, self.k, self.epilogue, self.kind, self.x_type = kernels, n, k, epilogue, kind, x_type
        self.two = epilogue >= Epilogue.SILU_MUL
        self.weights = [Weight(n, k, kind, seed) for seed in range(1 + self.two)]
        self.biases = np.random.default_rng(5).standard_normal((2, n)).astype(np.float32)

    def x(self, rows: int, outliers: bool = False) -> Array:
        random = np.random.default_rng(rows)
        x = np.full((rows, self.k + 21), np.nan, np.float32)
        x[:, : self.k] = random.standard_normal((rows, self.k))
        for row in range(rows if outliers else 0):
            places = random.integers(0, self.k, max(1, self.k // 40))
            x[row, places] *= 20.0 ** random.uniform(1, 2, len(places)) * random.choice((-1, 1), len(places))
        return stored(x, self.x_type)

    def run(self, x: Array, threads: int = 1, rows: Rows = Rows.TOKENS) -> Array:
        y = np.full((len(x), self.n + 7), np.nan, np.float32)
        if self.epilogue is Epilogue.ADD:
            y[:, : self.n] = 1
        if self.x_type is Type.BFLOAT16_TILES:
            x = in_tiles(x[:, : self.k])
        first, second = self.weights[0], self.weights[-1]
        op = LinearOp(
            kind=Kind.LINEAR, rows=rows, n=self.n, k=self.k, x_stride=stride(x), y_stride=stride(y),
            weight_type=self.kind, x_type=self.x_type, y_type=Type.FLOAT32, epilogue=self.epilogue, factor=0.5,
            weight=first.panels.ctypes.data, scale=first.scales.ctypes.data, sums=first.offsets.ctypes.data,
            weight2=second.panels.ctypes.data, scale2=second.scales.ctypes.data, sums2=second.offsets.ctypes.data,
            bias=self.biases[0].ctypes.data, bias2=self.biases[1].ctypes.data, x=x.ctypes.data, y=y.ctypes.data,
            order=None if self.order is None else self.order.ctypes.data,
        )  # fmt: skip
        runner = self.kernels if threads == 1 else NativeKernels(self.kernels.library, threads)
        counts = (len(y), 0) if rows is Rows.TOKENS else (0, len(y))
        runner.run(op_pointers([op]), 1, Step(num_tokens=counts[0], num_sampled=counts[1]))
        assert np.isnan(y[:, self.n :]).all(), "wrote past the columns"
        return y[:, : self.n]

    def expected(self, x: Array) -> Array:
        row = numbers(x[:, : self.k], Type.FLOAT32 if self.x_type is Type.FLOAT32 else Type.BFLOAT16)
        row = row if self.order is None else row[:, self.order]
        integers, scale = quantised(row, narrow_limits(row, 7))
        first, second = (
            integers.astype(np.float64) @ weight.matrix.T * scale.astype(np.float64) + bias
            for weight, bias in zip((self.weights[0], self.weights[-1]), self.biases, strict=True)
        )
        if self.epilogue is Epilogue.ADD:
            return np.asarray(1 + first * 0.5)
        if self.two:
            first = first * 0.5
        return gated(first, second, self.epilogue)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("kind", [Type.INT4, MIN])
@pytest.mark.parametrize("weight_type", [Type.FLOAT32, Type.BFLOAT16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 7), (64, 64), (40, 200)])
def test_weights_are_rounded_per_group_and_packed_in_panels(
    variant: str, kind: Type, weight_type: Type, n: int, k: int
) -> None:
    weight = np.random.default_rng(n).standard_normal((n, k)).astype(np.float32)
    weight[n // 2] = 0
    weight[-1] *= 1e-6  # subnormal scales
    raw = stored(weight, weight_type)
    check_packed(variant, raw, weight_type, kind, *rounded(numbers(raw, weight_type), kind))


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
def test_groups_that_are_grids_are_stored_exactly(variant: str) -> None:
    random = np.random.default_rng(2)
    found = random.integers(0, 16, (40, 128), np.uint8)
    found[:, ::GROUP], found[:, 1::GROUP] = 0, 15
    scales = np.exp2(random.integers(-12, -4, (40, 4))).astype(np.float16)
    mins = (random.integers(-15, 1, (40, 4)) * scales).astype(np.float16)
    weight = found * np.repeat(scales.astype(np.float32), GROUP, 1) + np.repeat(mins.astype(np.float32), GROUP, 1)
    check_packed(variant, weight, Type.FLOAT32, MIN, found, scales, mins)


def check_packed(
    variant: str, raw: Array, weight_type: Type, kind: Type, found: Array, scales: Array, mins: Array
) -> None:
    """That the kernels pack the matrix into these numbers, scales and minima."""
    n, k = raw.shape
    kernels = engine(variant, 2)
    panels = kernels.library.memory(packed_bytes(n, k, kind))
    packed = [kernels.library.memory(scale_bytes(n, k, kind)).view(np.float16) for _ in range(2)]
    kernels.pack(
        raw.ctypes.data, weight_type, (n, k), k, panels.ctypes.data, kind, packed[0].ctypes.data, packed[1].ctypes.data
    )
    for got, values in zip(packed, (scales, mins), strict=True):
        assert np.array_equal(got, grouped(values, n).view(np.float16).reshape(-1))
    assert np.array_equal(panels.reshape(-1), panels_of(found, n).reshape(-1))


def test_errors_are_smaller_than_those_of_grids_over_the_whole_range() -> None:
    weight = np.random.default_rng(5).standard_t(5, (64, 256)).astype(np.float32)
    found, scales, mins = rounded(weight)
    values = found * np.repeat(scales.astype(np.float32), GROUP, 1) + np.repeat(mins.astype(np.float32), GROUP, 1)
    groups = weight.reshape(64, -1, GROUP)
    smallest, step = groups.min(2, keepdims=True), np.ptp(groups, 2, keepdims=True) / 15
    whole_range = (np.rint((groups - smallest) / step) * step + smallest).reshape(weight.shape)
    error, plain_error = (float(np.square(each - weight).sum()) for each in (values, whole_range))
    assert error < 0.95 * plain_error


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("kind", FOUR_BITS)
@pytest.mark.parametrize(("n", "k"), [(32, 64), (1, 1), (33, 7), (100, 515), (64, 4864)])
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 13, 30])
def test_it_multiplies(variant: str, kind: Type, n: int, k: int, rows: int) -> None:
    layer = Layer(engine(variant), n, k, kind=kind)
    for x in (layer.x(rows), layer.x(rows, outliers=True)):
        np.testing.assert_allclose(
            layer.run(x), layer.expected(x), rtol=2e-5, atol=2e-5 * np.abs(layer.expected(x)).max()
        )


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("x_type", [Type.FLOAT32, Type.BFLOAT16, Type.BFLOAT16_TILES])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", FOUR_BITS)
def test_weights_may_have_an_order_of_inputs_of_their_own(variant: str, x_type: Type, threads: int, kind: Type) -> None:
    layer = Layer(engine(variant), 70, 150, Epilogue.SILU_MUL, kind, x_type, is_ordered=True)
    for rows in (1, 2, 3, 40):
        x = layer.x(rows, outliers=True)
        expected = layer.expected(x)
        np.testing.assert_allclose(layer.run(x, threads), expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())
    plain = Layer(engine(variant), 70, 150, Epilogue.SILU_MUL, kind)
    ordered = numbers(x[:, :150], Type.FLOAT32 if x_type is Type.FLOAT32 else Type.BFLOAT16)[:, layer.order]
    assert np.array_equal(layer.run(x, threads), plain.run(np.ascontiguousarray(ordered)))


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("kind", FOUR_BITS)
def test_it_finishes(variant: str, epilogue: Epilogue, kind: Type) -> None:
    layer = Layer(engine(variant), 72, 130, epilogue, kind, x_type=Type.BFLOAT16)
    x = layer.x(17)
    np.testing.assert_allclose(layer.run(x), layer.expected(x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", FOUR_BITS)
def test_a_row_is_the_same_in_every_batch(variant: str, threads: int, kind: Type) -> None:
    check_rows_in_batches(Layer(engine(variant), 70, 333, Epilogue.SILU_MUL, kind), threads)


@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("kind", FOUR_BITS)
def test_variants_with_fused_operations_agree_bit_by_bit(epilogue: Epilogue, kind: Type) -> None:
    check_variants_agree(VARIANTS, lambda kernels: Layer(kernels, 45, 333, epilogue, kind))


def test_tiles_of_bfloat16_give_the_same_bits_as_rows() -> None:
    kernels = engine(VARIANTS[0])
    of_rows, of_tiles = (Layer(kernels, 45, 333, x_type=kind) for kind in (Type.BFLOAT16, Type.BFLOAT16_TILES))
    x = of_rows.x(21)
    assert np.array_equal(of_tiles.run(x), of_rows.run(x))


@pytest.mark.parametrize("kind", FOUR_BITS)
@pytest.mark.parametrize(("n", "k", "epilogue"), [(70, 333, Epilogue.SILU_MUL), (33, 64, Epilogue.ADD)])
def test_a_row_on_tiles_is_the_same_in_every_batch(
    tiles: NativeKernels, kind: Type, n: int, k: int, epilogue: Epilogue
) -> None:
    """Up to 15 rows go without tiles."""
    layer = Layer(tiles, n, k, epilogue, kind)
    x = layer.x(140, outliers=True)
    x[20, 3] = np.nan
    alone = np.concatenate([layer.run(x[row : row + 1]) for row in range(140)])
    for rows in (15, 16, 17, 31, 32, 33, 64, 65, 79, 80, 100, 140):
        for threads in (1, 3):
            assert np.array_equal(layer.run(x[:rows], threads), alone[:rows], equal_nan=True), f"{rows} rows"


@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("kind", FOUR_BITS)
def test_tiles_give_the_bits_of_vectors(tiles: NativeKernels, epilogue: Epilogue, kind: Type) -> None:
    on_tiles, on_vectors = (Layer(kernels, 45, 333, epilogue, kind) for kernels in (tiles, fused_vectors()))
    for x in (on_tiles.x(50), on_tiles.x(50, outliers=True)):
        assert np.array_equal(on_tiles.run(x), on_vectors.run(x))


@pytest.mark.parametrize("kind", FOUR_BITS)
def test_tiles_take_inputs_in_an_order_of_their_own(tiles: NativeKernels, kind: Type) -> None:
    layer = Layer(tiles, 40, 150, Epilogue.SILU_MUL, kind, Type.BFLOAT16_TILES, is_ordered=True)
    x = layer.x(40, outliers=True)
    expected = layer.expected(x)
    np.testing.assert_allclose(layer.run(x), expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("kind", [Type.INT4, ZERO])
@pytest.mark.parametrize("rows", [3, 18])
def test_largest_numbers_do_not_saturate(variant: str, kind: Type, rows: int) -> None:
    check_largest_numbers(engine(variant), kind, rows)


@pytest.mark.parametrize("kind", [Type.INT4, ZERO])
def test_largest_numbers_do_not_saturate_on_tiles(tiles: NativeKernels, kind: Type) -> None:
    check_largest_numbers(tiles, kind, 18)


def check_largest_numbers(kernels: NativeKernels, kind: Type, rows: int) -> None:
    layer = Layer(kernels, 32, 4096, kind=kind)
    layer.weights[0].panels[:] = 0xFF
    layer.weights[0].offsets[:] = 8
    x = np.tile(np.array([[1e30], [-1e30], [1.0]], np.float32), (rows // 3, 4096))
    scales = layer.weights[0].scales.view(np.float16).astype(np.float64)
    exact = x[:, :1].astype(np.float64) * 7 * GROUP * scales.sum(axis=(0, 1)) + layer.biases[0]
    np.testing.assert_allclose(layer.run(x), exact, rtol=1e-4)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
def test_an_element_may_be_all_of_a_wide_row(variant: str) -> None:
    layer = Layer(engine(variant), 32, 53248)
    check_dominating_element(layer, layer.weights[0].matrix)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_row_is_nan_and_no_other(variant: str, bad: float) -> None:
    check_bad_row(Layer(engine(variant), 40, 70), bad)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
def test_sampled_rows_and_no_rows(variant: str) -> None:
    check_sampled_rows(Layer(engine(variant, 2), 40, 70))
