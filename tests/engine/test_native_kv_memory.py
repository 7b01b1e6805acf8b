"""Where the native kernels' keys and values lie: no two blocks share a byte, and a block's layers are neighbours."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from llmbackend.engine.cpu.native_memory import LayerKV, NativeKVMemory
from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.operations import Type

pytestmark = pytest.mark.skipif(not library.available(), reason="no native kernels are built")
BLOCKS, BLOCK_SIZE = 7, 32
ALIKE = [LayerKV(2, 64)] * 5
UNLIKE = [LayerKV(2, 64), LayerKV(4, 32), LayerKV(1, 96)]
LATENT = LayerKV(1, 96, has_values=False)


def ranges(memory: NativeKVMemory, block: int) -> list[tuple[int, int]]:
    """First and last address, of the keys and, where there are some, the values of each layer, as the kernels compute
    them."""
    kernels_block = int(memory.kernels_blocks(np.array([block], np.int32))[0])
    found = []
    for layer in memory.layers:
        half_bytes = layer.num_kv_heads * layer.head_dim * layer.block_size * 2
        found += [
            (base + kernels_block * half_bytes, base + (kernels_block + 1) * half_bytes)
            for base in (layer.keys, layer.values)
            if base is not None
        ]
    return found


def make(shapes: list[LayerKV]) -> NativeKVMemory:
    kernels = library.load()
    assert kernels is not None
    return NativeKVMemory(kernels, shapes, BLOCKS, BLOCK_SIZE, Type.BFLOAT16)


@pytest.mark.parametrize("shapes", [ALIKE, UNLIKE, ALIKE[:1], [LATENT] * 4, [*UNLIKE, LATENT]])
def test_no_two_blocks_share_memory(shapes: list[LayerKV]) -> None:
    memory = make(shapes)
    every = sorted(each for block in range(BLOCKS) for each in ranges(memory, block))
    assert all(end <= begin for (_, end), (begin, _) in pairwise(every))
    begin = int(memory.memory.ctypes.data)
    assert begin <= every[0][0] and every[-1][1] <= begin + len(memory.memory)


@pytest.mark.parametrize("shapes", [ALIKE, UNLIKE])
def test_slots_are_in_their_blocks(shapes: list[LayerKV]) -> None:
    memory, slots = make(shapes), np.arange(BLOCKS * BLOCK_SIZE, dtype=np.int32)
    given = memory.kernels_slots(slots)
    assert (given // BLOCK_SIZE == memory.kernels_blocks(slots // BLOCK_SIZE)).all()
    assert (given % BLOCK_SIZE == slots % BLOCK_SIZE).all()


def test_few_blocks_in_use_are_few_pages_in_use() -> None:
    memory, half_bytes = make(ALIKE), 2 * 64 * BLOCK_SIZE * 2
    places = ranges(memory, 3)
    assert max(end for _, end in places) - min(begin for begin, _ in places) == 2 * len(ALIKE) * half_bytes
