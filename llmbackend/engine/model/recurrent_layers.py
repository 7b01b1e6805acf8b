"""What recurrent layers compute in place of attention, read off their transformers modules.

Used by hybrid_description.py; same invariant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from ..cpu.packed_recurrent import ScanColumns, conv_floats
from ..errors import ProgramUnsupportedError
from ..gpu.ops.ops import Norm
from .projections import Projection, children_of, projection_of


@dataclass(frozen=True, slots=True)
class ShortConv:
    """out(C * conv(B * x)), where `project` yields B, C and x."""

    project: Projection
    taps: torch.Tensor
    """float32 [taps, channels], the oldest token's first"""
    bias: torch.Tensor | None
    """float32 [channels]"""
    out: Projection

    @property
    def state_floats(self) -> int:
        return conv_floats(*self.taps.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """See PackedScan in cpu/packed_recurrent.py."""

    is_delta: bool
    projects: tuple[Projection, ...]
    taps: torch.Tensor
    conv_bias: torch.Tensor | None
    columns: ScanColumns
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    decay: torch.Tensor
    rate_bias: torch.Tensor
    skip: torch.Tensor | None
    rate_limits: tuple[float, float]
    norm: Norm | None
    norm_groups: int
    norm_is_last: bool
    out: Projection
    by_key_head: bool = False
    factors: torch.Tensor | None = None
    beta: float = 1.0

    @property
    def state_floats(self) -> int:
        return conv_floats(*self.taps.shape) + self.num_heads * self.key_dim * self.value_dim


_DELTA_INPUTS: Final = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_BY_KEY_HEAD: Final = ("in_proj_qkvz", "in_proj_ba")
_APART: Final = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")


def short_conv_of(module: Any) -> ShortConv:
    """LFM2's."""
    taps, bias = _taps(module.conv)
    return ShortConv(projection_of(module.in_proj), taps, bias, projection_of(module.out_proj))


def delta_net_of(module: Any) -> Scan:
    """The gated delta net of Qwen3.5 and, with other projections, Qwen3-Next and OLMo Hybrid."""
    _expect_silu(module)
    taps, bias = _taps(module.conv1d)
    names = next(names for names in (_BY_KEY_HEAD, _APART, _DELTA_INPUTS) if hasattr(module, names[0]))
    projects = tuple(projection_of(getattr(module, name)) for name in names)
    keys, heads = int(module.key_dim), int(module.num_v_heads)
    z = taps.shape[1]
    b = z + heads * int(module.head_v_dim)
    norm, is_last = _gated_norm(module.o_norm if names is _APART else module.norm)
    return Scan(
        is_delta=True,
        projects=projects,
        taps=taps,
        conv_bias=bias,
        columns=ScanColumns(conv=0, q=0, k=keys, v=2 * keys, z=z, b=b, a=b + heads),
        num_heads=heads,
        num_key_heads=int(module.num_k_heads),
        key_dim=int(module.head_k_dim),
        value_dim=int(module.head_v_dim),
        decay=-module.A_log.detach().float().exp(),
        rate_bias=module.dt_bias.detach().float(),
        skip=None,
        rate_limits=(0.0, float("inf")),
        norm=norm,
        norm_groups=heads,
        norm_is_last=is_last,
        out=projection_of(module.o_proj if names is _APART else module.out_proj),
        by_key_head=names is _BY_KEY_HEAD,
        beta=2.0 if getattr(module, "allow_neg_eigval", False) else 1.0,
    )


def mamba_of(module: Any) -> Scan:
    """Mamba2's. Falcon-H1's may lack a norm, and has factors."""
    _expect_silu(module)
    taps, bias = _taps(module.conv1d)
    inner, heads, groups = int(module.intermediate_size), int(module.num_heads), int(module.n_groups)
    keys = groups * int(module.ssm_state_size)
    norm, is_last = (None, False) if isinstance(module.norm, nn.Identity) else _gated_norm(module.norm, groups)
    low, high = module.time_step_limit or (0.0, float("inf"))
    project, factors = _factored(module)
    return Scan(
        is_delta=False,
        projects=(project,),
        taps=taps,
        conv_bias=bias,
        columns=ScanColumns(conv=inner, q=2 * inner + keys, k=2 * inner, v=inner, z=0, a=2 * (inner + keys), b=0),
        num_heads=heads,
        num_key_heads=groups,
        key_dim=int(module.ssm_state_size),
        value_dim=int(module.head_dim),
        decay=-module.A_log.detach().float().exp(),
        rate_bias=module.dt_bias.detach().float(),
        skip=module.D.detach().float(),
        rate_limits=(float(low), float(high)),
        norm=norm,
        norm_groups=groups,
        norm_is_last=is_last,
        out=projection_of(module.out_proj),
        factors=factors,
    )


def _factored(module: Any) -> tuple[Projection, torch.Tensor | None]:
    """The projection, and the factors on its outputs. (factor * x)·Wᵀ + bias = factor * (x·Wᵀ + bias / factor)."""
    project, of_columns = projection_of(module.in_proj), getattr(module, "mup_vector", None)
    if of_columns is None:
        return project, None
    of_input = float(module.ssm_in_multiplier)
    bias = None if project.bias is None else project.bias / of_input
    return replace(project, bias=bias), of_columns.detach().float().flatten() * of_input


_PARTS: Final[tuple[tuple[Callable[[Any], ShortConv | Scan], set[str]], ...]] = (
    (short_conv_of, {"in_proj", "conv", "out_proj"}),
    (delta_net_of, {"conv1d", "norm", "out_proj", *_DELTA_INPUTS}),
    (delta_net_of, {"conv1d", "norm", "out_proj", *_BY_KEY_HEAD}),
    (delta_net_of, {"conv1d", "o_norm", "o_proj", *_APART}),
    (mamba_of, {"conv1d", "norm", "out_proj", "in_proj"}),
)
"""The parts of the modules that each function reads."""


def reader_of(module: nn.Module) -> Callable[[Any], ShortConv | Scan]:
    """The function that reads a module with these parts."""
    found = children_of(module) - {"act"}
    for reader, parts in _PARTS:
        if found == parts:
            return reader
    raise ProgramUnsupportedError(f"{type(module).__name__} consists of {', '.join(sorted(found))}")


def _taps(conv: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """float32 [taps, channels] and [channels], from a causal depthwise convolution."""
    if type(conv) is not nn.Conv1d or conv.groups != conv.in_channels or conv.in_channels != conv.out_channels:
        raise ProgramUnsupportedError(f"{type(conv).__name__} mixes channels")
    bias = None if conv.bias is None else conv.bias.detach().float()
    return conv.weight.detach()[:, 0].t().float().contiguous(), bias


def _expect_silu(module: Any) -> None:
    if (name := getattr(module, "activation", None)) not in ("silu", "swish"):
        raise ProgramUnsupportedError(f"{type(module).__name__} has the unsupported activation {name}")


def _gated_norm(module: Any, groups: int = 1) -> tuple[Norm, bool]:
    """A gated RMS norm of each group of x, and whether it follows the gate, recognised by its output."""
    weight, eps = module.weight.detach().float(), float(module.variance_epsilon)
    x = torch.linspace(-2, 3, len(weight))[None]
    gates = functional.silu(x.flip(-1).cos())
    given = module(x, x.flip(-1).cos()).float()

    def norm(values: torch.Tensor) -> torch.Tensor:
        of_groups = functional.rms_norm(values.view(groups, -1), [len(weight) // groups], None, eps)
        normal: torch.Tensor = of_groups.view(1, -1) * weight
        return normal

    before, after = norm(x) * gates, norm(x * gates)
    for is_last, expected in ((False, before), (True, after)):
        if torch.allclose(given, expected, rtol=1e-2, atol=1e-3):
            return Norm(weight.contiguous(), eps), is_last
    raise ProgramUnsupportedError(f"{type(module).__name__} is not an RMS norm with a silu gate")
