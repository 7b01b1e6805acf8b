"""Paged attention equals plain causal attention, sequence by sequence, for any layout of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from llmbackend.engine.attention import reference
from llmbackend.engine.attention.interface import PAGED_ATTENTION, AttentionOptions, LayerShape, register
from llmbackend.engine.attention.reference import LayerKVCache, PagedAttention, RaggedBatch, padded_blocks

pytestmark = pytest.mark.slow

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 4
MAX_BLOCKS = 16
CPU = torch.device("cpu")


@dataclass
class Sequence:
    """A sequence's queries, keys, values [tokens, heads, dim], of which `done` tokens are in the cache."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    blocks: np.ndarray
    done: int = 0


class Harness:
    """Sequences with scattered blocks in one cache, computed in chunks of any size."""

    def __init__(self, lengths: list[int], value_dim: int = DIM, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layer = nn.Identity()
        num_blocks = len(lengths) * MAX_BLOCKS
        self.cache = LayerKVCache(LayerShape(KV_HEADS, DIM, value_dim), num_blocks, BLOCK, torch.float32, CPU)
        tables = np.random.default_rng(seed).permutation(num_blocks).reshape(-1, MAX_BLOCKS).astype(np.int32)
        self.sequences = [
            Sequence(
                torch.randn(n, HEADS, DIM, generator=generator),
                torch.randn(n, KV_HEADS, DIM, generator=generator),
                torch.randn(n, KV_HEADS, value_dim, generator=generator),
                table,
            )
            for n, table in zip(lengths, tables, strict=True)
        ]

    def step(self, chunks: dict[int, int], options: AttentionOptions) -> dict[int, torch.Tensor]:
        """Computes the next chunks[i] tokens of sequence i, as one batch; outputs by sequence."""
        order = sorted(chunks, key=lambda i: (chunks[i], self.sequences[i].done + chunks[i]))
        parts = [(self.sequences[i], slice(self.sequences[i].done, self.sequences[i].done + chunks[i])) for i in order]
        positions = [np.arange(part.start, part.stop) for _, part in parts]
        slots = [s.blocks[p // BLOCK] * BLOCK + p % BLOCK for (s, _), p in zip(parts, positions, strict=True)]
        batch = RaggedBatch(
            np.array([chunks[i] for i in order], np.int64),
            np.array([part.stop for _, part in parts], np.int64),
            np.stack([sequence.blocks for sequence, _ in parts]),
            np.concatenate(slots).astype(np.int64),
            BLOCK,
            CPU,
        )
        q, k, v = (torch.cat([getattr(s, name)[part] for s, part in parts]) for name in "qkv")
        output = PagedAttention({self.layer: self.cache}, batch).attend(self.layer, q, k, v, options)
        for i in order:
            self.sequences[i].done += chunks[i]
        return dict(zip(order, torch.split(output, [chunks[i] for i in order]), strict=True))


def plain_attention(sequence: Sequence, options: AttentionOptions) -> torch.Tensor:
    """One position and head at a time."""
    output = torch.zeros(len(sequence.q), HEADS, sequence.v.shape[2])
    for t in range(len(sequence.q)):
        first = max(0, t - options.sliding_window + 1) if options.sliding_window else 0
        for h in range(HEADS):
            kv = h // (HEADS // KV_HEADS)
            scores = sequence.k[first : t + 1, kv] @ sequence.q[t, h] * options.scaling
            if options.slopes is not None:
                scores = scores + options.slopes[h] * torch.arange(first - t, 1)
            if options.softcap:
                scores = torch.tanh(scores / options.softcap) * options.softcap
            if options.sinks is not None:
                scores = torch.cat((scores, options.sinks[h : h + 1]))
            weights = torch.softmax(scores, 0)[: t + 1 - first]
            output[t, h] = weights @ sequence.v[first : t + 1, kv]
    return output


OPTIONS = {
    "plain": AttentionOptions(scaling=0.3),
    "window": AttentionOptions(scaling=0.3, sliding_window=5),
    "wide window": AttentionOptions(scaling=0.3, sliding_window=23),
    "softcap": AttentionOptions(scaling=1.0, softcap=1.5),
    "sinks": AttentionOptions(scaling=0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "sinks and window": AttentionOptions(scaling=0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]), sliding_window=5),
    "slopes": AttentionOptions(scaling=0.3, slopes=torch.tensor([0.5, 0.25, 0.1, 0.02])),
    "slopes, softcap, wide window": AttentionOptions(
        scaling=0.3, slopes=torch.tensor([0.5, 0.25, 0.1, 0.02]), softcap=2.0, sliding_window=23
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_plain_attention_for_mixed_chunks(name: str) -> None:
    lengths = [1, 7, 30, 30, 64, 19]
    harness, chunk_sizes = Harness(lengths), np.random.default_rng(3)
    outputs: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(lengths))}
    while any(s.done < n for s, n in zip(harness.sequences, lengths, strict=True)):
        left = {i: n - s.done for i, (s, n) in enumerate(zip(harness.sequences, lengths, strict=True)) if s.done < n}
        chunks = {i: min(n, int(chunk_sizes.choice([1, 1, 3, 11]))) for i, n in left.items()}
        for i, output in harness.step(chunks, OPTIONS[name]).items():
            outputs[i].append(output)
    for i, sequence in enumerate(harness.sequences):
        torch.testing.assert_close(torch.cat(outputs[i]), plain_attention(sequence, OPTIONS[name]))


def test_values_may_be_narrower_than_keys() -> None:
    harness = Harness([9, 14], value_dim=6)
    outputs = harness.step({0: 9, 1: 14}, OPTIONS["plain"])
    for i, sequence in enumerate(harness.sequences):
        torch.testing.assert_close(outputs[i], plain_attention(sequence, OPTIONS["plain"]))


@pytest.mark.parametrize("chunk", [1, 6])
def test_a_row_does_not_depend_on_its_neighbours_bit_by_bit(chunk: int) -> None:
    lengths = [17, 40, 18, 33]
    together, alone = Harness(lengths), Harness(lengths)
    for harness in (together, alone):
        harness.step({i: n - chunk for i, n in enumerate(lengths)}, OPTIONS["plain"])
    expected = together.step(dict.fromkeys(range(4), chunk), OPTIONS["plain"])
    for i in range(4):
        assert torch.equal(alone.step({i: chunk}, OPTIONS["plain"])[i], expected[i])


@pytest.mark.parametrize("name", ["plain", "slopes"])
def test_chunks_do_not_change_a_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Harness([60]).step({0: 60}, OPTIONS[name])[0]
    chunked = Harness([60])
    parts = [chunked.step({0: n}, OPTIONS[name])[0] for n in (1, 13, 2, 30, 1, 13)]
    assert torch.equal(torch.cat(parts), whole)
    monkeypatch.setattr(reference, "_MAX_SCORES", 2000)
    assert torch.equal(Harness([60]).step({0: 60}, OPTIONS[name])[0], whole)


def test_leftovers_of_a_broken_request_do_not_leak_into_a_reused_block() -> None:
    harness = Harness([3, 3])
    broken, healthy = harness.sequences
    broken.k[:], broken.v[:] = float("nan"), float("inf")
    harness.step({0: 3}, OPTIONS["plain"])
    healthy.blocks = broken.blocks
    output = harness.step({1: 1}, OPTIONS["plain"])[1]
    torch.testing.assert_close(output, plain_attention(healthy, OPTIONS["plain"])[:1])


def test_padding_is_small_and_takes_few_sizes() -> None:
    wanted = np.arange(1, 2000)
    padded = padded_blocks(wanted)
    assert (padded >= wanted).all()
    assert (padded <= np.maximum(wanted + 1, wanted * 1.5)).all()
    assert len(set(padded.tolist())) < 24


def test_attention_outside_a_step_fails() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register()
    tensor = torch.zeros(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="outside a step"):
        ALL_ATTENTION_FUNCTIONS[PAGED_ATTENTION](nn.Identity(), tensor, tensor, tensor, None)
