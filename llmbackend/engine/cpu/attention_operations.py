"""The operations between a layer's projections: rotary embedding, the write of keys and values, attention and its gate.

Used by cpu/decoder_program.py.
"""

from __future__ import annotations

from ..kernels.operations import AttentionOp, GateFunction, GateNorm, GateOp, Kind, RotaryOp
from .buffers import Buffer
from .native_memory import NativeLayerCache
from .packed_decoder import Memories, PackedAttention


def rotary_op(
    attention: PackedAttention, cache: NativeLayerCache, qkv: Buffer, memories: Memories, turned: Buffer | None = None,
    turned_step: int = 0,
) -> RotaryOp:  # fmt: skip
    """qkv: queries, keys and values, concatenated. turned: destination of rotated queries, turned_step columns from
    head to head; None = in place."""
    keys = qkv.from_column(attention.num_heads * cache.head_dim * (1 + attention.is_gated))
    q_norm, k_norm = attention.q_norm, attention.k_norm
    return RotaryOp(
        kind=Kind.ROTARY,
        kv_type=cache.type,
        q=qkv.address,
        k=keys.address,
        v=keys.from_column(cache.num_kv_heads * cache.head_dim).address,
        keys=cache.keys,
        values=cache.values,
        cos_sin=memories.address_if_any(attention.cos_sin),
        q_cos_sin=memories.address_if_any(attention.q_cos_sin),
        q_norm=memories.address_if_any(q_norm.weight if q_norm else None),
        k_norm=memories.address_if_any(k_norm.weight if k_norm else None),
        stride=qkv.stride,
        num_heads=attention.num_heads,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
        rotary_dim=0 if attention.cos_sin is None else attention.cos_sin.shape[1],
        block_size=cache.block_size,
        norm_whole=attention.norm_whole,
        eps=q_norm.eps if q_norm else 0.0,
        pairs=attention.pairs,
        norm_last=attention.norm_last,
        q_gap=cache.head_dim * attention.is_gated,
        turned=None if turned is None else turned.address,
        turned_stride=0 if turned is None else turned.stride,
        turned_step=turned_step,
    )


def attention_op(
    attention: PackedAttention, cache: NativeLayerCache, qkv: Buffer, out: Buffer, memories: Memories
) -> AttentionOp:
    return AttentionOp(
        kind=Kind.ATTENTION,
        kv_type=cache.type,
        q=qkv.address,
        keys=cache.keys,
        values=cache.values,
        sinks=memories.address_if_any(attention.sinks),
        out=out.address,
        q_stride=qkv.stride,
        out_stride=out.stride,
        num_heads=attention.num_heads,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
        block_size=cache.block_size,
        window=attention.sliding_window,
        out_type=out.type,
        scaling=attention.scaling,
        softcap=attention.softcap,
        q_gap=cache.head_dim * attention.is_gated,
        value_dim=cache.head_dim if attention.latent is None else attention.latent.rank,
    )


def attention_gate(attention: PackedAttention, x: Buffer, qkv: Buffer, out: Buffer) -> GateOp:
    """x times its gates, one per number or one per head, which follow each head's queries or all heads' values."""
    head_dim, gate = attention.head_dim, attention.gate
    per_head = gate is not None and gate.weight.n == attention.num_heads
    column = head_dim if gate is None else attention.projected - gate.weight.n
    return GateOp(
        kind=Kind.GATE,
        norm=GateNorm.NONE,
        x=x.address,
        z=qkv.from_column(column).address,
        out=out.address,
        x_stride=x.stride,
        z_stride=qkv.stride,
        z_group_stride=2 * head_dim if gate is None else 1 if per_head else head_dim,
        out_stride=out.stride,
        group=head_dim,
        num_groups=attention.num_heads,
        out_type=out.type,
        function=GateFunction[attention.gate_function.upper()],
        one_per_group=per_head,
    )
