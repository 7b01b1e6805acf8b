"""The gated activation between an MLP's two products.

For: triton_ops.py. Does not know: models. Invariants: computed in float32 and rounded once; a token's numbers do not
depend on how many tokens there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MAX_TILE = 2048


def gate(gate_up: torch.Tensor, gelu: bool, out: torch.Tensor) -> None:
    """out [T, n] = silu(gates) * ups, or gelu (with tanh); gate_up [T, 2 * n], gates first; rows contiguous."""
    num_tokens, width = out.shape
    tile = min(triton.next_power_of_2(width), _MAX_TILE)
    gate_kernel[(num_tokens, triton.cdiv(width, tile))](
        gate_up, out, width, gate_up.stride(0), out.stride(0), GELU=gelu, TILE=tile
    )


@triton.jit
def gate_kernel(gate_up, out, width, gate_up_stride, out_stride, GELU: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < width
    gates = gate_up + token * gate_up_stride + columns
    x = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + width, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # (1 + tanh(u)) / 2 is the logistic function of 2 u.
        slope = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    else:
        slope = x
    # The exponent's bound changes no float32 result but that of infinities, which would become NaN.
    active = x / (1.0 + tl.exp(tl.minimum(-slope, 88.0)))
    tl.store(out + token * out_stride + columns, (active * up).to(out.dtype.element_ty), mask=inside)
