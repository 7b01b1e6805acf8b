"""The gates of MLPs and experts, by name, in plain torch: what kernels are compared with and modules recognised by.

For: the operations of a program, and the description of modules. Does not know: weights, kernels.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch.nn import functional

Activation = Literal["silu", "gelu_tanh", "swigluoai"]
"""What makes one number of a gate and an up. swigluoai: gpt-oss', with bounds, 1 more than the up, and gates and ups in
turns, the others with all gates first."""
ACTIVATIONS: Final[tuple[Activation, ...]] = ("silu", "gelu_tanh", "swigluoai")

_SWIGLU_SLOPE: Final = 1.702
_SWIGLU_LIMIT: Final = 7.0


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[…, n] of [..., 2 * n]"""
    if activation == "swigluoai":
        gate = gate_up[..., ::2].clamp(max=_SWIGLU_LIMIT)
        up = gate_up[..., 1::2].clamp(-_SWIGLU_LIMIT, _SWIGLU_LIMIT)
        return (up + 1) * gate * torch.sigmoid(_SWIGLU_SLOPE * gate)
    gate, up = gate_up.chunk(2, dim=-1)
    return up * (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh"))


def gate_up_rows(activation: Activation, n: int, part: range) -> torch.Tensor:
    """Which of the 2 * n rows of gates and ups belong to these of the n outputs, in the same order."""
    own = torch.arange(part.start, part.stop)
    if activation == "swigluoai":
        return torch.stack((2 * own, 2 * own + 1), dim=1).flatten()
    return torch.cat((own, n + own))
