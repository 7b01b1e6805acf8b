"""The operations of the decoder program as launches of Triton kernels (kernels/), most of them one each.

Used by the program on a GPU, and by tests under Triton's interpreter. Invariants: those of `Ops`; a step without tokens
launches nothing.
"""

from __future__ import annotations

import torch
import triton

from ...step import LookupLengths
from ..kernels import drafts, experts, fused, lora
from ..kernels.paged_attention import PagedAttention
from ..weights.dense import LARGEST, EightBitRows, Rows
from ..weights.experts import Int4Experts
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
)

_MAX_EMBED_TILE = 4096
_MAX_GATE_TILE = 2048
_MAX_ROTARY_TILE = 8192
_HEADS_PER_PROGRAM = 8
_ROWS_PER_PROGRAM = 128
_TOKENS_PER_PROGRAM = 32
_DRAFTS_AT_ONCE = 16
_ALWAYS_LARGE = 1 << 20


class TritonOps:
    """Implements `Ops`. The last dimension of every tensor is contiguous."""

    def __init__(self, attention: PagedAttention | None = None, exact_products: bool = False) -> None:
        """attention: for `attend`, sized for the largest step of the model; None = `attend` is not called.
        exact_products: products of experts use the same instruction in every step."""
        self._attention = attention
        self._exact = exact_products

    def embed(self, token_ids: torch.Tensor, embedding: torch.Tensor, factor: float, residual: torch.Tensor) -> None:
        num_tokens, width = residual.shape
        if not num_tokens:
            return
        tile = min(triton.next_power_of_2(width), _MAX_EMBED_TILE)
        fused.embed_kernel[(num_tokens, triton.cdiv(width, tile))](
            token_ids, embedding, residual, factor, embedding.shape[0], width,
            embedding.stride(0), residual.stride(0), TILE=tile,
        )  # fmt: skip

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
        num_rows, width = len(residual if tokens is None else tokens), residual.shape[1]
        if not num_rows or (block is None and out is None):
            return
        padded = triton.next_power_of_2(width)
        data, scales, largest = _parts(out)
        fused.residual_norm_kernel[(num_rows,)](
            residual, block, _weight(block_norm), data, scales, _weight(norm), tokens,
            factor, _eps(block_norm), _eps(norm), width,
            residual.stride(0), 0 if block is None else block.stride(0), 0 if data is None else data.stride(0),
            WIDTH=padded, HAS_BLOCK=block is not None, HAS_BLOCK_NORM=block_norm is not None, HAS_OUT=out is not None,
            HAS_NORM=norm is not None, HAS_TOKENS=tokens is not None, LARGEST=largest, num_warps=_norm_warps(padded),
        )  # fmt: skip

    def rotary_and_write(self, qkv: torch.Tensor, layout: StepLayout, spec: RotarySpec, cache: LayerCache) -> None:
        """Rows of qkv, the caches and the table of angles are contiguous."""
        if not len(qkv):
            return
        heads = _heads_per_program(spec)
        groups = triton.cdiv(spec.num_heads, heads) + 2 * triton.cdiv(spec.num_kv_heads, heads)
        rotary_dim = 0 if spec.cos_sin is None else spec.cos_sin.shape[1]
        half_padded = triton.next_power_of_2(max(rotary_dim // 2, 1))
        rest_padded = triton.next_power_of_2(max(spec.head_dim - rotary_dim, 1))
        fused.rotary_kernel[(qkv.shape[0], groups)](
            qkv, layout.positions, layout.slots, spec.cos_sin, _weight(spec.q_norm), _weight(spec.k_norm),
            cache.keys, cache.values, qkv.stride(0), cache.keys.shape[2], _eps(spec.q_norm), _eps(spec.k_norm),
            NUM_HEADS=spec.num_heads, NUM_KV_HEADS=spec.num_kv_heads, HEAD_DIM=spec.head_dim, ROTARY_DIM=rotary_dim,
            HEADS=heads, HALF_PADDED=half_padded, REST_PADDED=rest_padded,
            VALUE_PADDED=triton.next_power_of_2(spec.head_dim), Q_NORM=spec.q_norm is not None,
            K_NORM=spec.k_norm is not None, NORM_WHOLE=spec.norm_whole, LIMIT=torch.finfo(cache.keys.dtype).max,
            num_warps=_rotary_warps(heads * spec.head_dim),
        )  # fmt: skip

    def attend(
        self,
        qkv: torch.Tensor,
        layout: StepLayout,
        block_table: torch.Tensor,
        spec: AttendSpec,
        cache: LayerCache,
        out: torch.Tensor,
    ) -> None:
        if self._attention is None:
            raise RuntimeError("these operations were made without attention")
        if len(qkv):
            self._attention.attend(qkv, layout, block_table, spec, cache, out)

    def gate(self, gate_up: torch.Tensor, activation: Activation, out: Rows) -> None:
        num_tokens, width = len(out), gate_up.shape[1] // 2
        if not num_tokens:
            return
        tile = min(triton.next_power_of_2(width), _MAX_GATE_TILE)
        if isinstance(out, EightBitRows):
            fused.gate_in_eight_bits_kernel[(num_tokens,)](
                gate_up, out.data, out.scale, width, gate_up.stride(0),
                ACTIVATION=activation, TILE=tile, LARGEST=LARGEST[out.data.dtype],
            )  # fmt: skip
            return
        fused.gate_kernel[(num_tokens, triton.cdiv(width, tile))](
            gate_up, out, width, gate_up.stride(0), out.stride(0), ACTIVATION=activation, TILE=tile
        )

    def mix_experts(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        spec: ExpertSpec,
        activation: Activation,
        scratch: ExpertScratch,
        out: torch.Tensor,
    ) -> None:
        """With exact products the tiles of every step are those of large steps."""
        if not len(x):
            return
        is_packed = isinstance(spec.down.weight, Int4Experts)
        tile = experts.choose_tile(_ALWAYS_LARGE if self._exact else len(x), x.dtype, is_packed)
        experts.mix_experts(x, logits, spec, activation, scratch, out, tile)

    def group_by_adapter(self, adapters: torch.Tensor, scratch: LoraScratch) -> None:
        lora.group_by_adapter(adapters, scratch)

    def add_loras(
        self, x: torch.Tensor, adapters: torch.Tensor, spec: LoraSpec, scratch: LoraScratch, out: torch.Tensor
    ) -> None:
        lora.add_loras(x, spec, scratch, out)

    def quantize(self, x: torch.Tensor, out: EightBitRows) -> None:
        num_rows, width = x.shape
        if not num_rows:
            return
        tile = min(triton.next_power_of_2(width), _MAX_GATE_TILE)
        fused.quantize_kernel[(num_rows,)](
            x, out.data, out.scale, width, x.stride(0), TILE=tile, LARGEST=LARGEST[out.data.dtype]
        )

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
        fused.step_inputs_kernel[(triton.cdiv(len(token_ids), _TOKENS_PER_PROGRAM),)](
            rows, query_start, seq_lens, token_table, token_table.stride(0), block_table, block_table.stride(0),
            adapter_of_row, token_ids, positions, slots, adapters, len(rows), len(token_ids),
            BLOCK_SIZE=block_size, PADDING=PADDING_SLOT, NO_ADAPTER=NO_ADAPTER,
            TOKENS=_TOKENS_PER_PROGRAM, AT_ONCE=_ROWS_PER_PROGRAM,
        )  # fmt: skip

    def begin_drafts(
        self,
        drafted: torch.Tensor,
        lengths: LookupLengths | None,
        token_table: torch.Tensor,
        num_tokens: torch.Tensor,
        seq_lens: torch.Tensor,
        sampled_positions: torch.Tensor,
    ) -> None:
        count, splits = drafted.shape[1], triton.cdiv(token_table.shape[1], drafts.SPLIT_TOKENS)
        found = torch.empty((count, splits), dtype=torch.int64, device=drafted.device)
        tables = drafted, count, num_tokens, token_table, token_table.stride(0), found
        if lengths is not None:
            drafts.look_up_kernel[(count, splits)](
                *tables, SHORTEST=lengths.shortest, LONGEST=lengths.longest, SPLIT=drafts.SPLIT_TOKENS, AT_ONCE=1024
            )
        drafts.begin_drafts_kernel[(count,)](
            *tables, splits, seq_lens, sampled_positions, SPLITS_PADDED=triton.next_power_of_2(splits),
            AT_ONCE=_DRAFTS_AT_ONCE,
        )  # fmt: skip

    def accept_drafts(
        self,
        drafted: torch.Tensor,
        token_ids: torch.Tensor,
        token_table: torch.Tensor,
        num_tokens: torch.Tensor,
        accepted: torch.Tensor,
    ) -> None:
        count = drafted.shape[1]
        drafts.accept_drafts_kernel[(count,)](
            drafted, count, num_tokens, token_table, token_table.stride(0), token_ids, accepted,
            AT_ONCE=_DRAFTS_AT_ONCE,
        )  # fmt: skip

    def put_tokens(
        self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, token_table: torch.Tensor
    ) -> None:
        if not len(rows):
            return
        fused.put_tokens_kernel[(triton.cdiv(len(rows), _ROWS_PER_PROGRAM),)](
            rows, positions, token_ids, token_table, token_table.stride(0), len(rows), AT_ONCE=_ROWS_PER_PROGRAM
        )


def _norm_warps(padded_width: int) -> int:
    """About 16 elements per thread."""
    return min(max(padded_width // 512, 1), 16)


def _rotary_warps(num_elements: int) -> int:
    return 1 if num_elements <= 512 else 4 if num_elements <= _MAX_ROTARY_TILE else 8


def _heads_per_program(spec: RotarySpec) -> int:
    """All heads if a norm spans them, because queries are changed in place."""
    whole = spec.norm_whole and (spec.q_norm is not None or spec.k_norm is not None)
    wanted = max(spec.num_heads, spec.num_kv_heads) if whole else min(spec.num_heads, _HEADS_PER_PROGRAM)
    return int(triton.next_power_of_2(wanted))


def _parts(out: Rows | None) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
    """Numbers, scales, and the largest number; unless numbers have 8 bits, the latter are None and 0."""
    if isinstance(out, EightBitRows):
        return out.data, out.scale, LARGEST[out.data.dtype]
    return out, None, 0.0


def _weight(norm: Norm | None) -> torch.Tensor | None:
    return None if norm is None else norm.weight


def _eps(norm: Norm | None) -> float:
    return 0.0 if norm is None else norm.eps
