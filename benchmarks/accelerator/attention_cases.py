"""Steps of attention in the shapes of real models, created on the device, with their float32 results.

Used by attention_parity.py and attention_sweep.py. Independent of tolerances and speed. Invariants: the engine's own
tiles and splits; blocks are at random places, and memory that belongs to no sequence is NaN; the output is NaN before a
call; the reference reads keys and values as they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Case:
    """One step. parts: for each sequence its length and how many of its last tokens are queries."""

    head_dim: int
    num_heads: int
    num_kv_heads: int
    parts: tuple[tuple[int, int], ...]
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    float8: bool = False
    exact_chunks: bool = False
    max_seq_len: int = 32768
    name: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.parts)


class Step:
    """Tensors of a case on a device, and the kernels' launcher."""

    def __init__(self, case: Case, device: Any, seed: int = 0) -> None:
        import torch

        from llmbackend.engine.gpu.kernels.paged_attention import PagedAttention
        from llmbackend.engine.gpu.ops.ops import AttendSpec, LayerCache

        self.case, self.device = case, device
        self._random = torch.Generator(device).manual_seed(seed)
        counts = [-(-length // BLOCK_SIZE) for length, _ in case.parts]
        self.table = torch.full((len(counts), max(counts)), 1 << 30, dtype=torch.int32, device=device)
        order = torch.randperm(sum(counts) + 2, generator=self._random, device=device).int()
        ends = torch.tensor(counts).cumsum(0).tolist()
        for row, (count, end) in enumerate(zip(counts, ends, strict=True)):
            self.table[row, :count] = order[end - count : end]
        keys, values = (self._memory(len(order)) for _ in "kv")
        self.cache = LayerCache(keys, values)
        sinks = torch.linspace(-1, 2, case.num_heads, device=device) if case.sinks else None
        self.spec = AttendSpec(
            case.num_heads, case.num_kv_heads, case.head_dim, 2 * case.head_dim**-0.5, case.window, case.softcap, sinks
        )
        self.layout = _layout(case.parts, device, case.max_seq_len)
        width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
        self.qkv = self._normal(case.num_tokens, width).bfloat16()
        self.out = torch.empty(case.num_tokens, case.num_heads * case.head_dim, dtype=torch.bfloat16, device=device)
        self.attention = PagedAttention(
            device,
            num_heads=case.num_heads,
            head_dim=case.head_dim,
            max_num_seqs=len(case.parts),
            max_seq_len=case.max_seq_len,
            exact_chunks=case.exact_chunks,
        )

    def launch(self) -> None:
        self.attention.attend(self.qkv, self.layout, self.table, self.spec, self.cache, self.out)

    def attended(self) -> Any:
        """The output, of memory that was NaN before."""
        self.out.fill_(float("nan"))
        self.attention._workspace.fill_(float("nan"))
        self.launch()
        return self.out.clone()

    def expected(self) -> Any:
        """float32 [tokens, num_heads * head_dim]."""
        import torch

        output, first = torch.empty_like(self.out, dtype=torch.float32), 0
        for row, (length, count) in enumerate(self.case.parts):
            output[first : first + count] = self._sequence(row, length, self.qkv[first : first + count])
            first += count
        return output

    def num_kv_bytes(self) -> int:
        """The minimum that the step reads: each visible key and value once."""
        window = self.case.window or (1 << 62)
        tokens = sum(min(length, window + count - 1) for length, count in self.case.parts)
        return int(2 * tokens * self.case.num_kv_heads * self.case.head_dim * self.cache.keys.itemsize)

    def _memory(self, num_blocks: int) -> Any:
        import torch

        case = self.case
        shape = (num_blocks, case.num_kv_heads, BLOCK_SIZE, case.head_dim)
        memory = self._normal(*shape)
        own = torch.zeros(num_blocks * BLOCK_SIZE, dtype=torch.bool, device=self.device)
        for row, (length, _) in enumerate(case.parts):
            at = torch.arange(length, device=self.device)
            own[self.table[row, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE] = True
        is_own = own.view(num_blocks, 1, BLOCK_SIZE, 1)
        return torch.where(is_own, memory, float("nan")).to(torch.float8_e4m3fn if case.float8 else torch.bfloat16)

    def _normal(self, *shape: int) -> Any:
        import torch

        return torch.randn(*shape, generator=self._random, device=self.device)

    def _sequence(self, row: int, length: int, qkv: Any) -> Any:
        import torch

        case, count = self.case, len(qkv)
        at = torch.arange(length, device=self.device)
        blocks, offsets = self.table[row, at // BLOCK_SIZE].long(), at % BLOCK_SIZE
        queries = qkv[:, : case.num_heads * case.head_dim].float().view(count, case.num_heads, case.head_dim)
        position = torch.arange(length - count, length, device=self.device)[:, None]
        hidden = at > position
        if case.window:
            hidden |= at <= position - case.window
        group = case.num_heads // case.num_kv_heads
        output = torch.empty(count, case.num_heads, case.head_dim, device=self.device)
        for head in range(case.num_kv_heads):  # the scores of all heads together could take 2 GiB
            heads = slice(head * group, (head + 1) * group)
            keys = self._stored(self.cache.keys, blocks, head, offsets)
            values = self._stored(self.cache.values, blocks, head, offsets)
            output[:, heads] = self._heads(queries[:, heads], keys, values, hidden, heads)
        return output.flatten(1)

    def _stored(self, memory: Any, blocks: Any, head: int, offsets: Any) -> Any:
        """float32 [keys, head_dim] of one head."""
        if memory.itemsize > 1:
            return memory[blocks, head, offsets].float()
        import torch  # torch gathers bytes everywhere, 8-bit floats only in some places

        return memory.view(torch.uint8)[blocks, head, offsets].view(memory.dtype).float()

    def _heads(self, queries: Any, keys: Any, values: Any, hidden: Any, heads: slice) -> Any:
        """float32 [queries, group, head_dim]."""
        import torch

        scores = torch.einsum("qgd,kd->gqk", queries, keys) * self.spec.scaling
        if cap := self.spec.softcap:
            scores = torch.tanh(scores / cap) * cap
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.spec.sinks is not None:
            sinks = self.spec.sinks[heads, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sinks), -1)
        weights = torch.softmax(scores, -1)[..., : keys.shape[0]]
        return torch.einsum("gqk,kd->qgd", weights, values)


def _layout(parts: Sequence[tuple[int, int]], device: Any, max_seq_len: int) -> Any:
    import torch

    from llmbackend.engine.gpu.ops.ops import PADDING_SLOT, StepLayout

    def ints(values: Sequence[int]) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=device)

    counts = [count for _, count in parts]
    unused = torch.full((sum(counts),), PADDING_SLOT, dtype=torch.int32, device=device)
    return StepLayout(
        rows=ints(range(len(parts))),
        query_start=ints([0, *torch.tensor(counts).cumsum(0).tolist()]),
        seq_lens=ints([length for length, _ in parts]),
        token_ids=unused,
        positions=unused,
        slots=unused,
        sampled_tokens=unused,
        max_query_len=max(counts),
        max_seq_len=max_seq_len,
    )
