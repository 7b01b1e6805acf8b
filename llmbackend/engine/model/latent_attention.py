"""Multi-head latent attention (MLA), read off its transformers modules, for the CPU's program.

Used by the loader and decoder_description.py. The absorbed form: a rotary part and a latent are cached per token, and
heads attend to both. Queries are multiplied by the matrix that yields a head's keys in the modules, and weighted
latents by the one that yields its values. Invariant: anything not recognised raises ProgramUnsupportedError.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from ..attention.interface import LayerShape
from ..cpu.linear import HeadedLinear, HeadRows
from ..errors import ProgramUnsupportedError
from ..gpu.ops.ops import Norm
from ..kernels.weights import PackedWeight
from .projections import DivisibleWeight, Projection, expect_children, projection_of
from .recognition import norm_of
from .rotation import Rotation, Rotations

_KEPT, _EXPANDED = "kv_a_proj_with_mqa", "kv_b_proj"
_SIZES: Final = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_heads")
_MULTIPLE: Final = 32


@dataclass(frozen=True, slots=True)
class Latent:
    """The source of the parts in cpu/packed_latent.py."""

    q_down: Projection | None
    q_norm: Norm | None
    q: Projection
    norm: Norm
    up: PackedWeight
    down: PackedWeight
    rotary_dim: int

    @property
    def shape(self) -> LayerShape:
        """Shape of keys, whose last part is the value."""
        return LayerShape(1, self.rotary_dim + self.up.n, 0)


@dataclass(frozen=True, slots=True)
class LatentParts:
    """The latent projections of a layer's attention."""

    kept: Projection
    """[latent | rotary part]"""
    out: Projection
    rotation: Rotation
    latent: Latent


def is_latent(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in (_KEPT, _EXPANDED, *_SIZES))


def headed_linears(model: nn.Module) -> dict[str, HeadRows]:
    """The layers that compute keys and values of heads from latents, by name."""
    return dict(_headed(model))


def _headed(model: nn.Module) -> Iterator[tuple[str, HeadRows]]:
    for name, module in model.named_modules():
        if is_latent(module) and type(getattr(module, _EXPANDED)) is nn.Linear:
            heads = HeadRows(int(module.qk_nope_head_dim), int(module.v_head_dim))
            if module.kv_b_proj.weight.shape[0] == sum(heads) * int(module.num_heads):
                yield f"{name}.{_EXPANDED}", heads


def latent_parts(index: int, module: Any, rotations: Rotations) -> LatentParts:
    rank, rest, rotary_dim, value_dim, num_heads = (int(getattr(module, name)) for name in _SIZES)
    is_low_rank = getattr(module, "q_a_proj", None) is not None
    of_queries = ("q_a_proj", "q_a_layernorm", "q_b_proj") if is_low_rank else ("q_proj",)
    expect_children(module, {_KEPT, "kv_a_layernorm", _EXPANDED, "o_proj", *of_queries})
    expanded = getattr(module, _EXPANDED)
    if not isinstance(expanded, HeadedLinear):
        raise ProgramUnsupportedError("its latent attention: supported only by the CPU's program")
    if expanded.float_bias is not None or expanded.packed.order:
        raise ProgramUnsupportedError(f"its {_EXPANDED} has a bias, or an order of its inputs")
    if any(size % _MULTIPLE for size in (rank, rest, rotary_dim, value_dim)):
        raise ProgramUnsupportedError("its heads do not fit the native layout")
    kept, q, out = (projection_of(getattr(module, name)) for name in (_KEPT, of_queries[-1], "o_proj"))
    q_down, q_norm = (projection_of(module.q_a_proj), norm_of(module.q_a_layernorm)) if is_low_rank else (None, None)
    outputs = {of_queries[-1]: q.weight.n, _KEPT: kept.weight.n, _EXPANDED: expanded.packed.n, "o_proj": out.weight.n}
    if q_down is not None:
        outputs = {"q_a_proj": q_down.weight.n, **outputs}
    sizes = (kept.weight.n, q.weight.n, out.weight.k)
    if sizes != (rank + rotary_dim, num_heads * (rest + rotary_dim), num_heads * value_dim):
        raise ProgramUnsupportedError(f"{type(module).__name__} has heads of other sizes than it states")
    return LatentParts(
        kept=kept,
        out=out,
        rotation=rotations.of_latent(index, module, outputs, of_queries[-1], _KEPT, rotary_dim),
        latent=Latent(
            q_down=q_down,
            q_norm=q_norm,
            q=q,
            norm=norm_of(module.kv_a_layernorm),
            up=expanded.up,
            down=expanded.packed.part(rest, value_dim),
            rotary_dim=rotary_dim,
        ),
    )


def split_kept(latent: Latent, kept: Projection) -> tuple[Projection, Projection]:
    """The latent and the rotary part."""
    rank = latent.up.n
    assert isinstance(kept.weight, DivisibleWeight), "native kernels read packed weights"
    biases = (None, None) if kept.bias is None else (kept.bias[:rank], kept.bias[rank:])
    first, second = kept.weight.part(0, rank), kept.weight.part(rank, latent.rotary_dim)
    return Projection(first, biases[0]), Projection(second, biases[1])
