"""Linear layers of transformers modules as projections, and MLPs made of them.

Used by the descriptions of decoders, mixtures of experts and recurrent layers. Invariant: weights are read, never
changed or copied; anything not recognised raises ProgramUnsupportedError.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import nn

from ..cpu.linear import NativeLinear
from ..errors import ProgramUnsupportedError
from ..gpu.ops.ops import Activation
from ..gpu.weights.dense import DenseWeight, QuantizedLinear
from ..gpu.weights.stored import StoredLinear
from ..kernels.weights import PackedWeight
from .recognition import PlainActivation, mlp_activation, plain_activation_of


class Weight(Protocol):
    """A matrix [n, k]: a PackedWeight for the CPU's kernels, a DeviceWeight for an accelerator, or a StoredWeight
    before it is sharded."""

    @property
    def n(self) -> int: ...

    @property
    def k(self) -> int: ...


@runtime_checkable
class DivisibleWeight(Weight, Protocol):
    """A weight that can be split without a copy: PackedWeight, DenseWeight, QuantizedWeight, Int4Weight,
    StoredWeight."""

    def part(self, start: int, n: int) -> Self:
        """Rows start .. start + n - 1; both are multiples of a panel of 32 rows."""

    def joined(self, other: Self) -> Self | None:
        """This matrix with the other's rows appended, if they are adjacent in memory; else None."""


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """Matrices of several types, stacked by rows."""

    matrices: tuple[PackedWeight, ...]

    @property
    def n(self) -> int:
        return sum(matrix.n for matrix in self.matrices)

    @property
    def k(self) -> int:
        return self.matrices[0].k


@dataclass(frozen=True, slots=True)
class Projection:
    """x·Wᵀ + bias"""

    weight: Weight
    bias: torch.Tensor | None
    """float32 [n]"""
    parts: tuple[tuple[nn.Module, int], ...] = ()
    """The model's layers that it consists of, with their numbers of outputs; empty for routers and ranks."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(activation(gate_factor * gate) * up)"""

    gate: Projection
    up: Projection
    down: Projection
    activation: Activation
    gate_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """down(activation(up))"""

    up: Projection
    down: Projection
    activation: PlainActivation


def children_of(module: nn.Module) -> set[str]:
    """Names of the parts that compute something at inference."""
    return {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}


def expect_children(module: nn.Module, names: set[str], optional: frozenset[str] = frozenset()) -> None:
    found = children_of(module)
    if not names <= found <= names | optional:
        raise ProgramUnsupportedError(f"{type(module).__name__} consists of {', '.join(sorted(found))}")


_PLAIN_NAMES = (("fc1", "fc2"), ("c_fc", "c_proj"), ("up_proj", "down_proj"))
"""For MLPs without a gate."""


def plain_mlp_of(module: Any) -> PlainMlp | None:
    """None = it has a gate."""
    for up_name, down_name in _PLAIN_NAMES:
        if hasattr(module, up_name) and hasattr(module, down_name) and not hasattr(module, "gate_proj"):
            up, down = (projection_of(getattr(module, name)) for name in (up_name, down_name))
            return PlainMlp(up, down, plain_activation_of(module))
    return None


def mlp_of(module: Any) -> Mlp:
    activation = mlp_activation(module)
    if hasattr(module, "gate_up_proj"):
        return Mlp(*halves_of(module.gate_up_proj), projection_of(module.down_proj), activation)
    if not all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
        raise ProgramUnsupportedError(f"{type(module).__name__} is not a gated MLP")
    gate, up, down = (projection_of(getattr(module, name)) for name in ("gate_proj", "up_proj", "down_proj"))
    return Mlp(gate, up, down, activation)


def halves_of(gate_up: Any) -> tuple[Projection, Projection]:
    """Gate and up projections from one matrix."""
    weight, bias = _weight_and_bias(gate_up)
    half = weight.n // 2
    if half % 32 or bias is not None or not isinstance(weight, DivisibleWeight):
        raise ProgramUnsupportedError("gate and up are one matrix, where panels cannot split it")
    first, second = (Projection(weight.part(start, half), None, ((gate_up, half),)) for start in (0, half))
    return first, second


def projection_of(linear: Any) -> Projection:
    weight, bias = _weight_and_bias(linear)
    return Projection(weight, bias, ((linear, weight.n),))


def _weight_and_bias(linear: Any) -> tuple[Weight, torch.Tensor | None]:
    if isinstance(linear, NativeLinear):
        return linear.packed, linear.float_bias
    if isinstance(linear, QuantizedLinear):
        return linear.quantized, None if linear.bias is None else linear.bias.detach().float()
    if isinstance(linear, StoredLinear):
        return linear.stored, None if linear.bias is None else linear.bias.float()
    if type(linear) is not nn.Linear:
        raise ProgramUnsupportedError(f"{type(linear).__name__} is not a plain linear layer")
    return DenseWeight(linear.weight.detach()), None if linear.bias is None else linear.bias.detach().float()


def qkv_of(projections: Sequence[Projection]) -> Projection:
    """Query, key and value as one projection."""
    projection = joined(*projections) or _stacked(projections)
    if projection is None:
        raise ProgramUnsupportedError("query, key and value are not adjacent, or only some of them have a bias")
    return projection


def joined(first: Projection, *others: Projection) -> Projection | None:
    """The projections as one; None if they are not adjacent in memory, or only some have a bias."""
    weight: Weight | None = first.weight
    for other in others:
        if not isinstance(weight, DivisibleWeight) or not isinstance(other.weight, type(weight)):
            return None
        weight = weight.joined(other.weight)
    return None if weight is None else _with_weight(weight, (first, *others))


def _stacked(projections: Sequence[Projection]) -> Projection | None:
    """The projections as one of several types; otherwise as `joined`."""
    matrices: list[PackedWeight] = []
    for weight in (projection.weight for projection in projections):
        if not isinstance(weight, PackedWeight):
            return None
        if matrices and (below := matrices[-1].joined(weight)) is not None:
            matrices[-1] = below
        else:
            matrices.append(weight)
    return _with_weight(StackedWeight(tuple(matrices)), projections)


def _with_weight(weight: Weight, projections: Sequence[Projection]) -> Projection | None:
    biases = [projection.bias for projection in projections if projection.bias is not None]
    if len(biases) not in (0, len(projections)):
        return None
    parts = _merged(part for projection in projections for part in projection.parts)
    return Projection(weight, torch.cat(biases) if biases else None, parts)


def parts_of(projection: Projection) -> Iterator[Projection]:
    """Parts with one type each."""
    weight, first = projection.weight, 0
    for matrix in weight.matrices if isinstance(weight, StackedWeight) else (weight,):
        bias = None if projection.bias is None else projection.bias[first : first + matrix.n]
        yield Projection(matrix, bias)
        first += matrix.n


def _merged(parts: Iterable[tuple[nn.Module, int]]) -> tuple[tuple[nn.Module, int], ...]:
    """Merges neighbouring parts of the same layer."""
    merged: list[tuple[nn.Module, int]] = []
    for layer, n in parts:
        if merged and merged[-1][0] is layer:
            n += merged.pop()[1]
        merged.append((layer, n))
    return tuple(merged)
