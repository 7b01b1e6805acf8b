"""The elements of a native program as data: arrays and matrices by their locations in one of two memories, and norms
and projections made of them.

Used by packed_decoder.py and packed_recurrent.py, which describe layers with them. Invariant: inconsistent parts raise
ValueError in the checks here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from ..kernels.library import BLOCKS, FOUR_BITS, PANEL, packed_bytes, scale_bytes, sums_bytes
from ..kernels.operations import LORA_LAYERS, Type

Bytes = npt.NDArray[np.uint8]
Dtype = Literal[
    "float32", "bfloat16", "int8", "int4", "int4_min", "int4_zero", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k",
    "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4",
]  # fmt: skip

TYPE_OF: Final[dict[Dtype, Type]] = {name: Type[name.upper()] for name in get_args(Dtype)}
ITEM_BYTES: Final[dict[Dtype, int]] = {"float32": 4, "bfloat16": 2, "int8": 1}


class ArrayAt(msgspec.Struct, frozen=True, array_like=True):
    """A row-major array in one of the memories."""

    memory: Literal["resident", "mapped"]
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: Dtype = "float32"

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class MatrixAt(msgspec.Struct, frozen=True, array_like=True):
    """A matrix [n, k] in panels (native/step.h, LinearOp), in resident memory."""

    offset_bytes: int
    n: int
    k: int
    dtype: Dtype
    scale_offset_bytes: int | None = None
    """Of its scales, if any (kernels.library.scale_bytes)."""
    sums_offset_bytes: int | None = None
    """Of its sums, minima or zero points, if any (kernels.library.sums_bytes)."""
    order_offset_bytes: int | None = None
    """Of its input permutation, int32 [k], if any."""

    @property
    def size_bytes(self) -> int:
        return packed_bytes(self.n, self.k, TYPE_OF[self.dtype])

    @property
    def parts(self) -> tuple[tuple[int | None, int], ...]:
        """Offset and size in bytes of panels, scales and sums."""
        shape = (self.n, self.k, TYPE_OF[self.dtype])
        return (
            (self.offset_bytes, self.size_bytes),
            (self.scale_offset_bytes, scale_bytes(*shape)),
            (self.sums_offset_bytes, sums_bytes(*shape)),
        )

    def moved(self, steps: Sequence[int], count: int) -> MatrixAt:
        """The matrix `count` steps further on. steps: strides in bytes of panels, scales and sums."""
        offsets = (self.offset_bytes, self.scale_offset_bytes, self.sums_offset_bytes)
        panels, scale, sums = (
            None if offset is None else offset + count * step for offset, step in zip(offsets, steps, strict=True)
        )
        return msgspec.structs.replace(self, offset_bytes=panels, scale_offset_bytes=scale, sums_offset_bytes=sums)


class PackedNorm(msgspec.Struct, frozen=True):
    """x / rms(x) * weight, or centred, (x - mean(x)) / rms(x - mean(x)) * weight + bias"""

    weight: ArrayAt
    eps: float
    bias: ArrayAt | None = None
    centred: bool = False


class PackedPart(msgspec.Struct, frozen=True, array_like=True):
    """Outputs of one of the model's linear layers that LoRA adapters may change."""

    layer: str
    """Its name in the model."""
    first: int
    """Index among the layer's outputs."""
    n: int


class PackedProjection(msgspec.Struct, frozen=True):
    """x·Wᵀ + bias"""

    weight: MatrixAt
    bias: ArrayAt | None
    parts: tuple[PackedPart, ...] = ()
    """The layers it consists of; empty = no adapter changes it."""


def expect(is_right: bool, part: str) -> None:
    if not is_right:
        raise ValueError(f"the description of a packed model is broken: its {part} does not fit the rest")


def check_norm(norm: PackedNorm | None, *shapes: tuple[int, ...]) -> None:
    for array in () if norm is None else (norm.weight, norm.bias):
        expect(array is None or (array.shape in shapes and array.dtype == "float32"), "norm")


def check_projection(projection: PackedProjection, n: int, k: int) -> None:
    weight, bias = projection.weight, projection.bias
    expect(n > 0 and k > 0 and (weight.n, weight.k) == (n, k), "projection")
    blocks = BLOCKS.get(TYPE_OF[weight.dtype])
    expect(blocks is None or k % blocks.k == 0, "projection")
    expect(all((offset is not None) == (size > 0) for offset, size in weight.parts), "projection")
    expect(weight.order_offset_bytes is None or TYPE_OF[weight.dtype] in FOUR_BITS, "order of inputs")
    expect(bias is None or (bias.shape == (n,) and bias.dtype == "float32"), "bias")
    parts = projection.parts
    expect(len(parts) <= LORA_LAYERS and (not parts or sum(part.n for part in parts) == n), "layers")
    expect(all(part.n > 0 for part in parts) and all(part.n % PANEL == 0 for part in parts[:-1]), "layers")
