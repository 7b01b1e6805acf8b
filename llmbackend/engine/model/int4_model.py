"""Fills the modules of a model without memory with the tensors of a 4-bit checkpoint, one layer at a time.

Used by the loader. transformers would need each format's own library, and would build models for that library's
kernels. Invariants: of the 4-bit layers, at most one group of neighbours is unpacked at a time; every parameter and
buffer has a value in the end, under the name that it has in the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import nn

from ..errors import CheckpointError
from ..gpu.weights.dense import QuantizedLinear
from ..gpu.weights.experts import ExpertProjection, QuantizedExperts
from ..gpu.weights.int4 import Int4Weight
from ..kernels.weights import NEIGHBOURS
from .checkpoint_files import few
from .int4_formats import Int4Format, Int4Layer, PackedFormat
from .rotary import restore_buffers


@dataclass(frozen=True, slots=True)
class Int4Placement:
    """Where 4-bit layers are placed."""

    device: torch.device
    dtype: torch.dtype
    """The model's."""
    dense: bool
    """Whether to dequantize them, on a CPU whose kernels do not support 4-bit weights."""
    exact: bool
    """As in Int4Weight."""


@torch.no_grad()
def fill(
    model: Any,
    form: PackedFormat,
    tensors: Mapping[str, torch.Tensor],
    place: Int4Placement,
    kept: Set[str] = frozenset(),
) -> None:
    """model: without memory, of the class that the tensors fit. kept: names of weights that stay without memory. Raises
    CheckpointError."""
    layers = form.linears(tensors)
    head = model.get_output_embeddings()
    if heads := [name for name, module in model.named_modules() if module is head and name in layers]:
        raise CheckpointError(f"its output head '{heads[0]}' is in 4 bits, expected a plain one")
    experts = {name for name in layers if ".experts." in name} - {name for name, _ in model.named_modules()}
    _check_biases(model, experts, tensors)
    with_experts = _WithExperts(tensors, form, experts)
    _give_plain(model, with_experts if place.dense else tensors, place.dtype, without=kept)
    if not place.dense:
        _check_experts(model, with_experts)
    for parent_name, parent in list(model.named_modules()):
        own = {name for name, child in parent.named_children() if f"{_dotted(parent_name)}{name}" in layers}
        for name, child in list(parent.named_children()):
            full_name = f"{_dotted(parent_name)}{name}"
            if form.has_experts(tensors, full_name) and f"{full_name}.gate_up_proj" not in kept:
                setattr(parent, name, _experts(child, full_name, form, tensors, place))
        for name in [name for name in own if f"{_dotted(parent_name)}{name}.weight" in kept]:
            _bias(getattr(parent, name), f"{_dotted(parent_name)}{name}", tensors)
            own.remove(name)
        for names in _groups(own):
            assert isinstance(form, Int4Format), "other formats have no linear layers in 4 bits"
            linears = [getattr(parent, name) for name in names]
            _replace(parent, names, linears, [f"{_dotted(parent_name)}{name}" for name in names], form, tensors, place)
    restore_buffers(model)
    _check_values(model, kept)


@torch.no_grad()
def fill_plain(
    model: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, without: Set[str] = frozenset()
) -> None:
    """model: as in `fill`. tensors: each lookup creates one, which then belongs to the model. without: names of those
    that stay without memory. Raises CheckpointError."""
    _give_plain(model, tensors, dtype, are_owned=True, without=without)
    restore_buffers(model)
    _check_values(model, without)


def _give_plain(
    model: Any,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    are_owned: bool = False,
    without: Set[str] = frozenset(),
) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    plan = model._get_dtype_plan(dtype)  # what transformers keeps in float32, by regular expressions
    for name, _ in list(model.named_parameters(remove_duplicate=False)):
        if name in tensors and name not in without:
            parent, _, attribute = name.rpartition(".")
            kept_dtype = next((plan[part] for part in plan if re.search(part, name)), dtype)
            value = tensors[name].to(kept_dtype, copy=not are_owned)
            setattr(model.get_submodule(parent), attribute, nn.Parameter(value, requires_grad=False))
    for name, parameter in list(model.named_parameters()):
        if name not in without and parameter.is_meta and (parts := _expert_parts(name, tensors)):
            parent, _, attribute = name.rpartition(".")
            experts = model.get_submodule(parent)
            value = _of_experts(experts, parameter.shape, parts, tensors, dtype)
            setattr(experts, attribute, nn.Parameter(value, requires_grad=False))
    for name, _ in list(model.named_buffers()):
        if name in tensors:
            parent, _, attribute = name.rpartition(".")
            model.get_submodule(parent).register_buffer(attribute, tensors[name].clone())
    if is_tied:
        head.weight = embedding.weight


class _WithExperts(Mapping[str, torch.Tensor]):
    """A checkpoint's tensors, and the weights of 4-bit layers, each dequantized on lookup."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], form: PackedFormat, layers: Set[str]) -> None:
        """layers: those that are not modules of the model."""
        self._tensors, self._form = tensors, form
        self._layers = {f"{layer}.weight": layer for layer in layers}

    def __getitem__(self, name: str) -> torch.Tensor:
        if (layer := self._layers.get(name)) is None:
            return self._tensors[name]
        assert isinstance(self._form, Int4Format), "other formats have no linear layers in 4 bits"
        return _dense(self._form.read(self._tensors, layer), torch.float32)

    def __contains__(self, name: object) -> bool:
        return name in self._layers or name in self._tensors

    def __iter__(self) -> Iterator[str]:
        yield from (*self._tensors, *self._layers)

    def __len__(self) -> int:
        return len(self._tensors) + len(self._layers)


_EXPERT_PARTS: Final = {
    "gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",),
}  # fmt: skip


def _expert_parts(name: str, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of an expert's parts of a parameter of all experts, with {} for its number; empty = it is not such a
    parameter."""
    outer, _, attribute = name.rpartition(".")
    kind = "bias" if attribute.endswith("_bias") else "weight"
    parts = [f"{outer}.{{}}.{part}.{kind}" for part in _EXPERT_PARTS.get(attribute.removesuffix("_bias"), ())]
    return parts if all(part.format(0) in tensors for part in parts) else []


def _check_biases(model: Any, experts: Set[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises CheckpointError for a nonzero bias of a single expert's layer that the model lacks."""
    without = {name for name, module in model.named_modules() if not hasattr(module, "down_proj_bias")}
    for layer in sorted(experts):
        stored = tensors.get(f"{layer}.bias") if layer.rsplit(".", 2)[0] in without else None
        if stored is not None and bool(stored.any()):
            raise CheckpointError(f"its tensors do not fit its config.json: unexpected: {layer}.bias")


def _check_experts(model: Any, tensors: _WithExperts) -> None:
    """Raises CheckpointError if experts are left without values."""
    empty = (name for name, parameter in model.named_parameters() if parameter.is_meta)
    if experts := [name for name in empty if _expert_parts(name, tensors)]:
        raise CheckpointError(f"its experts are in 4 bits, expected plain ones on an accelerator: {few(experts)}")


def _of_experts(
    module: Any, shape: torch.Size, parts: list[str], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """The parameter of transformers' module: [experts, rows, columns], or for biases [experts, rows]."""
    value = torch.empty(shape, dtype=dtype)
    for expert in range(shape[0]):
        found = [tensors[part.format(expert)].to(dtype) for part in parts]
        if len(shape) == 2:
            found = [bias.view(-1, 1) for bias in found]
        rows = torch.cat(found) if getattr(module, "is_concatenated", True) else torch.stack(found, 1).flatten(0, 1)
        value[expert] = rows[:, 0] if len(shape) == 2 else rows.T if getattr(module, "is_transposed", False) else rows
    return value


def _groups(names: set[str]) -> list[tuple[str, ...]]:
    """Groups of layers with adjacent weights."""
    together = [group for group in NEIGHBOURS if names.issuperset(group)]
    return [*together, *((name,) for name in sorted(names) if not any(name in group for group in together))]


def _replace(
    parent: nn.Module,
    names: tuple[str, ...],
    linears: list[Any],
    full_names: list[str],
    form: Int4Format,
    tensors: Mapping[str, torch.Tensor],
    place: Int4Placement,
) -> None:
    biases = [_bias(linear, name, tensors) for linear, name in zip(linears, full_names, strict=True)]
    layers = [form.read(tensors, name) for name in full_names]
    if place.dense:
        for name, layer, bias in zip(names, layers, biases, strict=True):
            setattr(parent, name, _plain(layer, bias, place))
        return
    weights = [_on_device(layer, name, place) for layer, name in zip(layers, full_names, strict=True)]
    for name, weight, bias in zip(names, _side_by_side(weights, place), biases, strict=True):
        setattr(parent, name, QuantizedLinear(weight, bias))


def _on_device(layer: Int4Layer, name: str, place: Int4Placement) -> Int4Weight:
    """Raises CheckpointError if groups are not contiguous, as the GPU kernels require."""
    if layer.groups.order is not None:
        raise CheckpointError(
            f"the columns of '{name}' are grouped by their activations (g_idx, desc_act), expected groups of neighbours"
        )
    return _weight(layer, place.exact)


def _weight(layer: Int4Layer, exact: bool = False) -> Int4Weight:
    groups = layer.groups
    return Int4Weight.of(layer.numbers, groups.scale, groups.zero, groups.size, exact)


def _side_by_side(weights: list[Int4Weight], place: Int4Placement) -> Iterator[Int4Weight]:
    """Weights with the same group size, in one allocation on the device."""
    if len({(weight.k, weight.group_size, weight.scale.dtype) for weight in weights}) > 1:
        yield from (weight.to(place.device) for weight in weights)
        return
    whole, start = weights[0], 0
    for weight in weights[1:]:
        whole = whole.above(weight)
    whole = whole.to(place.device)
    for weight in weights:
        yield whole.part(start, weight.n)
        start += weight.n


def _dense(layer: Int4Layer, dtype: torch.dtype) -> torch.Tensor:
    matrix, order = _weight(layer).dense(dtype), layer.groups.order
    return matrix if order is None else matrix[:, torch.argsort(order)]


def _plain(layer: Int4Layer, bias: nn.Parameter | None, place: Int4Placement) -> nn.Linear:
    matrix = _dense(layer, place.dtype).to(place.device)
    linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(matrix, requires_grad=False)
    linear.bias = bias  # type: ignore[assignment]
    return linear


def _experts(
    module: Any, full_name: str, form: PackedFormat, tensors: Mapping[str, torch.Tensor], place: Int4Placement
) -> nn.Module:
    """The replacement of the model's module, or the module with dequantized weights."""

    def projection(name: str) -> ExpertProjection:
        weight = form.read_experts(tensors, full_name, name, place.device, place.exact)
        bias = getattr(module, f"{name}_bias", None)
        return ExpertProjection(weight, None if bias is None else bias.detach().to(place.device))

    if not place.dense:
        return QuantizedExperts(projection("gate_up_proj"), projection("down_proj"), module._apply_gate)
    for name in ("gate_up_proj", "down_proj"):
        weight = projection(name).weight
        matrices = torch.stack([weight.matrix(expert, place.dtype) for expert in range(weight.num_experts)])
        stored = matrices.transpose(1, 2).contiguous() if module.is_transposed else matrices
        setattr(module, name, nn.Parameter(stored, requires_grad=False))
    return cast(nn.Module, module)


def _bias(linear: Any, name: str, tensors: Mapping[str, torch.Tensor]) -> nn.Parameter | None:
    """Raises CheckpointError if the module is not a plain linear layer, or the file has a bias that the model lacks."""
    if type(linear) is not nn.Linear:
        raise CheckpointError(f"its '{name}' is in 4 bits, expected plain weights for a {type(linear).__name__}")
    stored = tensors.get(f"{name}.bias")
    if linear.bias is None and stored is not None and bool(stored.any()):
        raise CheckpointError(f"its tensors do not fit its config.json: unexpected: {name}.bias")
    return cast("nn.Parameter | None", linear.bias)


def _check_values(model: Any, without: Set[str] = frozenset()) -> None:
    """Raises CheckpointError."""
    every = (*model.named_parameters(), *model.named_buffers())
    if empty := [name for name, tensor in every if tensor.is_meta and name not in without]:
        name = type(model).__name__
        raise CheckpointError(f"its tensors are not those of {name} by their names: missing: {few(empty)}")


def _dotted(name: str) -> str:
    return f"{name}." if name else ""
