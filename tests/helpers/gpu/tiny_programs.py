"""GPU programs of tiny models, alone and on several ranks (threads of a barrier), and their logits of a few prompts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from llmbackend.engine.attention.interface import LayerShape
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.gpu.ops.ops import PADDING_SLOT, LayerCache, StepLayout
from llmbackend.engine.gpu.ops.torch_ops import TorchOps
from llmbackend.engine.gpu.parallel.collectives import StageGroup
from llmbackend.engine.gpu.parallel.sharding import Sharding
from llmbackend.engine.gpu.program import GpuProgram, library_matmul
from llmbackend.engine.gpu.weights.dense import Matmul
from llmbackend.engine.model.decoder_description import Decoder
from llmbackend.engine.model.loader import LoadedModel, load_model

BLOCK_SIZE, NUM_BLOCKS = 8, 24
LENGTHS = (40, 23, 9, 1)
STEPS = ((7, 0, 9, 0), (1, 20, 0, 1), (31, 2, 0, 0), (1, 1, 0, 0))
"""How many tokens of each sequence a step computes."""


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(path), transport="inline", **options), dense=True)


def caches(loaded: LoadedModel, dtype: torch.dtype | None = None) -> dict[nn.Module, LayerCache]:
    """KV memory with garbage in it."""

    def memory(num_kv_heads: int, dim: int) -> torch.Tensor:
        return torch.full((NUM_BLOCKS, num_kv_heads, BLOCK_SIZE, dim), 77.0).to(dtype or loaded.dtype)

    return {
        module: LayerCache(memory(shape.num_kv_heads, shape.key_dim), memory(shape.num_kv_heads, shape.value_dim))
        for module, shape in loaded.layer_shapes.items()
    }


def program(loaded: LoadedModel, kv_dtype: torch.dtype | None = None, matmul: Matmul = library_matmul) -> GpuProgram:
    assert loaded.decoder is not None, loaded.why_modules
    return GpuProgram(loaded.decoder, caches(loaded, kv_dtype), TorchOps(), 64, 64, matmul)


def block_table() -> torch.Tensor:
    """Blocks of each row, in no order."""
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    return order.reshape(len(LENGTHS), -1)


def layout(tokens: list[torch.Tensor], done: tuple[int, ...], chunks: tuple[int, ...], padding: int) -> StepLayout:
    """Chunks of sequences, and samples at each of their tokens; `padding` sequences behind them."""
    table, parts = block_table(), [i for i, chunk in enumerate(chunks) if chunk]
    positions = [torch.arange(done[i], done[i] + chunks[i], dtype=torch.int32) for i in parts]
    slots = [table[i, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for i, p in zip(parts, positions, strict=True)]
    count, none = sum(chunks), torch.zeros(padding, dtype=torch.int32)
    lens = [chunks[i] for i in parts] + [1] * padding
    return StepLayout(
        rows=torch.cat((torch.tensor(parts, dtype=torch.int32), none)),
        query_start=torch.tensor([0, *lens]).cumsum(0).to(torch.int32),
        seq_lens=torch.cat((torch.tensor([done[i] + chunks[i] for i in parts], dtype=torch.int32), none)),
        token_ids=torch.cat([*(tokens[i][done[i] : done[i] + chunks[i]] for i in parts), none]),
        positions=torch.cat((*positions, none)),
        slots=torch.cat((*slots, none + PADDING_SLOT)),
        sampled_tokens=torch.arange(count, dtype=torch.int32),
        max_query_len=max(lens),
        max_seq_len=BLOCK_SIZE * table.shape[1] if padding else max(done[i] + chunks[i] for i in parts),
    )


def all_logits(program: GpuProgram, tokens: list[torch.Tensor], padding: int = 0) -> list[torch.Tensor]:
    """Of every token of every sequence, computed in the chunks of STEPS."""
    done: tuple[int, ...] = (0,) * len(tokens)
    found: list[list[torch.Tensor]] = [[] for _ in tokens]
    for chunks in STEPS:
        logits = program.forward(layout(tokens, done, chunks, padding), block_table()).float()
        ends = torch.tensor([0, *chunks]).cumsum(0).tolist()
        for sequence, (start, end) in zip(found, pairwise(ends), strict=True):
            sequence.append(logits[start:end].clone())
        done = tuple(a + b for a, b in zip(done, chunks, strict=True))
    assert done == LENGTHS
    return [torch.cat(sequence) for sequence in found]


def prompts() -> list[torch.Tensor]:
    return [torch.tensor([(7 * i + 5 * n + 3) % 96 for i in range(n)], dtype=torch.int32) for n in LENGTHS]


CPU = torch.device("cpu")
T = TypeVar("T")


class Thread(StageGroup):
    """One of the ranks that share `board`, a place for each."""

    def __init__(self, rank: int, board: list[torch.Tensor], barrier: threading.Barrier) -> None:
        super().__init__(rank, len(board))
        self._board, self._barrier = board, barrier

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._board[self.rank] = x
        self._barrier.wait(10)
        gathered = torch.stack(self._board)
        self._barrier.wait(10)
        return gathered

    def all_reduce(self, x: torch.Tensor) -> None:
        x.copy_(self.all_gather(x).sum(0))


def on_ranks(size: int, work: Callable[[StageGroup], T]) -> list[T]:
    board, barrier = [torch.empty(0)] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, [Thread(rank, board, barrier) for rank in range(size)]))


def part_of(loaded: LoadedModel, ranks: StageGroup) -> tuple[Decoder, dict[nn.Module, LayerShape]]:
    assert loaded.decoder is not None, loaded.why_modules
    sharding = Sharding(ranks, CPU, loaded.dtype)
    return sharding.decoder(loaded.decoder, loaded.layer_shapes), sharding.layer_shapes(loaded.layer_shapes)


def program_of_rank(loaded: LoadedModel, ranks: StageGroup) -> GpuProgram:
    decoder, shapes = part_of(loaded, ranks)
    caches = {
        module: LayerCache(*(torch.full((NUM_BLOCKS, shape.num_kv_heads, BLOCK_SIZE, shape.key_dim), 77.0),) * 2)
        for module, shape in shapes.items()
    }
    caches = {module: LayerCache(cache.keys, cache.values.clone()) for module, cache in caches.items()}
    return GpuProgram(decoder, caches, TorchOps(), 64, 64)
