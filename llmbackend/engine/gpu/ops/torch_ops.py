"""The program's operations in plain torch, on any device: the reference, and the ablation "fused kernels off".

Used if Triton is not available, and by tests of the kernels. Invariants: those of `Ops`; shapes depend only on the
bounds of the layout, so every operation can be captured; attention computes each token separately, so its result does
not depend, bit by bit, on other tokens, on bounds, or on keys after those it attends to.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ...step import LookupLengths
from ..weights.dense import EightBitRows, Rows, as_bytes, eight_bit_rows
from ..weights.experts import ExpertProjection
from .ops import (
    NO_ADAPTER,
    PADDING_SLOT,
    Activation,
    AttendSpec,
    ExpertScratch,
    ExpertSpec,
    LayerCache,
    LoraScratch,
    LoraSpec,
    Norm,
    RotarySpec,
    StepLayout,
    gated,
)

_KEYS_AT_ONCE = 256
# 64 MB of float32.
_MAX_GATHERED = 1 << 24


class TorchOps:
    def embed(self, token_ids: torch.Tensor, embedding: torch.Tensor, factor: float, residual: torch.Tensor) -> None:
        residual.copy_(embedding.index_select(0, token_ids))
        if factor != 1.0:
            residual.mul_(factor)

    def residual_norm(
        self,
        residual: torch.Tensor,
        block: torch.Tensor | None,
        block_norm: Norm | None,
        factor: float,
        norm: Norm | None,
        out: Rows | None,
        tokens: torch.Tensor | None = None,
    ) -> None:
        if block is not None:
            residual.add_(_normed(block.float(), block_norm), alpha=factor)
        if out is not None:
            rows = residual if tokens is None else residual.index_select(0, tokens)
            _put(_normed(rows, norm), out)

    def rotary_and_write(self, qkv: torch.Tensor, layout: StepLayout, spec: RotarySpec, cache: LayerCache) -> None:
        queries, keys, values = _heads(qkv, spec.num_heads, spec.num_kv_heads, spec.head_dim)
        queries.copy_(_rotated(_head_normed(queries, spec.q_norm, spec.norm_whole), layout.positions, spec.cos_sin))
        keys_out = _rotated(_head_normed(keys, spec.k_norm, spec.norm_whole), layout.positions, spec.cos_sin)
        _write(cache.keys, layout.slots, keys_out)
        _write(cache.values, layout.slots, values.float())

    def attend(
        self,
        qkv: torch.Tensor,
        layout: StepLayout,
        block_table: torch.Tensor,
        spec: AttendSpec,
        cache: LayerCache,
        out: torch.Tensor,
    ) -> None:
        queries, _, _ = _heads(qkv, spec.num_heads, spec.num_kv_heads, spec.head_dim)
        sequence, visible = _visible_keys(layout.query_start, layout.seq_lens, qkv.shape[0])
        rows = layout.rows[sequence]
        block_size = cache.keys.shape[2]
        blocks_at_once = max(1, _KEYS_AT_ONCE // block_size)
        tokens_at_once = max(1, _MAX_GATHERED // (blocks_at_once * block_size * spec.num_kv_heads * spec.head_dim))
        width = min(block_table.shape[1], -(-layout.max_seq_len // block_size))
        for start in range(0, qkv.shape[0], tokens_at_once):
            part = slice(start, start + tokens_at_once)
            state = _Softmax(queries[part], spec)
            for first in range(0, width, blocks_at_once):
                blocks = block_table[rows[part], first : first + blocks_at_once].clamp(min=0)  # freed ones are masked
                state.add(blocks, first * block_size, visible[part], cache)
            out[part] = state.result().flatten(1)

    def gate(self, gate_up: torch.Tensor, activation: Activation, out: Rows) -> None:
        _put(gated(gate_up.float(), activation), out)

    def mix_experts(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        spec: ExpertSpec,
        activation: Activation,
        scratch: ExpertScratch,
        out: torch.Tensor,
    ) -> None:
        """Every expert computes every token, which keeps shapes fixed."""
        shares, chosen = logits.float().softmax(-1).topk(spec.top_k, dim=-1)
        if spec.renormalises:
            shares = shares / shares.sum(-1, keepdim=True)
        factors = torch.zeros(len(x), spec.num_experts, device=x.device).scatter_(1, chosen, shares)
        total = torch.zeros(out.shape, device=x.device)
        for expert in range(spec.num_experts):
            inner = scratch.gated[: len(x)]
            self.gate(_by_expert(x, spec.gate_up, expert), activation, inner)
            total += factors[:, expert, None] * _by_expert(inner, spec.down, expert).float()
        out.copy_(total)

    def group_by_adapter(self, adapters: torch.Tensor, scratch: LoraScratch) -> None:
        """This implementation does not sort."""

    def add_loras(
        self, x: torch.Tensor, adapters: torch.Tensor, spec: LoraSpec, scratch: LoraScratch, out: torch.Tensor
    ) -> None:
        """Every adapter computes every token, which keeps shapes fixed."""
        rows, rank = x.float(), torch.arange(spec.max_rank, device=x.device)
        for slot, (down, up) in enumerate(zip(spec.down, spec.up, strict=True)):
            parts = zip(down.split(spec.max_rank), up.split(spec.widths), spec.ranks[slot], strict=True)
            sums = [
                (rows @ _cut(a.float().t(), rank, most)).to(x.dtype).float() @ _cut(b.float(), rank, most).t()
                for a, b, most in parts
            ]
            changed = (out.float() + torch.cat(sums, dim=1)).to(out.dtype)
            out.copy_(torch.where((adapters == slot)[:, None], changed, out))

    def quantize(self, x: torch.Tensor, out: EightBitRows) -> None:
        _put(x, out)

    def step_inputs(
        self,
        rows: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        token_table: torch.Tensor,
        block_table: torch.Tensor,
        block_size: int,
        adapter_of_row: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        adapters: torch.Tensor,
    ) -> None:
        sequence, visible = _visible_keys(query_start, seq_lens, len(token_ids))
        token_rows, is_padding = rows[sequence], visible == 0
        torch.clamp(visible - 1, min=0, out=positions)
        token_ids.copy_(token_table[token_rows, positions].masked_fill(is_padding, 0))
        places = block_table[token_rows, positions // block_size] * block_size + positions % block_size
        slots.copy_(places.masked_fill(is_padding, PADDING_SLOT))
        adapters.copy_(adapter_of_row[token_rows].masked_fill(is_padding, NO_ADAPTER))

    def begin_drafts(
        self,
        drafted: torch.Tensor,
        lengths: LookupLengths | None,
        token_table: torch.Tensor,
        num_tokens: torch.Tensor,
        seq_lens: torch.Tensor,
        sampled_positions: torch.Tensor,
    ) -> None:
        rows, assumed, may_differ, first_sequences, first_samples, num_drafts, num_lookups = drafted
        length = torch.where(may_differ > 0, num_tokens[rows], assumed)
        places = torch.arange(len(seq_lens), dtype=torch.int32, device=drafted.device)
        if lengths is not None:
            texts, last = token_table[rows], (length - 1)[:, None].long()
            source = _look_up(texts, last, lengths)
            inside = places < num_lookups[:, None]
            tokens = texts.gather(1, torch.where(inside, source + places % (last + 1 - source), last))
            token_table[rows[:, None], torch.where(inside, last + 1 + places, last)] = tokens
        for firsts, targets in ((first_sequences, seq_lens), (first_samples, sampled_positions)):
            mine = (places >= firsts[:, None]) & (places <= (firsts + num_drafts)[:, None])
            targets -= (mine * (assumed - length)[:, None]).sum(0, dtype=torch.int32)
        num_tokens[rows] = length

    def accept_drafts(
        self,
        drafted: torch.Tensor,
        token_ids: torch.Tensor,
        token_table: torch.Tensor,
        num_tokens: torch.Tensor,
        accepted: torch.Tensor,
    ) -> None:
        rows, _, _, _, first_samples, num_drafts, _ = drafted
        places = torch.arange(len(token_ids), dtype=torch.int32, device=drafted.device)
        wanted_at = (num_tokens[rows][:, None] + places).clamp(max=token_table.shape[1] - 1)
        sampled = token_ids[(first_samples[:, None] + places).clamp(max=len(token_ids) - 1)]
        is_equal = (sampled == token_table[rows[:, None], wanted_at]) & (places < num_drafts[:, None])
        count = is_equal.int().cumprod(1).sum(1, dtype=torch.int32)
        count -= ((token_ids[first_samples + count] < 0) & (count > 0)).int()
        accepted.copy_(count)
        num_tokens[rows] += count + 1

    def put_tokens(
        self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, token_table: torch.Tensor
    ) -> None:
        token_table[rows, positions] = token_ids.clamp(min=0)


def _look_up(texts: torch.Tensor, last: torch.Tensor, lengths: LookupLengths) -> torch.Tensor:
    """The position of the first draft of each text, int64 [n, 1], as `look_up`. texts int32 [n, positions], whose last
    token is at `last` [n, 1]."""
    ends = torch.arange(texts.shape[1], device=texts.device)
    is_equal, matched = ends < last, torch.zeros_like(texts)
    for back in range(min(lengths.longest, texts.shape[1])):
        before = texts.roll(back, 1)
        is_equal = is_equal & (ends >= back) & (before == texts.gather(1, (last - back).clamp(min=0)))
        matched += is_equal
    keys = torch.where(matched >= lengths.shortest, matched * texts.shape[1] + ends, -1)
    best = keys.max(1, keepdim=True).values
    return torch.where(best < 0, last, best % texts.shape[1] + 1)


class _Softmax:
    """Attention of single queries [tokens, num_heads, head_dim] to their keys, some blocks at a time: the running
    maximum, sum and weighted values, in float32."""

    def __init__(self, queries: torch.Tensor, spec: AttendSpec) -> None:
        tokens, heads, head_dim = queries.shape
        grouped = (tokens, spec.num_kv_heads, heads // spec.num_kv_heads)
        self._spec = spec
        self._queries = (queries.float() * spec.scaling).reshape(*grouped, head_dim)
        self._values = torch.zeros_like(self._queries)
        if spec.sinks is None:
            self._peak = self._queries.new_full((*grouped, 1), float("-inf"))
            self._sum = torch.zeros_like(self._peak)
        else:
            self._peak = spec.sinks.reshape(1, *grouped[1:], 1).expand(*grouped, 1)
            self._sum = torch.ones_like(self._peak)

    def add(self, blocks: torch.Tensor, first_key: int, visible: torch.Tensor, cache: LayerCache) -> None:
        """blocks [tokens, n]: the KV blocks of keys first_key …; visible [tokens]: how many keys each token sees."""
        keys, values = _gather(cache.keys, blocks), _gather(cache.values, blocks)
        scores = self._queries @ keys.transpose(-1, -2)
        if cap := self._spec.softcap:
            scores = torch.tanh(scores / cap) * cap
        places = torch.arange(first_key, first_key + scores.shape[-1], device=scores.device)
        limits = visible[:, None, None, None]
        hidden = places >= limits
        if window := self._spec.window:
            hidden = hidden | (places < limits - window)
        scores = scores.masked_fill(hidden, float("-inf"))
        peak = torch.maximum(self._peak, scores.amax(-1, keepdim=True))
        # If nothing was visible so far, minus infinity less itself would be NaN.
        base = torch.where(peak == float("-inf"), 0.0, peak)
        weights, kept = torch.exp(scores - base), torch.exp(self._peak - base)
        self._sum = self._sum * kept + weights.sum(-1, keepdim=True)
        self._values = self._values * kept + weights @ values
        self._peak = peak

    def result(self) -> torch.Tensor:
        """[tokens, num_heads, head_dim]; zeros for a token without keys."""
        attended = torch.where(self._sum > 0, self._values / self._sum, 0.0)
        return attended.flatten(1, 2)


def _by_expert(x: torch.Tensor, projection: ExpertProjection, expert: int) -> torch.Tensor:
    bias = None if projection.bias is None else projection.bias[expert]
    return functional.linear(x, projection.weight.matrix(expert, x.dtype), bias)


def _put(x: torch.Tensor, out: Rows) -> None:
    if isinstance(out, torch.Tensor):
        out.copy_(x)
        return
    rows = eight_bit_rows(x, out.data.dtype)
    out.data.copy_(rows.data)
    out.scale.copy_(rows.scale)


def _normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    if norm is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


def _cut(matrix: torch.Tensor, rank: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """The matrix [..., ranks] with zeros beyond the rank of its adapter."""
    return torch.where(rank < most, matrix, 0.0)


def _heads(
    qkv: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of queries, keys and values, each [tokens, heads, head_dim]."""
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    queries, keys, values = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    return queries, keys, values


def _head_normed(x: torch.Tensor, norm: Norm | None, whole: bool) -> torch.Tensor:
    """x [tokens, heads, head_dim] in float32, normalised over each head or over all heads together."""
    wide = x.float()
    return _normed(wide.flatten(1), norm).view(wide.shape) if whole else _normed(wide, norm)


def _rotated(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor | None) -> torch.Tensor:
    if cos_sin is None:
        return x
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _write(cache: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> None:
    """Writes x float32 [tokens, heads, head_dim] to its slots, finite and in the cache's type.

    A padding token writes the same as the first token, to the same slot, which keeps shapes fixed. If the first token
    is padding too, it writes the content of slot 0 to slot 0.
    """
    block_size, limit = cache.shape[2], torch.finfo(cache.dtype).max
    stored = as_bytes(torch.nan_to_num(x, nan=0.0).clamp(-limit, limit).to(cache.dtype))
    memory = as_bytes(cache)
    source = torch.where(slots[:1] >= 0, stored[:1], memory[:1, :, 0])
    stored = torch.where((slots >= 0)[:, None, None], stored, source)
    slots = torch.where(slots >= 0, slots, slots[:1].clamp(min=0))
    memory[slots // block_size, :, slots % block_size] = stored


def _visible_keys(
    query_start: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of each token, and how many keys it attends to; for padding, any sequence and 0."""
    places = torch.arange(num_tokens, dtype=torch.int32, device=seq_lens.device)
    ends = query_start[1:]
    sequence = torch.searchsorted(ends, places, right=True).clamp(max=len(ends) - 1)
    visible = seq_lens[sequence] - ends[sequence] + places + 1
    return sequence, torch.where(places < ends[-1], visible, 0)


def _gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """float32 [tokens, num_kv_heads, n * block_size, head_dim]"""
    gathered = as_bytes(cache)[blocks].view(cache.dtype).float()
    return gathered.transpose(1, 2).flatten(2, 3)
