"""The matrices of a layer's experts or heads, at constant strides in native memory, and the operations that multiply by
them.

Used by the native program and by the modules of mixtures of experts. Invariant: panels, scales and sums of consecutive
experts are at constant strides, which is how a WeightStore places matrices of one shape.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from .library import aligned, packed_bytes, scale_bytes, sums_bytes
from .operations import Activation, Epilogue, ExpertsOp, HeadsOp, Kind, LinearOp, Rows, Type

MAX_EXPERTS: Final = 1024
"""Per layer (native/route.h)."""
GATES: Final = {
    "silu": Epilogue.SILU_MUL, "gelu_tanh": Epilogue.GELU_MUL, "swigluoai": Epilogue.SWIGLU_OAI,
}  # fmt: skip
"""By activation of the gate."""


class ExpertMatrix(NamedTuple):
    """x·Wᵀ + bias of every expert, by the addresses of the first expert's parts."""

    panels: int
    scale: int | None
    sums: int | None
    n: int
    k: int
    type: Type
    bias: int | None
    """float32 [experts, n]"""
    order: int | None = None
    """int32 [experts, k]: column i multiplies input order[i]."""


class Steps(NamedTuple):
    """Strides in bytes between the parts of consecutive experts."""

    panels: int
    scale: int
    sums: int


def steps_of(n: int, k: int, kind: Type) -> Steps:
    return Steps(packed_bytes(n, k, kind), *(aligned(size(n, k, kind)) for size in (scale_bytes, sums_bytes)))


def steps_of_rows(rows: int, k: int, kind: Type) -> Steps:
    """Strides between matrices that are `rows` rows, whole panels, of one matrix apart."""
    return Steps(*(size(rows, k, kind) for size in (packed_bytes, scale_bytes, sums_bytes)))


class Pairs(NamedTuple):
    """Addresses of the arrays that say which expert multiplies which rows (native/step_experts.h)."""

    num_experts: int
    top_k: int
    first: int
    places: int


def heads_op(
    num_heads: int, matrix: ExpertMatrix, steps: Steps, x: tuple[int, int, int], y: tuple[int, int, int], y_type: Type
) -> HeadsOp:
    """matrix: of head 0. x, y: address, row stride and head stride; x is float32."""
    linear = LinearOp(
        kind=Kind.LINEAR, rows=Rows.TOKENS, weight=matrix.panels, scale=matrix.scale, sums=matrix.sums,
        x=x[0], y=y[0], n=matrix.n, k=matrix.k, x_stride=x[1], y_stride=y[1],
        weight_type=matrix.type, x_type=Type.FLOAT32, y_type=y_type, epilogue=Epilogue.STORE, factor=1.0,
    )  # fmt: skip
    return HeadsOp(
        kind=Kind.HEADS, num_heads=num_heads, linear=linear, weight_bytes=steps.panels, scale_bytes=steps.scale,
        sums_bytes=steps.sums, x_step=x[2], y_step=y[2],
    )  # fmt: skip


def experts_op(
    pairs: Pairs, matrix: ExpertMatrix, x: tuple[int, int], y: tuple[int, int], of_tokens: bool,
    up: ExpertMatrix | None = None, epilogue: Epilogue = Epilogue.STORE,
) -> ExpertsOp:  # fmt: skip
    """x, y: address and stride of float32 rows; of_tokens: x has a row per token, not per place. up: the second factor
    of a gated epilogue, with the same input permutation."""
    steps = steps_of(matrix.n, matrix.k, matrix.type)
    linear = LinearOp(
        kind=Kind.LINEAR, rows=Rows.TOKENS, weight=matrix.panels, scale=matrix.scale, sums=matrix.sums,
        order=matrix.order, bias=matrix.bias, x=x[0], y=y[0], n=matrix.n, k=matrix.k, x_stride=x[1], y_stride=y[1],
        weight_type=matrix.type, x_type=Type.FLOAT32, y_type=Type.FLOAT32, epilogue=epilogue, factor=1.0,
    )  # fmt: skip
    if up is not None:
        linear.weight2, linear.scale2, linear.sums2, linear.bias2 = up.panels, up.scale, up.sums, up.bias
    return ExpertsOp(
        kind=Kind.EXPERTS, num_experts=pairs.num_experts, linear=linear, first=pairs.first,
        places=pairs.places if of_tokens else None, weight_bytes=steps.panels, scale_bytes=steps.scale,
        sums_bytes=steps.sums, top_k=pairs.top_k,
    )  # fmt: skip


def gated_experts_op(
    pairs: Pairs, gate: ExpertMatrix | None, up: ExpertMatrix, x: tuple[int, int], y: tuple[int, int], activation: str
) -> ExpertsOp:
    """activation(gate) * up, or without a gate max(0, up)²; x has a row per token."""
    if gate is not None:
        return experts_op(pairs, gate, x, y, True, up, GATES[activation])
    op = experts_op(pairs, up, x, y, True)
    op.linear.activation = Activation.RELU2
    return op
