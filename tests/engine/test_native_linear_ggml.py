"""The native linear layer with weights in the types of GGUF files against the gguf package's values, and its laws: rows
independent, the same bits on every instruction set."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.library import BLOCKS, NativeKernels, packed_bytes
from llmbackend.engine.kernels.operations import Epilogue, Type
from llmbackend.engine.kernels.weights import StoredBlocks, WeightStore
from tests.engine import test_native_linear_int4 as int4
from tests.helpers.gguf_files import dequantized, random_blocks
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
)

VARIANTS = list(library.available())
KINDS = list(BLOCKS)

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no native kernels are built")


class Weight:
    """Random blocks, packed, and the matrix that they stand for."""

    def __init__(
        self, kernels: NativeKernels, n: int, k: int, kind: Type, seed: int = 0, blocks: Array | None = None
    ) -> None:
        blocks = random_blocks(kind.name, n, k, seed, spread=k**-0.5) if blocks is None else blocks
        self.matrix = dequantized(blocks, gguf.GGMLQuantizationType[kind.name]).astype(np.float64)
        self.panels = kernels.library.memory(packed_bytes(n, k, kind))
        kernels.pack_blocks(blocks.ctypes.data, kind, (n, k), self.panels.ctypes.data)
        self.scales = self.mins = self.offsets = np.zeros(0)


class Layer(int4.Layer):
    def __init__(
        self, kernels: NativeKernels, n: int, k: int, epilogue: Epilogue = Epilogue.STORE, kind: Type = Type.Q4_K,
        x_type: Type = Type.FLOAT32,
    ) -> None:  # fmt: skip
        super().__init__(kernels, n, k, epilogue, kind, x_type)
        self.weights = [Weight(kernels, n, k, kind, seed) for seed in range(1 + self.two)]  # type: ignore[misc]


def widths(kind: Type) -> list[int]:
    return [512] if BLOCKS[kind].k == 256 else [32, 96, 576]


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("kind", KINDS)
def test_it_multiplies(variant: str, kind: Type) -> None:
    for k in widths(kind):
        for n in (1, 33, 64):
            layer = Layer(engine(variant), n, k, kind=kind)
            for rows in (1, 2, 3, 5, 7, 13, 30):
                for x in (layer.x(rows), layer.x(rows, outliers=True)):
                    expected = layer.expected(x)
                    np.testing.assert_allclose(layer.run(x), expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_file(kind: Type) -> None:
    blocks = random_blocks(kind.name, 3, 512)
    values = engine(VARIANTS[-1]).library.unpack_blocks(kind, blocks)
    assert np.array_equal(values, dequantized(blocks, gguf.GGMLQuantizationType[kind.name]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_packs_what_the_file_has(kind: Type) -> None:
    """Matrices of whole panels that follow each other are one."""
    kernels = engine(VARIANTS[0], 2)
    blocks = random_blocks(kind.name, 96, 256)
    store = WeightStore(kernels, [(64, 256, kind), (32, 256, kind)])
    first, second = (store.pack_blocks(StoredBlocks(kind, np.ascontiguousarray(b))) for b in (blocks[:64], blocks[64:]))
    whole = Weight(kernels, 96, 256, kind, blocks=blocks).panels
    assert store.used.tobytes()[: len(whole)] == whole.tobytes()
    joined = first.joined(second)
    assert joined is not None and joined.n == 96 and joined.part(64, 32) == second


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_0])
def test_it_finishes(variant: str, epilogue: Epilogue, kind: Type) -> None:
    layer = Layer(engine(variant), 72, 256, epilogue, kind, x_type=Type.BFLOAT16)
    x = layer.x(17)
    np.testing.assert_allclose(layer.run(x), layer.expected(x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_in_every_batch(variant: str, threads: int, kind: Type) -> None:
    check_rows_in_batches(Layer(engine(variant), 70, 512, Epilogue.SILU_MUL, kind), threads)


@pytest.mark.parametrize("kind", KINDS)
def test_variants_with_fused_operations_agree_bit_by_bit(kind: Type) -> None:
    check_variants_agree(VARIANTS, lambda kernels: Layer(kernels, 45, 512, Epilogue.SILU_MUL, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_on_tiles_is_the_same_in_every_batch(tiles: NativeKernels, kind: Type) -> None:
    """Up to 15 rows go without tiles."""
    layer = Layer(tiles, 40, widths(kind)[-1], Epilogue.SILU_MUL, kind)
    x = layer.x(100, outliers=True)
    alone = np.concatenate([layer.run(x[row : row + 1]) for row in range(100)])
    for rows in (15, 16, 17, 32, 33, 64, 79, 80, 100):
        assert np.array_equal(layer.run(x[:rows], threads=1 + rows % 2), alone[:rows]), f"{rows} rows"


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_give_the_bits_of_vectors(tiles: NativeKernels, kind: Type) -> None:
    for k in widths(kind):
        on_tiles, on_vectors = (Layer(kernels, 45, k, kind=kind) for kernels in (tiles, fused_vectors()))
        for x in (on_tiles.x(50), on_tiles.x(50, outliers=True)):
            assert np.array_equal(on_tiles.run(x), on_vectors.run(x))


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("filler", [0x00, 0xFF])
def test_largest_numbers_do_not_saturate(variant: str, kind: Type, filler: int) -> None:
    check_largest_numbers(engine(variant), kind, filler, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("filler", [0x00, 0xFF])
def test_largest_numbers_do_not_saturate_on_tiles(tiles: NativeKernels, kind: Type, filler: int) -> None:
    check_largest_numbers(tiles, kind, filler, 18)


def check_largest_numbers(kernels: NativeKernels, kind: Type, filler: int, rows: int) -> None:
    """All numbers and integers of groups at one end, all of a row at another."""
    layer = Layer(kernels, 32, 1024, kind=kind)
    scales = random_blocks(kind.name, 32, 1024)
    weight = Weight(layer.kernels, 32, 1024, kind, blocks=np.where(_bytes_of_scales(kind), scales, np.uint8(filler)))
    layer.weights = [weight]  # type: ignore[list-item]
    x = np.tile(np.array([[1e30], [-1e30], [1.0]], np.float32), (rows // 3, 1024))
    exact = x.astype(np.float64) @ weight.matrix.T + layer.biases[0]
    size = np.abs(x.astype(np.float64)) @ np.abs(weight.matrix.T)
    assert (np.abs(layer.run(x) - exact) <= 1e-5 * (size + 10)).all()


def _bytes_of_scales(kind: Type) -> Array:
    """Where a row of 1024 has scales of 16 bits, or exponents."""
    places = {"Q2_K": (80, 84), "Q3_K": (108, 110), "Q6_K": (208, 210), "MXFP4": (0, 1), "Q5_1": (0, 4)}
    begin, end = places.get(kind.name, (0, 4) if kind in (Type.Q4_K, Type.Q5_K) else (0, 2))
    blocks = np.zeros((1024 // BLOCKS[kind].k, BLOCKS[kind].file_bytes), bool)
    blocks[:, begin:end] = True
    return blocks.reshape(-1)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_K])
def test_an_element_may_be_all_of_a_wide_row(variant: str, kind: Type) -> None:
    layer = Layer(engine(variant), 32, 53248, kind=kind)
    check_dominating_element(layer, layer.weights[0].matrix)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_row_is_nan_and_no_other(variant: str, bad: float) -> None:
    check_bad_row(Layer(engine(variant), 40, 256), bad)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
def test_sampled_rows_and_no_rows(variant: str) -> None:
    check_sampled_rows(Layer(engine(variant, 2), 40, 256))
