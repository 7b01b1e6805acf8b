"""Paged attention in Triton's language equals plain causal attention in float64, and a query's result depends, bit by
bit, on its own position, keys and values alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from llmbackend.engine.gpu.kernels import paged_attention
from llmbackend.engine.gpu.kernels.paged_attention import PagedAttention, Tiles
from llmbackend.engine.gpu.ops.ops import PADDING_SLOT, AttendSpec, LayerCache, StepLayout
from tests.helpers.gpu.kernel_device import DEVICE

Part = tuple[int, int, int]
"""Sequence, its first position in this step, number of tokens."""


@dataclass(frozen=True)
class Shape:
    heads: int = 3
    kv_heads: int = 1
    dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    def spec(self) -> AttendSpec:
        sinks = torch.linspace(-3, 4, self.heads) if self.sinks else None
        return AttendSpec(self.heads, self.kv_heads, self.dim, 0.3, self.window, self.softcap, sinks)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two tiles of 16 keys, so that short sequences have several."""
    choose = paged_attention.choose_tiles

    def choose_small(head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, exact_chunks: bool) -> Tiles:
        return replace(choose(head_dim, dtype, cache_dtype, exact_chunks), keys=16, rows=16 if exact_chunks else 64)

    monkeypatch.setattr(paged_attention, "choose_tiles", choose_small)
    monkeypatch.setattr(paged_attention, "SPLIT", 32)
    monkeypatch.setattr(paged_attention, "_UNROLL", 2)


def _on_device(parts: Any) -> Any:
    """A dataclass with its tensors on the device."""
    tensors = {name: getattr(parts, name) for name in parts.__slots__}
    return replace(parts, **{name: x.to(DEVICE) for name, x in tensors.items() if isinstance(x, torch.Tensor)})


class Memory:
    """Sequences of random queries, keys and values [tokens, heads, dim], and a cache that holds their keys and values
    in blocks drawn at random; what is not theirs is NaN."""

    def __init__(self, shape: Shape, lengths: Sequence[int], seed: int = 0) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)

        def draw(length: int, heads: int) -> torch.Tensor:
            return torch.randn(length, heads, shape.dim, generator=generator).to(shape.dtype)

        self.q = [draw(n, shape.heads) for n in lengths]
        counts = [-(-n // shape.block_size) for n in lengths]
        self.table = torch.full((len(lengths) + 2, max(counts) + 1), 1 << 30, dtype=torch.int32)
        order = torch.randperm(sum(counts) + 2, generator=generator).int()
        size = (len(order), shape.kv_heads, shape.block_size, shape.dim)
        stored = shape.cache_dtype or shape.dtype
        keys, values = (torch.full(size, float("nan")).to(stored) for _ in "kv")
        self.cache = LayerCache(keys, values)
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        for i, (length, end) in enumerate(zip(lengths, torch.tensor(counts).cumsum(0).tolist(), strict=True)):
            self.table[i, : counts[i]] = order[end - counts[i] : end]
            at = torch.arange(length)
            block, offset = self.table[i, at // shape.block_size].long(), at % shape.block_size
            for store, kept in ((keys, self.k), (values, self.v)):
                store[block, :, offset] = draw(length, shape.kv_heads).to(stored)
                kept.append(store[block, :, offset].double())

    def layout(
        self, parts: Sequence[Part], padding: int = 0, max_seq_len: int | None = None, empty: int = 0
    ) -> StepLayout:
        """empty: as many padding sequences have no token, and five tokens for each have no sequence."""
        counts = [n for _, _, n in parts] + [1] * padding + [0] * empty
        lengths = [first + n for _, first, n in parts] + [0] * (padding + empty)
        positions = [torch.arange(first, first + n) for _, first, n in parts] + [torch.zeros(padding + 5 * empty)]

        def ints(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        unused = torch.full((sum(counts) + 5 * empty,), PADDING_SLOT, dtype=torch.int32)
        return StepLayout(
            rows=ints([i for i, _, _ in parts] + [0] * (padding + empty)),
            query_start=ints([0, *torch.tensor(counts).cumsum(0).tolist()]),
            seq_lens=ints(lengths),
            token_ids=unused,
            positions=torch.cat(positions).int(),
            slots=unused,
            sampled_tokens=unused,
            max_query_len=max(counts),
            max_seq_len=max_seq_len or max(lengths),
        )

    def attend(
        self,
        parts: Sequence[Part],
        padding: int = 0,
        max_seq_len: int | None = None,
        workspace_bytes: int = 1 << 20,
        exact_chunks: bool = False,
        num_multiprocessors: int | None = None,
        empty: int = 0,
    ) -> list[torch.Tensor]:
        """[tokens, heads, dim] of each part; padding's zeros come last, then tokens of no sequence."""
        shape = self.shape
        attention = PagedAttention(
            DEVICE,
            num_heads=shape.heads,
            head_dim=shape.dim,
            max_num_seqs=len(parts) + padding + empty,
            max_seq_len=256,
            workspace_bytes=workspace_bytes,
            exact_chunks=exact_chunks,
            num_multiprocessors=num_multiprocessors,
        )
        attention._workspace.fill_(float("nan"))
        layout = self.layout(parts, padding, max_seq_len, empty)
        tokens, width = len(layout.positions), shape.heads * shape.dim
        kv_width = 2 * shape.kv_heads * shape.dim
        qkv = torch.full((tokens, width + kv_width), float("nan"), dtype=shape.dtype)
        qkv[: tokens - padding - 5 * empty, :width] = torch.cat([self.q[i][a : a + n] for i, a, n in parts]).flatten(1)
        out = torch.full((tokens, width), float("nan"), dtype=shape.dtype)
        cache = LayerCache(self.cache.keys.to(DEVICE), self.cache.values.to(DEVICE))
        out = out.to(DEVICE)
        attention.attend(
            qkv.to(DEVICE), _on_device(layout), self.table.to(DEVICE), _on_device(shape.spec()), cache, out
        )
        sizes = [n for _, _, n in parts] + [padding, 5 * empty]
        return list(torch.split(out.cpu().view(-1, shape.heads, shape.dim), sizes))

    def expected(self, part: Part) -> torch.Tensor:
        """In float64, one query at a time."""
        shape, (i, start, count) = self.shape, part
        spec, group = shape.spec(), shape.heads // shape.kv_heads
        output = torch.zeros(count, shape.heads, shape.dim, dtype=torch.float64)
        for row, position in enumerate(range(start, start + count)):
            first = max(0, position - shape.window + 1) if shape.window else 0
            k, v = (x[i][first : position + 1].repeat_interleave(group, 1) for x in (self.k, self.v))
            scores = torch.einsum("hd,nhd->hn", self.q[i][position].double(), k) * spec.scaling
            if spec.softcap:
                scores = torch.tanh(scores / spec.softcap) * spec.softcap
            if spec.sinks is not None:
                scores = torch.cat((scores, spec.sinks.double()[:, None]), 1)
            weights = torch.softmax(scores, 1)[:, : position + 1 - first]
            output[row] = torch.einsum("hn,nhd->hd", weights, v)
        return output


SHAPES = {
    "plain": Shape(),
    "two groups": Shape(heads=4, kv_heads=2),
    "no groups, dim 24": Shape(heads=2, kv_heads=2, dim=24),
    "groups of 7, dim 80": Shape(heads=7, dim=80),
    "groups of 20": Shape(heads=20),
    "blocks larger than tiles": Shape(block_size=64),
    "narrow window": Shape(window=5),
    "wide window": Shape(window=45),
    "softcap": Shape(softcap=1.5),
    "sinks": Shape(sinks=True),
    "sinks, softcap and window": Shape(sinks=True, window=38, softcap=2.0),
    "bfloat16": Shape(dtype=torch.bfloat16),
    "float16, window": Shape(dtype=torch.float16, window=45, block_size=32),
    "bfloat16 with float8 cache": Shape(dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn),
    "float16 with float8 cache, softcap": Shape(dtype=torch.float16, cache_dtype=torch.float8_e4m3fn, softcap=3.0),
}
ROUNDING = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("name", SHAPES)
def test_equals_plain_attention(name: str) -> None:
    memory = Memory(SHAPES[name], [70, 33, 50, 32])
    parts = [(0, 69, 1), (1, 0, 33), (2, 41, 9), (3, 31, 1)]
    outputs = memory.attend(parts, padding=1)
    tolerance = ROUNDING[memory.shape.dtype]
    for part, output in zip(parts, outputs, strict=False):
        torch.testing.assert_close(output.double(), memory.expected(part), rtol=tolerance, atol=tolerance)
    assert not outputs[-2].any()


@pytest.mark.parametrize("name", ["plain", "sinks, softcap and window"])
def test_neither_the_batch_nor_its_bounds_nor_the_workspace_change_a_bit(name: str) -> None:
    lengths = [70, 1, 90]
    memory = Memory(SHAPES[name], lengths)
    decode = [(i, n - 1, 1) for i, n in enumerate(lengths)]
    alone = [memory.attend([part])[0] for part in decode]
    variants = [
        memory.attend([*decode, (0, 3, 9)], padding=1),
        memory.attend(decode[::-1], max_seq_len=256)[::-1][2:],
        memory.attend(decode, workspace_bytes=0),
    ]
    for outputs in variants:
        for output, expected in zip(outputs, alone, strict=False):
            assert torch.equal(output, expected)


@pytest.mark.parametrize("exact_chunks", [True, False])
@pytest.mark.parametrize("name", ["sinks, softcap and window", "bfloat16"])
def test_chunks_do_not_change_a_bit(name: str, exact_chunks: bool) -> None:
    memory = Memory(SHAPES[name], [40])
    whole = memory.attend([(0, 0, 40)], exact_chunks=exact_chunks)[0]
    start, cuts = 0, [1, 24, 2, 12, 1]
    assert sum(cuts) == 40
    for count in cuts:
        output = memory.attend([(0, start, count)], exact_chunks=exact_chunks)[0]
        assert torch.equal(output, whole[start : start + count])
        start += count


def test_blocks_behind_the_window_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a tile begins before them: other sequences may have them by now, or none."""
    small = paged_attention.choose_tiles
    monkeypatch.setattr(paged_attention, "choose_tiles", lambda *shape: replace(small(*shape), keys=32))
    memory = Memory(SHAPES["wide window"], [70, 80])
    parts = [(0, 69, 1), (1, 70, 10)]
    before = memory.attend(parts)
    for i, first in ((0, 69), (1, 70)):
        unseen = (first - memory.shape.window + 1) // memory.shape.block_size
        assert unseen == 1
        for store in (memory.cache.keys, memory.cache.values):
            store[memory.table[i, :unseen].long()] = float("nan")
        memory.table[i, :unseen] = -1
    for one, other in zip(before, memory.attend(parts), strict=True):
        assert torch.equal(one, other)


def test_the_number_of_programs_does_not_change_a_bit() -> None:
    """One multiprocessor's programs compute several items each; of 40 some have none."""
    memory = Memory(SHAPES["two groups"], [150, 33, 70, 20])
    parts = [(0, 149, 1), (1, 3, 30), (2, 69, 1), (3, 0, 20)]
    few, many = (memory.attend(parts, padding=2, num_multiprocessors=n) for n in (1, 40))
    for one, other in zip(few, many, strict=True):
        assert torch.equal(one, other)


def test_what_pads_a_mixed_step_changes_nothing() -> None:
    """In a graph padding sequences have no tokens, and tokens behind all others no sequence."""
    memory = Memory(SHAPES["plain"], [40, 33])
    parts = [(0, 39, 1), (1, 3, 30)]
    plain, padded = memory.attend(parts), memory.attend(parts, empty=3)
    for one, other in zip(plain[: len(parts)], padded, strict=False):
        assert torch.equal(one, other)
    assert padded[-1].isnan().all()


def test_some_sequences_find_a_place_in_the_workspace_and_others_do_not() -> None:
    memory = Memory(SHAPES["plain"], [40, 40, 40])
    decode = [(i, 39, 1) for i in range(3)]
    place = memory.shape.heads * (memory.shape.dim + 2) * 4
    for expected, output in zip(memory.attend(decode), memory.attend(decode, workspace_bytes=3 * place), strict=True):
        assert torch.equal(output, expected)


@pytest.mark.parametrize(
    ("shape", "expected"), [(Shape(block_size=24), "block_size 24"), (Shape(block_size=8), "block_size 8")]
)
def test_what_the_kernels_do_not_do_is_refused(shape: Shape, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Memory(shape, [3]).attend([(0, 0, 3)])
