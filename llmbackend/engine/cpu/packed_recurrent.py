"""Recurrent layers of a native program as data.

Used by packed_decoder.py. Invariant: inconsistent parts raise ValueError (`check_mixer`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from ..kernels.operations import LORA_LAYERS
from .packed_parts import ArrayAt, PackedNorm, PackedProjection, check_norm, check_projection, expect

CONV_CHANNELS: Final = 64
"""A convolution's state is padded to a multiple of this many channels (native/conv.h)."""


class PackedShortConv(msgspec.Struct, frozen=True, kw_only=True, tag="short_conv"):
    """out(C * conv(B * x)), where `project` yields B, C and x, and conv is a causal convolution per channel."""

    project: PackedProjection
    """[3 * channels, width]"""
    taps: ArrayAt
    """float32 [taps, channels], the oldest token's first"""
    bias: ArrayAt | None
    out: PackedProjection

    @property
    def projects(self) -> tuple[PackedProjection, ...]:
        return (self.project,)

    @property
    def projected(self) -> int:
        """Columns before the convolution."""
        return self.project.weight.n

    @property
    def state_floats(self) -> int:
        return conv_floats(*self.taps.shape)


class ScanColumns(msgspec.Struct, frozen=True, array_like=True):
    """The columns of the concatenated projections that a recurrence reads: q, k and v, which first pass through a
    convolution, the gate z, and for each head a and, for the delta rule, b."""

    conv: int
    q: int
    k: int
    v: int
    z: int
    a: int
    b: int


class PackedScan(msgspec.Struct, frozen=True, kw_only=True, tag="scan"):
    """out(gate(z, heads(silu(conv(q, k, v)), a, b))): heads with a matrix state each (native/step_recurrent.h,
    ScanOp)."""

    is_delta: bool
    """The gated delta rule; otherwise Mamba2's recurrence."""
    projects: tuple[PackedProjection, ...]
    taps: ArrayAt
    """float32 [taps, channels], the oldest token's first; channels of q, k and v, which are contiguous"""
    conv_bias: ArrayAt | None
    columns: ScanColumns
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    decay: ArrayAt
    """float32 [num_heads], negative"""
    rate_bias: ArrayAt
    """float32 [num_heads]"""
    skip: ArrayAt | None
    """float32 [num_heads]"""
    rate_limits: tuple[float, float]
    norm: PackedNorm | None
    """Its weight covers all num_heads * value_dim channels, or is one weight shared by all groups."""
    norm_groups: int
    norm_is_last: bool
    """Whether the norm follows the gate."""
    out: PackedProjection
    by_key_head: bool = False
    """Whether the projections yield q, k, v and z, then b and a, for one key head after the other; `columns` are then
    those of q, k, v, z, b and a of all heads."""
    factors: ArrayAt | None = None
    """float32 [projected]: multiply the outputs of the projections"""
    beta: float = 1.0
    """Factor on the delta rule's sigmoid(b)."""

    @property
    def state_floats(self) -> int:
        return conv_floats(*self.taps.shape) + self.num_heads * self.key_dim * self.value_dim

    @property
    def inner(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def projected(self) -> int:
        """Columns of all projections."""
        return sum(project.weight.n for project in self.projects)


def inputs_of(mixer: PackedShortConv | PackedScan) -> tuple[tuple[PackedProjection, ...], ...]:
    """Its projections grouped by input, in program order, at most as many per group as one LoraOp has layers."""
    projects = mixer.projects
    together = (projects[first : first + LORA_LAYERS] for first in range(0, len(projects), LORA_LAYERS))
    return (*together, (mixer.out,))


def conv_floats(num_taps: int, channels: int) -> int:
    """Size of a convolution's state per sequence."""
    return (num_taps - 1) * -(-channels // CONV_CHANNELS) * CONV_CHANNELS


def check_mixer(mixer: PackedShortConv | PackedScan, width: int) -> None:
    """Raises ValueError if its parts are inconsistent with each other or with the model's width."""
    if isinstance(mixer, PackedShortConv):
        _check_short_conv(mixer, width)
    else:
        _check_scan(mixer, width)


def _check_short_conv(conv: PackedShortConv, width: int) -> None:
    channels = conv.out.weight.k
    check_projection(conv.project, 3 * channels, width)
    check_projection(conv.out, width, channels)
    _check_taps(conv.taps, conv.bias, channels)


def _check_scan(scan: PackedScan, width: int) -> None:
    heads, channels = scan.num_heads, scan.taps.shape[-1]
    for project in scan.projects:
        check_projection(project, project.weight.n, width)
    check_projection(scan.out, width, scan.inner)
    _check_taps(scan.taps, scan.conv_bias, channels)
    expect(scan.value_dim > 0 and scan.value_dim % 16 == 0 and scan.key_dim > 0, "recurrence")
    expect(scan.num_key_heads > 0 and heads > 0 and heads % scan.num_key_heads == 0, "recurrence")
    keys = scan.num_key_heads * scan.key_dim
    expect(channels == 2 * keys + scan.inner, "recurrence")
    at = scan.columns
    ends = [(at.conv, channels), (at.z, scan.inner), (at.a, heads), (at.q, keys), (at.k, keys), (at.v, scan.inner)]
    ends += [(at.b, heads)] if scan.is_delta else []
    expect(all(column >= 0 and column + count <= scan.projected for column, count in ends), "recurrence")
    vectors = (scan.decay, scan.rate_bias, *(() if scan.skip is None else (scan.skip,)))
    expect(all(each.shape == (heads,) and each.dtype == "float32" for each in vectors), "recurrence")
    factors, all_columns = scan.factors, channels + scan.inner + 2 * heads
    expect(factors is None or (factors.shape, factors.dtype) == ((scan.projected,), "float32"), "factors")
    expect(not scan.by_key_head or (scan.is_delta and scan.projected == all_columns), "recurrence")
    groups = scan.norm_groups
    expect(groups > 0 and scan.inner % (16 * groups) == 0 and scan.inner % 32 == 0, "recurrence")
    check_norm(scan.norm, (scan.inner,), (scan.inner // groups,))


def _check_taps(taps: ArrayAt, bias: ArrayAt | None, channels: int) -> None:
    fits = len(taps.shape) == 2 and taps.shape[0] > 0 and taps.shape[1] == channels > 0 and taps.dtype == "float32"
    expect(fits and channels % 32 == 0, "convolution")
    expect(bias is None or (bias.shape == (channels,) and bias.dtype == "float32"), "convolution")
