"""What adapters add to native linear layers, against float64, and its law: a row's bits depend on that row and its
adapter alone."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from llmbackend.engine.adapter_files import LoraArrays
from llmbackend.engine.cpu.lora import GroupedTokens, PackedAdapter, pack_adapter, splits_of
from llmbackend.engine.cpu.packed_parts import PackedPart
from llmbackend.engine.kernels.library import PANEL, NativeKernels, op_pointers
from llmbackend.engine.kernels.operations import (
    LORA_DELTA_TOKENS,
    Epilogue,
    Kind,
    LinearOp,
    LoraOp,
    LoraStep,
    Step,
    Type,
)
from tests.engine.test_native_linear import TYPES, VARIANTS, Layer
from tests.helpers.native_engines import (
    Array,
    best_is_fast,
    engine,
    in_tiles,
    numbers,
    out_of_tiles,
    stored,
    stride,
    to_bf16,
)

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no native kernels are built")

MAX_RANK = 32
RANKS = {1: (16, 16), 2: (5, 0), 3: (32, 20)}
"""Of the adapters, for each of two layers; 0: it does not change the layer."""


@dataclass
class AdaptedLayer:
    """A layer, gated ones with both of their weights, and adapters of it."""

    layer: Layer
    keep: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        layer, random = self.layer, np.random.default_rng(3)
        self.type = Type.FLOAT32 if layer.weight_type is Type.FLOAT32 else Type.BFLOAT16
        names = ("gate", "up")[: 1 + layer.two()]
        self.parts = [(PackedPart(name, 0, layer.n), layer.k) for name in names]
        self.arrays: dict[int, dict[str, LoraArrays]] = {}
        for adapter, ranks in RANKS.items():
            self.arrays[adapter] = {
                name: LoraArrays(
                    random.standard_normal((rank, layer.k)).astype(np.float32) / np.float32(layer.k**0.5),
                    random.standard_normal((layer.n, rank)).astype(np.float32) / np.float32(rank**0.5),
                )
                for name, rank in zip(names, ranks, strict=False)
                if rank
            }
        library = layer.engine.library
        self.adapters: dict[int, PackedAdapter] = {
            adapter: pack_adapter(arrays, self.parts, self.type, library) for adapter, arrays in self.arrays.items()
        }

    def run(self, x: Array, adapters: Array, runner: NativeKernels | None = None) -> Array:
        """adapters: int32 [rows], 0: none."""
        layer, count = self.layer, len(x)
        y = layer.old_y(count)
        if layer.y_type is Type.BFLOAT16_TILES:
            y = in_tiles(y[:count, : layer.n])
        if layer.x_type is Type.BFLOAT16_TILES:
            x = in_tiles(x[:, : layer.k])
        lora, step, keep = self._lora(x, adapters)
        op = LinearOp(
            kind=Kind.LINEAR, n=layer.n, k=layer.k, x_stride=stride(x), y_stride=stride(y),
            weight=layer.packed[0].ctypes.data, weight2=layer.packed[1].ctypes.data if layer.two() else None,
            bias=layer.biases[0].ctypes.data, bias2=layer.biases[1].ctypes.data if layer.two() else None,
            x=x.ctypes.data, y=y.ctypes.data, lora=ctypes.addressof(lora), weight_type=layer.weight_type,
            x_type=layer.x_type, y_type=layer.y_type, epilogue=layer.epilogue, factor=layer.factor,
        )  # fmt: skip
        ops = [lora, op] if adapters.any() else [op]
        (runner or layer.engine).run(op_pointers(ops), len(ops), Step(num_tokens=count))
        del step, keep
        if layer.y_type is Type.BFLOAT16_TILES:
            return out_of_tiles(y)[:count, : layer.n]
        return y[:count, : layer.n]

    def _lora(self, x: Array, adapters: Array) -> tuple[LoraOp, LoraStep, list[Any]]:
        layer, library = self.layer, self.layer.engine.library
        grouped = GroupedTokens.of(adapters.astype(np.int32))
        addresses = np.array([self.adapters[number].address for number in grouped.numbers], np.int64)
        step = LoraStep(num_adapters=len(addresses), num_tokens=len(grouped.arrays["tokens"]))
        arrays: dict[str, Array] = {"adapters": addresses, **grouped.arrays}
        for name, array in arrays.items():
            setattr(step, name, array.ctypes.data)
        panels = -(-layer.n // PANEL)
        split, num_splits = splits_of(layer.k)
        hidden_stride = len(self.parts) * num_splits * MAX_RANK
        hidden = library.memory(4 * len(adapters) * hidden_stride)
        delta = library.memory(4 * panels * len(self.parts) * LORA_DELTA_TOKENS * PANEL)
        hidden[:], delta[:] = 0xFF, 0xFF  # NaN
        op = LoraOp(
            kind=Kind.LORA, x_type=layer.x_type, weight_type=self.type, first_layer=0, step=ctypes.addressof(step),
            x=x.ctypes.data, hidden=hidden.ctypes.data, delta=delta.ctypes.data, num_layers=len(self.parts), k=layer.k,
            x_stride=stride(x), hidden_stride=hidden_stride, max_rank=MAX_RANK, split=split, num_splits=num_splits,
            num_panels=panels * len(self.parts),
        )  # fmt: skip
        op.first_panels[1] = panels
        return op, step, [grouped, addresses, hidden, delta]

    def expected(self, x: Array, adapters: Array) -> Array:
        layer = self.layer
        wide = numbers(x[:, : layer.k], layer.x_type).astype(np.float64)
        sums = [wide @ w.T.astype(np.float64) + b for w, b in zip(layer.weights, layer.biases, strict=True)]
        for row, adapter in enumerate(adapters):
            for part, name in enumerate(("gate", "up")[: len(self.parts)]):
                if (matrices := self.arrays.get(int(adapter), {}).get(name)) is not None:
                    down, up = (self._rounded(each) for each in (matrices.down, matrices.up))
                    sums[part][row] += up @ (down @ wide[row])
        if layer.epilogue is Epilogue.ADD:
            return np.asarray(layer.old_y(len(x))[: len(x), : layer.n] + sums[0] * layer.factor)
        if layer.two():
            gates = sums[0] * layer.factor
            return np.asarray(gates / (1 + np.exp(-gates)) * sums[1])
        return np.asarray(sums[0])

    def _rounded(self, matrix: Array) -> Array:
        return numbers(stored(matrix, self.type), self.type).astype(np.float64)


def mixed(rows: int) -> Array:
    return np.random.default_rng(rows).integers(0, 4, rows).astype(np.int32)


EPILOGUES = (Epilogue.STORE, Epilogue.ADD, Epilogue.SILU_MUL)


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda epilogue: epilogue.name)
@pytest.mark.parametrize(("weight_type", "x_type"), TYPES)
@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
def test_it_is_the_sum_of_both(variant: str, weight_type: Type, x_type: Type, epilogue: Epilogue) -> None:
    """Of few tokens and of many, whose products are made in different places."""
    for n, k in ((70, 130), (33, 1100)):
        adapted = AdaptedLayer(Layer(engine(variant), n, k, weight_type, x_type, epilogue=epilogue, factor=0.5))
        for rows in (1, 9, 3 * LORA_DELTA_TOKENS):
            x, adapters = adapted.layer.x(rows), mixed(rows)
            assert np.allclose(adapted.run(x, adapters), adapted.expected(x, adapters), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda epilogue: epilogue.name)
@pytest.mark.parametrize(("weight_type", "x_type"), TYPES)
@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
def test_a_row_depends_on_itself_and_its_adapter(
    variant: str, weight_type: Type, x_type: Type, epilogue: Epilogue
) -> None:
    adapted = AdaptedLayer(Layer(engine(variant), 70, 610, weight_type, x_type, epilogue=epilogue))
    rows = 2 * LORA_DELTA_TOKENS + 5
    x, adapters = adapted.layer.x(rows), mixed(rows)
    x[3, :7] = x[3, 7] * 1000 if x_type is Type.FLOAT32 else to_bf16(np.array([3e5]))  # touches no other row
    together = adapted.run(x, adapters)
    plain = adapted.run(x, np.zeros_like(adapters))
    others = adapted.run(x, adapters, engine(variant, 3))
    assert np.array_equal(others, together)
    assert np.array_equal(together[adapters == 0], plain[adapters == 0])
    if epilogue is not Epilogue.ADD:  # there old rows differ by their places
        for row in (0, 3, 40, rows - 1):
            assert np.array_equal(adapted.run(x[row : row + 1], adapters[row : row + 1])[0], together[row])
    few = adapted.run(x[:30], adapters[:30])
    assert np.array_equal(few, together[:30])


def test_tiles_take_adapters(tiles: NativeKernels) -> None:
    """As libraries for vectors do, within the rounding of their products."""
    for epilogue in (Epilogue.STORE, Epilogue.SILU_MUL):
        y_type = Type.FLOAT32 if epilogue is Epilogue.STORE else Type.BFLOAT16_TILES
        layer = Layer(tiles, 96, 224, Type.BFLOAT16, Type.BFLOAT16_TILES, y_type, epilogue)
        adapted = AdaptedLayer(layer)
        for rows in (3, 40, 2 * LORA_DELTA_TOKENS):
            x, adapters = layer.x(rows), mixed(rows)
            found = adapted.run(x, adapters)
            wanted = adapted.expected(x, adapters)
            assert np.allclose(numbers(found, y_type), wanted, rtol=1e-2, atol=1e-2)
            plain = adapted.run(x, np.zeros_like(adapters))
            assert np.array_equal(found[adapters == 0], plain[adapters == 0])
            few = adapted.run(x[:2], adapters[:2])
            assert np.array_equal(few, found[:2])
