"""The operations that a decoder program needs from an accelerator, and the gates of MLPs and experts.

The program (program.py) calls them layer by layer. Implementations: triton_ops.py (kernels), torch_ops.py (plain torch:
the reference, the ablation "fused kernels off", and devices without Triton). Invariants: an operation allocates nothing
that outlives it, never waits for the device and reads no device value on the host, so it can be captured in a CUDA
graph; the result of a row depends only on that row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import torch
from torch.nn import functional

from ...errors import ProgramUnsupportedError
from ...step import LookupLengths
from ..weights.dense import EightBitRows, Rows
from ..weights.experts import ExpertProjection

Activation = Literal["silu", "gelu_tanh", "swigluoai"]
"""Combines gate and up projections. swigluoai: gpt-oss's, with bounds, up + 1, and alternating gates and ups; with the
others, all gates come first."""
ACTIVATIONS: Final[tuple[Activation, ...]] = ("silu", "gelu_tanh", "swigluoai")

_SWIGLU_SLOPE: Final = 1.702
_SWIGLU_LIMIT: Final = 7.0


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[..., n] from [..., 2 * n]."""
    if activation == "swigluoai":
        gate = gate_up[..., ::2].clamp(max=_SWIGLU_LIMIT)
        up = gate_up[..., 1::2].clamp(-_SWIGLU_LIMIT, _SWIGLU_LIMIT)
        return (up + 1) * gate * torch.sigmoid(_SWIGLU_SLOPE * gate)
    gate, up = gate_up.chunk(2, dim=-1)
    return up * (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh"))


def gate_up_rows(activation: Activation, n: int, part: range) -> torch.Tensor:
    """Indices of the rows, among 2 * n gates and ups, that belong to this part of the n outputs, in the same order."""
    own = torch.arange(part.start, part.stop)
    if activation == "swigluoai":
        return torch.stack((2 * own, 2 * own + 1), dim=1).flatten()
    return torch.cat((own, n + own))


NO_ADAPTER = -1
"""The slot of a token without a LoRA adapter."""

PADDING_SLOT = -1
"""The slot of a padding token, whose key and value are not written."""


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The ragged batch of one step, as device tensors of int32.

    Padding sequences have at most one token, seq_len 0 and row 0, and come last. Tokens after those of all sequences
    are padding too. Padding tokens have slot PADDING_SLOT; their results are not used."""

    rows: torch.Tensor
    """[n]: each sequence's row in the row table."""
    query_start: torch.Tensor
    """[n + 1]: where each sequence's tokens begin in the flat batch."""
    seq_lens: torch.Tensor
    """[n]: keys that the last token of the sequence attends to, its own included."""
    token_ids: torch.Tensor
    """[tokens]"""
    positions: torch.Tensor
    """[tokens]"""
    slots: torch.Tensor
    """[tokens]: where each token's key and value are stored (block * block_size + offset)."""
    sampled_tokens: torch.Tensor
    """[samples]: indices in the batch of the tokens after which a token is sampled."""
    max_query_len: int
    """An upper bound known to the host. A captured graph has its own, so results must not depend on it."""
    max_seq_len: int
    """As max_query_len."""
    adapters: torch.Tensor | None = None
    """[tokens]: each token's LoRA slot, NO_ADAPTER for none; None = no token has an adapter."""
    other_groups: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    """For each group of layers after the first: slots [tokens], and block table [max_num_seqs, max_blocks_per_seq]."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """KV memory of one layer: keys, values [num_blocks, num_kv_heads, block_size, head_dim], in the model's dtype or
    float8_e4m3fn. Stored values are finite: NaN becomes 0, infinities the largest number, so that leftovers of a broken
    request cannot become NaN in another's output."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """x / sqrt(mean(x²) + eps) * weight, computed in float32. If centred, x - mean(x) takes the place of x and the bias
    is added; no operation here supports this."""

    weight: torch.Tensor
    """float32 [width]"""
    eps: float
    bias: torch.Tensor | None = None
    """float32 [width]"""
    centred: bool = False


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """The processing of one layer's queries and keys before attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Norm | None
    """Weight [head_dim], over each head, or with norm_whole [num_heads * head_dim], over all heads; None = no norm."""
    k_norm: Norm | None
    """As q_norm, for the KV heads."""
    norm_whole: bool
    cos_sin: torch.Tensor | None
    """float32 [max_model_len, rotary_dim]: cosines of the first half, then sines, applied to halves of the first
    rotary_dim of a head; None = no rotation."""


@dataclass(frozen=True, slots=True)
class AttendSpec:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    window: int
    """A query attends to this many positions, its own included; 0 = all."""
    softcap: float
    """Scores become softcap * tanh(score / softcap); 0 = off."""
    sinks: torch.Tensor | None
    """float32 [num_heads]: an extra score per head that has no value; None = none."""


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """The experts of one layer; each token selects some by its router logits."""

    gate_up: ExpertProjection
    """Matrices [2 * n, width], gates and ups in the order that the activation expects."""
    down: ExpertProjection
    """Matrices [width, n]"""
    top_k: int
    """Experts per token: those with the largest logits, each with its share of the softmax over all experts."""
    renormalises: bool
    """Whether a token's shares are divided by their sum."""

    @property
    def num_experts(self) -> int:
        return self.down.weight.num_experts


MIN_EXPERT_ROWS = 16
"""Minimum rows of a tile of (token, expert) pairs; ExpertScratch is sized for it."""
_MAX_EXPERT_ROWS = 128


@dataclass(frozen=True, slots=True)
class ExpertScratch:
    """Scratch memory for the experts of the largest step; contents are meaningless between calls. P: number of (token,
    expert) pairs."""

    chosen: torch.Tensor
    """int32 [P]"""
    factors: torch.Tensor
    """float32 [P]"""
    counts: torch.Tensor
    """int32 [experts]"""
    pairs: torch.Tensor
    """int32 [P + experts * maximum rows of a tile]"""
    tile_experts: torch.Tensor
    """int32 [P / MIN_EXPERT_ROWS + experts]"""
    num_tiles: torch.Tensor
    """int32 [1]"""
    gate_up: torch.Tensor
    """[P, 2 * n], in the model's dtype"""
    gated: torch.Tensor
    """[P, n]"""
    mixed: torch.Tensor
    """[P, width]"""

    @classmethod
    def of(
        cls, num_tokens: int, specs: Sequence[ExpertSpec], dtype: torch.dtype, device: torch.device
    ) -> ExpertScratch:
        """For steps of num_tokens in this dtype, and layers with these experts, all of the same sizes."""
        spec = specs[0]
        if len({(each.num_experts, each.down.weight.n, each.down.weight.k, each.top_k) for each in specs}) > 1:
            raise ProgramUnsupportedError("its layers have experts of several sizes")
        pairs, width, n = num_tokens * spec.top_k, spec.down.weight.n, spec.down.weight.k

        def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            chosen=scratch(pairs),
            factors=scratch(pairs, dtype=torch.float32),
            counts=scratch(spec.num_experts),
            pairs=scratch(pairs + spec.num_experts * _MAX_EXPERT_ROWS),
            tile_experts=scratch(pairs // MIN_EXPERT_ROWS + spec.num_experts),
            num_tiles=scratch(1),
            gate_up=scratch(pairs, 2 * n, dtype=dtype),
            gated=scratch(pairs, n, dtype=dtype),
            mixed=scratch(pairs, width, dtype=dtype),
        )


@dataclass(frozen=True, slots=True, eq=False)
class LoraSpec:
    """The LoRA matrices of one product, for all adapter slots. A product that consists of several layers of the model
    has a part for each of them."""

    down: torch.Tensor
    """[slots, parts * max_rank, k], in the model's dtype, contiguous; max_rank is a power of two from 16."""
    up: torch.Tensor
    """[slots, n, max_rank], premultiplied by the adapter's scale"""
    ranks: torch.Tensor
    """int32 [slots, parts]: rank of each adapter, beyond which nothing is read; 0 = it does not change that part."""
    widths: tuple[int, ...]
    """Output columns of each part, one to three."""

    @property
    def max_rank(self) -> int:
        return self.up.shape[2]


LORA_ROWS = 16
"""Tokens of one adapter that are multiplied together: the minimum of a tensor core."""
LORA_SPLITS = 8
"""Maximum number of parts into which the sum over an input's columns is split, the same in every step."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraScratch:
    """Memory for the tokens of the largest step, sorted by adapter, in tiles of LORA_ROWS places."""

    counts: torch.Tensor
    """int32 [slots]: tokens of each adapter."""
    tokens: torch.Tensor
    """int32 [places]: the token at each place of a tile, -1 = none."""
    tile_slots: torch.Tensor
    """int32 [tiles]"""
    num_tiles: torch.Tensor
    """int32 [1]: tiles of the step."""
    hidden: torch.Tensor
    """float32 [LORA_SPLITS, places, most parts * max_rank]: sums of each split."""

    @classmethod
    def of(cls, num_tokens: int, specs: Sequence[LoraSpec]) -> LoraScratch:
        """For steps of num_tokens and these products; at least one."""
        num_slots, device = len(specs[0].ranks), specs[0].ranks.device
        tiles = num_tokens // LORA_ROWS + num_slots

        def numbers(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        width = max(spec.down.shape[1] for spec in specs)
        hidden = torch.zeros((LORA_SPLITS, tiles * LORA_ROWS, width), device=device)
        return cls(numbers(num_slots), numbers(tiles * LORA_ROWS), numbers(tiles), numbers(1), hidden)


class Ops(Protocol):
    """T: tokens of the step, padding included. Activations are in the model's dtype, or in 8 bits for an 8-bit weight,
    rounded from float32 in either case; the residual stream is float32."""

    def embed(self, token_ids: torch.Tensor, embedding: torch.Tensor, factor: float, residual: torch.Tensor) -> None:
        """residual[t] = embedding[token_ids[t]] * factor. embedding [vocab, width]; residual float32 [T, width]."""

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
        """residual += factor * block_norm(block), if there is a block [T, width]; then out[t] = norm(residual[t]), or
        residual[t] where norm is None, in the form of out, if there is one. tokens int32 [samples]: out has rows for
        these tokens only; then block is None and the residual is not changed."""

    def rotary_and_write(self, qkv: torch.Tensor, layout: StepLayout, spec: RotarySpec, cache: LayerCache) -> None:
        """qkv [T, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys and values side by side. Normalises and
        rotates queries in place; normalises and rotates keys and writes them and the values to the slot of each token
        (block * block_size + offset)."""

    def attend(
        self,
        qkv: torch.Tensor,
        layout: StepLayout,
        block_table: torch.Tensor,
        spec: AttendSpec,
        cache: LayerCache,
        out: torch.Tensor,
    ) -> None:
        """Causal attention of the queries of each sequence (the first num_heads * head_dim columns of qkv) to the keys
        and values in its blocks. block_table int32 [max_num_seqs, max_blocks_per_seq], indexed by layout.rows. The
        query at offset i of n sees keys 0 … seq_len - n + i. out [T, num_heads * head_dim]: zeros for the token of a
        padding sequence, undefined for a token of no sequence."""

    def gate(self, gate_up: torch.Tensor, activation: Activation, out: Rows) -> None:
        """out [T, n] = gated(gate_up [T, 2 * n])"""

    def mix_experts(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        spec: ExpertSpec,
        activation: Activation,
        scratch: ExpertScratch,
        out: torch.Tensor,
    ) -> None:
        """out [T, width] = the sum, over the experts that logits [T, experts] choose, of share *
        down(gate(gate_up(x))). x and out are contiguous."""

    def group_by_adapter(self, adapters: torch.Tensor, scratch: LoraScratch) -> None:
        """Sorts the tokens of a step for `add_loras`. adapters as in StepLayout, at least one token."""

    def add_loras(
        self, x: torch.Tensor, adapters: torch.Tensor, spec: LoraSpec, scratch: LoraScratch, out: torch.Tensor
    ) -> None:
        """out[t] += up[slot] · (down[slot] · x[t]) for each token with an adapter, each part of out [T, n] by its own
        rows of down. x [T, k] and out are contiguous, in the model's dtype; adapters: those passed to
        `group_by_adapter` last."""

    def quantize(self, x: torch.Tensor, out: EightBitRows) -> None:
        """out = x [T, k], each row with its own scale."""

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
        """Writes token_ids, positions, slots and adapters [T] of a step from its sequences (as in StepLayout), whose
        last tokens it computes, and the tables (as in RowTable; adapter_of_row [max_num_seqs]). All int32. Padding is
        token 0 at position 0 with PADDING_SLOT and NO_ADAPTER."""

    def begin_drafts(
        self,
        drafted: torch.Tensor,
        lengths: LookupLengths | None,
        token_table: torch.Tensor,
        num_tokens: torch.Tensor,
        seq_lens: torch.Tensor,
        sampled_positions: torch.Tensor,
    ) -> None:
        """Before a step with drafts (`drafted_rows`): moves its sequences and samples to the real ends of their rows,
        writes those to num_tokens [max_num_seqs], and looks up the requested drafts. All int32. lengths: None: nothing
        is ever looked up."""

    def accept_drafts(
        self,
        drafted: torch.Tensor,
        token_ids: torch.Tensor,
        token_table: torch.Tensor,
        num_tokens: torch.Tensor,
        accepted: torch.Tensor,
    ) -> None:
        """After such a step: accepted[i] = how many of the first drafts of a row, in the table, are equal to its
        samples in token_ids [samples], not counting a last one that is followed by NO_TOKEN; num_tokens grows by these
        and the token after them. All int32."""

    def put_tokens(
        self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, token_table: torch.Tensor
    ) -> None:
        """token_table[rows[i], positions[i]] = max(token_ids[i], 0), all int32. NO_TOKEN of a broken row is stored as
        token 0, since the next step may read it before the host knows."""
