"""Operations of recurrent layers, and the memory of their states: one slot per sequence and per cached prefix.

Used by the program of a decoder with such layers. Invariants: a slot contains the states of all layers contiguously, in
float32; its pages are committed when first written.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from ..kernels.library import KernelLibrary
from ..kernels.operations import ArrangeOp, ConvOp, GateNorm, GateOp, Kind, ScanOp, Type
from ..step import Int32Array
from .buffers import Buffer
from .packed_decoder import Memories, PackedDecoder
from .packed_recurrent import PackedScan, PackedShortConv

_NORM_EPS: Final = 1e-6
"""For the query and key norms inside the gated delta rule."""
_SLOT_PADDING_FLOATS: Final = 16
"""Slots a multiple of 4 KiB apart would compete for the same few sets of a cache."""


class StepStates(NamedTuple):
    """The slots of a step's states. All int32.

    slots    [rows]    of each row
    sources  [rows]    slot of the state from which it starts; -1 = zeros
    copies   [tokens]  slot in which to save the state after this token; -1 = none
    """

    slots: Int32Array
    sources: Int32Array
    copies: Int32Array


class StateMemory:
    """Slots 0..num_slots-1."""

    def __init__(self, library: KernelLibrary, decoder: PackedDecoder, num_slots: int) -> None:
        """Raises MemoryError."""
        sizes = [0 if layer.mixer is None else layer.mixer.state_floats for layer in decoder.layers]
        *self._offsets, floats = accumulate(sizes, initial=0)
        self.slot_floats = slot_floats(floats)
        self.memory = library.memory(4 * self.slot_floats * num_slots)

    def address(self, layer: int) -> int:
        """Address of a layer's state in slot 0."""
        return int(self.memory.ctypes.data) + 4 * self._offsets[layer]


def slot_floats(floats: int) -> int:
    """Padded size of a slot."""
    return -(-floats // 16) * 16 + _SLOT_PADDING_FLOATS


def mixer_operations(
    mixer: PackedShortConv | PackedScan, memories: Memories, projected: Buffer, arranged: Buffer, out: Buffer,
    state: int, slot_stride: int,
) -> Sequence[ArrangeOp | ConvOp | ScanOp | GateOp]:  # fmt: skip
    """The operations from the projections' outputs to the input of the last projection. arranged: buffer for
    projections ordered by key head."""
    if isinstance(mixer, PackedShortConv):
        return [_short_conv(mixer, memories, projected, out, state, slot_stride)]
    if not mixer.by_key_head and mixer.factors is None:
        return _scan(mixer, memories, projected, out, state, slot_stride)
    given = arranged if mixer.by_key_head else projected
    return [_arrange(mixer, memories, projected, given), *_scan(mixer, memories, given, out, state, slot_stride)]


def _arrange(mixer: PackedScan, memories: Memories, x: Buffer, out: Buffer) -> ArrangeOp:
    heads = mixer.num_key_heads, mixer.num_heads, mixer.key_dim, mixer.value_dim
    return ArrangeOp(
        kind=Kind.ARRANGE,
        columns=mixer.projected,
        x=x.address,
        order=_order_of(*heads).ctypes.data if mixer.by_key_head else None,
        factors=memories.address_if_any(mixer.factors),
        out=out.address,
        x_stride=x.stride,
        out_stride=out.stride,
    )


@cache  # kept alive: operations store its address
def _order_of(num_key_heads: int, num_heads: int, key_dim: int, value_dim: int) -> Int32Array:
    """Where q, k, v, z, b and a of all heads are in projections ordered by key head."""
    values = num_heads // num_key_heads * value_dim
    by_head = np.arange(num_key_heads * 2 * (key_dim + values), dtype=np.int32).reshape(num_key_heads, -1)
    rates = by_head.size + np.arange(2 * num_heads, dtype=np.int32).reshape(num_key_heads, -1)
    parts = [*np.split(by_head, [key_dim, 2 * key_dim, 2 * key_dim + values], axis=1), *np.split(rates, 2, axis=1)]
    return np.concatenate([part.ravel() for part in parts])


def _short_conv(
    conv: PackedShortConv, memories: Memories, x: Buffer, out: Buffer, state: int, slot_stride: int
) -> ConvOp:
    return ConvOp(
        kind=Kind.CONV,
        gated=1,
        x=x.address,
        taps=memories.address(conv.taps),
        bias=memories.address_if_any(conv.bias),
        out=out.address,
        state=state,
        slot_stride=slot_stride,
        x_stride=x.stride,
        out_stride=out.stride,
        channels=conv.taps.shape[1],
        num_taps=conv.taps.shape[0],
        out_type=out.type,
    )


def _scan(
    mixer: PackedScan, memories: Memories, projected: Buffer, out: Buffer, state: int, slot_stride: int
) -> Sequence[ConvOp | ScanOp | GateOp]:
    """Convolution, recurrence and gate, in place on the projections' outputs."""
    num_taps, channels = mixer.taps.shape
    conv = ConvOp(
        kind=Kind.CONV,
        x=projected.from_column(mixer.columns.conv).address,
        taps=memories.address(mixer.taps),
        bias=memories.address_if_any(mixer.conv_bias),
        out=projected.from_column(mixer.columns.conv).address,
        state=state,
        slot_stride=slot_stride,
        x_stride=projected.stride,
        out_stride=projected.stride,
        channels=channels,
        num_taps=num_taps,
        out_type=Type.FLOAT32,
    )
    matrices = state + 4 * (mixer.state_floats - mixer.num_heads * mixer.key_dim * mixer.value_dim)
    return conv, _recurrence(mixer, memories, projected, matrices, slot_stride), _gate(mixer, memories, projected, out)


def _recurrence(mixer: PackedScan, memories: Memories, projected: Buffer, state: int, slot_stride: int) -> ScanOp:
    return ScanOp(
        kind=Kind.SCAN,
        delta=mixer.is_delta,
        q=projected.from_column(mixer.columns.q).address,
        k=projected.from_column(mixer.columns.k).address,
        v=projected.from_column(mixer.columns.v).address,
        a=projected.from_column(mixer.columns.a).address,
        b=projected.from_column(mixer.columns.b).address if mixer.is_delta else None,
        decay=memories.address(mixer.decay),
        bias=memories.address(mixer.rate_bias),
        skip=memories.address_if_any(mixer.skip),
        state=state,
        slot_stride=slot_stride,
        stride=projected.stride,
        a_stride=projected.stride,
        b_stride=projected.stride,
        num_heads=mixer.num_heads,
        num_key_heads=mixer.num_key_heads,
        key_dim=mixer.key_dim,
        value_dim=mixer.value_dim,
        eps=_NORM_EPS,
        dt_min=mixer.rate_limits[0],
        dt_max=mixer.rate_limits[1],
        beta=mixer.beta,
    )


def _gate(mixer: PackedScan, memories: Memories, projected: Buffer, out: Buffer) -> GateOp:
    order = GateNorm.AFTER if mixer.norm_is_last else GateNorm.BEFORE
    group = mixer.inner // mixer.norm_groups
    return GateOp(
        kind=Kind.GATE,
        norm=GateNorm.NONE if mixer.norm is None else order,
        x=projected.from_column(mixer.columns.v).address,
        z=projected.from_column(mixer.columns.z).address,
        weight=None if mixer.norm is None else memories.address(mixer.norm.weight),
        out=out.address,
        x_stride=projected.stride,
        z_stride=projected.stride,
        z_group_stride=group,
        out_stride=out.stride,
        group=group,
        num_groups=mixer.norm_groups,
        out_type=out.type,
        eps=0.0 if mixer.norm is None else mixer.norm.eps,
        weight_group_stride=0 if mixer.norm is None or mixer.norm.weight.shape == (group,) else group,
    )
