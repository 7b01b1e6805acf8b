"""4-bit checkpoint formats: compressed-tensors, AWQ, GPTQ and mxfp4.

Used by the loader. In place of L.weight [n, k], a layer named L has:

- compressed-tensors (pack-quantized): L.weight_packed [n, k / 8], 8 numbers of a row in each int32, the first one in
  the lowest bits; L.weight_scale [n, groups]; L.weight_zero_point [n / 8, groups], packed along the first dimension;
  L.weight_shape;
- GPTQ: L.qweight [k / 8, n], packed along the first dimension; L.scales [groups, n]; L.qzeros [groups, n / 8], minus 1
  in its first version; L.g_idx, the group of each column;
- AWQ (gemm): L.qweight [k, n / 8], in the order 0, 2, 4, 6, 1, 3, 5, 7; L.scales and L.qzeros as in GPTQ, zero points
  in the same order and without offset.

The experts of gpt-oss are in mxfp4: in place of E [experts, k, n] (…experts.gate_up_proj, …experts.down_proj) there are
E_blocks, uint8 [experts, n, k / 32, 16], two e2m1 numbers per byte, the first one in its low nibble, and E_scales,
uint8 [experts, n, k / 32] of e8m0; all other weights are unquantised. Invariants: a number is 0 … 15, and the weight is
(number - zero) * scale; other layouts and bit widths are refused, naming the field or tensor. Sources: the checkpoints
that llm-compressor, GPTQModel, AutoAWQ and OpenAI write; microscaling formats (MX) 1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import torch

from ..errors import CheckpointError
from ..gpu.weights.experts import Int4Experts
from ..gpu.weights.int4 import MIN_GROUP, PLAIN_ZERO, Int4Weight
from .checkpoint_files import PACKED_NUMBERS, TensorHeader, few

_GROUP: Final = 32
BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the tensors of experts in mxfp4."""


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """Implements PackedFormat."""

    bytes_per_number: float = 0.5 + 1 / _GROUP

    def plain(self, tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
        weights = [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]
        if missing := [scales for name in weights if (scales := f"{name}{SCALES}") not in tensors]:
            raise CheckpointError(f"its tensors do not fit its quantization_config: missing: {few(missing)}")
        own = {f"{name}{ending}" for name in weights for ending in (BLOCKS, SCALES)}
        plain = {name: TensorHeader("BF16", _shape(tensors, name)) for name in weights}
        return {name: header for name, header in tensors.items() if name not in own} | plain

    def spare(self, tensors: Mapping[str, TensorHeader]) -> frozenset[str]:
        return frozenset()

    def linears(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        return set()

    def has_experts(self, tensors: Mapping[str, torch.Tensor], module: str) -> bool:
        return f"{module}.down_proj{BLOCKS}" in tensors

    def read_experts(
        self, tensors: Mapping[str, torch.Tensor], module: str, name: str, device: torch.device, exact: bool
    ) -> Int4Experts:
        blocks, scales = (tensors[f"{module}.{name}{ending}"] for ending in (BLOCKS, SCALES))
        experts = [
            Int4Weight.of(_numbers(block.to(device)), scale.to(device), None, _GROUP, exact, is_float=True)
            for block, scale in zip(blocks, scales, strict=True)
        ]
        return Int4Experts(Int4Weight.stacked(experts), len(experts))


def _shape(tensors: Mapping[str, TensorHeader], name: str) -> tuple[int, ...]:
    blocks, scales = (tensors[f"{name}{ending}"] for ending in (BLOCKS, SCALES))
    if blocks.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[-1] != _GROUP // 2:
        raise CheckpointError(
            f"its tensor '{name}{BLOCKS}' is of type {blocks.dtype} and shape {list(blocks.shape)}, expected U8 and "
            f"[experts, outputs, inputs / {_GROUP}, {_GROUP // 2}]"
        )
    num_experts, n, groups, _ = blocks.shape
    if scales.dtype != "U8" or tuple(scales.shape) != (num_experts, n, groups):
        raise CheckpointError(
            f"its tensor '{name}{SCALES}' is of type {scales.dtype} and shape {list(scales.shape)}, expected U8 and "
            f"{[num_experts, n, groups]}"
        )
    return num_experts, groups * _GROUP, n


def _numbers(blocks: torch.Tensor) -> torch.Tensor:
    """uint8 [n, k] from [n, k / 32, 16]"""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)


Method = Literal["compressed-tensors", "gptq", "awq"]

_WHOLE: Final = -1
"""A group size: all columns are one group."""
_NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "compressed-tensors": ("weight_scale", "weight_shape"),
    "gptq": ("scales", "qzeros"),
    "awq": ("scales", "qzeros"),
}
_OPTIONAL: Final[Mapping[str, tuple[str, ...]]] = {
    "compressed-tensors": ("weight_zero_point", "weight_g_idx"),
    "gptq": ("g_idx",),
    "awq": (),
}
_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions of the numbers 0 … 7 in an int32 of AWQ."""


@dataclass(frozen=True, slots=True, eq=False)
class Int4Groups:
    """The dequantization parameters of a layer, in any of the formats."""

    scale: torch.Tensor
    """[n, groups]"""
    zero: torch.Tensor | None
    """uint8 [n, groups]; None = 8."""
    size: int
    order: torch.Tensor | None
    """int64 [k]: the columns, group by group; None = groups are contiguous."""


@dataclass(frozen=True, slots=True, eq=False)
class Int4Layer:
    """A layer's weight."""

    numbers: torch.Tensor
    """uint8 [n, k], with the columns of a group contiguous."""
    groups: Int4Groups


class PackedFormat(Protocol):
    """How a checkpoint stores 4-bit weights."""

    @property
    def bytes_per_number(self) -> float:
        """Approximate size of packed weights."""

    def plain(self, tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
        """The tensors of the equivalent unquantised checkpoint. Raises CheckpointError."""

    def spare(self, tensors: Mapping[str, TensorHeader]) -> frozenset[str]:
        """Tensors that the model may lack."""

    def linears(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Names of the 4-bit linear layers."""

    def has_experts(self, tensors: Mapping[str, torch.Tensor], module: str) -> bool:
        """Whether the experts of this module are in 4 bits."""

    def read_experts(
        self, tensors: Mapping[str, torch.Tensor], module: str, name: str, device: torch.device, exact: bool
    ) -> Int4Experts:
        """The experts' weight with this name (gate_up_proj or down_proj), on the device. exact: as in Int4Weight.
        Raises CheckpointError naming the tensor."""


@dataclass(frozen=True, slots=True)
class Int4Format:
    """What a quantization_config says about a checkpoint's weights."""

    method: Method
    group_sizes: tuple[int, ...]
    """Group sizes that layers may have; -1 = one group."""
    zero_offset: int = 0
    """Added to a stored zero point."""

    @property
    def bytes_per_number(self) -> float:
        return 0.5

    @property
    def packed_ending(self) -> str:
        """Suffix of the tensors with packed numbers."""
        return f".{PACKED_NUMBERS[self.method]}"

    def layers(self, tensors: Mapping[str, TensorHeader]) -> list[str]:
        """Names of the 4-bit layers. Raises CheckpointError naming missing tensors."""
        ending = self.packed_ending
        names = [name.removesuffix(ending) for name in tensors if name.endswith(ending)]
        needed = [f"{name}.{each}" for name in names for each in _NEEDED[self.method]]
        if missing := [name for name in needed if name not in tensors]:
            raise CheckpointError(f"its tensors do not fit its quantization_config: missing: {few(missing)}")
        return names

    def plain(self, tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
        layers = self.layers(tensors)
        own = {f"{layer}.{ending}" for layer in layers for ending in self._endings()}
        weights = {f"{layer}.weight": TensorHeader("F16", self._shape(tensors, layer)) for layer in layers}
        return {name: header for name, header in tensors.items() if name not in own} | weights

    def spare(self, tensors: Mapping[str, TensorHeader]) -> frozenset[str]:
        """Biases that layers may lack: some writers give every layer a zero bias."""
        return frozenset(name for layer in self.layers(tensors) if (name := f"{layer}.bias") in tensors)

    def linears(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        return {name.removesuffix(self.packed_ending) for name in tensors if name.endswith(self.packed_ending)}

    def has_experts(self, tensors: Mapping[str, torch.Tensor], module: str) -> bool:
        return False

    def read_experts(
        self, tensors: Mapping[str, torch.Tensor], module: str, name: str, device: torch.device, exact: bool
    ) -> Int4Experts:
        raise AssertionError("it has none")

    def read(self, tensors: Mapping[str, torch.Tensor], layer: str) -> Int4Layer:
        """Raises CheckpointError naming the tensor."""
        groups = self.groups(tensors, layer)
        numbers = _NUMBERS[self.method](self._parts(tensors, layer))
        return Int4Layer(numbers if groups.order is None else numbers[:, groups.order], groups)

    def groups(self, tensors: Mapping[str, torch.Tensor], layer: str) -> Int4Groups:
        """As `read`, but without the numbers."""
        parts = self._parts(tensors, layer)
        n, k = self._dimensions(_there(parts, PACKED_NUMBERS[self.method]).shape)
        if self.method == "compressed-tensors":
            k = int(_there(parts, "weight_shape")[1])
        scale, zero = _GROUPS[self.method](parts, n)
        if scale.dim() != 2 or scale.shape[0] != n or (zero is not None and zero.shape != scale.shape):
            raise CheckpointError(f"the scales and zeros of '{layer}' are not of its {n} outputs")
        size = self._group_size(layer, k, scale.shape[1])
        order = _order(layer, parts.get("g_idx", parts.get("weight_g_idx")), k, size)
        if zero is not None and self.zero_offset:
            zero = (zero + self.zero_offset) & 15
        if zero is not None and bool((zero == PLAIN_ZERO).all()):
            zero = None
        return Int4Groups(scale, zero, size, order)

    def _parts(self, tensors: Mapping[str, torch.Tensor], layer: str) -> _Parts:
        return {name: tensors.get(f"{layer}.{name}") for name in self._endings()}

    def _endings(self) -> Iterable[str]:
        return (PACKED_NUMBERS[self.method], *_NEEDED[self.method], *_OPTIONAL[self.method])

    def _shape(self, tensors: Mapping[str, TensorHeader], layer: str) -> tuple[int, int]:
        name = f"{layer}{self.packed_ending}"
        header = tensors[name]
        if header.dtype != "I32" or len(header.shape) != 2:
            raise CheckpointError(
                f"its tensor '{name}' is of type {header.dtype} and shape {list(header.shape)}, expected an I32 matrix"
            )
        return self._dimensions(header.shape)

    def _dimensions(self, packed_shape: Sequence[int]) -> tuple[int, int]:
        """Outputs and inputs, from the shape of the packed numbers."""
        first, second = packed_shape
        return {
            "compressed-tensors": (first, 8 * second),
            "gptq": (second, 8 * first),
            "awq": (8 * second, first),
        }[self.method]

    def _group_size(self, layer: str, k: int, groups: int) -> int:
        for size in self.group_sizes:
            if groups == (1 if size == _WHOLE else -(-k // size)):
                return k if size == _WHOLE else size
        stated = " or ".join(map(str, self.group_sizes))
        raise CheckpointError(f"'{layer}' has {groups} groups of {k} inputs, expected groups of {stated}")


def packed_format(settings: Mapping[str, Any]) -> PackedFormat | None:
    """The format given by a quantization_config; None = another method. Raises CheckpointError naming the field."""
    reader = _READERS.get(str(settings.get("quant_method")))
    return None if reader is None else reader(settings)


def _of_compressed_tensors(settings: Mapping[str, Any]) -> Int4Format:
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not groups:
        raise _unexpected("config_groups", groups, "one or more groups of layers")
    stated = settings.get("format")
    sizes: list[int] = []
    for name, group in groups.items():
        field, weights = f"config_groups.{name}", group.get("weights") or {}
        _expect(f"{field}.format", group.get("format") or stated, "pack-quantized")
        _expect(f"{field}.input_activations", group.get("input_activations"), None)
        _expect(f"{field}.weights.num_bits", weights.get("num_bits"), 4)
        _expect(f"{field}.weights.type", weights.get("type", "int"), "int")
        _expect(f"{field}.weights.strategy", weights.get("strategy"), "group", "channel")
        size = weights.get("group_size") if weights.get("strategy") == "group" else _WHOLE
        sizes.append(_checked_size(f"{field}.weights.group_size", size))
    for name in ("transform_config", "sparsity_config"):
        inner = settings.get(name) or {}
        if inner and inner.get("format") != "dense":
            raise _unexpected(name, inner, "none")
    return Int4Format("compressed-tensors", tuple(dict.fromkeys(sizes)))


def _of_gptq(settings: Mapping[str, Any]) -> Int4Format:
    _expect("bits", settings.get("bits"), 4)
    if settings.get("checkpoint_format") == "gemm":  # GPTQModel's name for AWQ's layout without AWQ's search
        return _of_awq(settings)
    _expect("checkpoint_format", settings.get("checkpoint_format") or "gptq", "gptq", "gptq_v2")
    _expect("lm_head", settings.get("lm_head") or False, False)
    size = _checked_size("group_size", settings.get("group_size"))
    return Int4Format("gptq", (size,), 0 if settings.get("checkpoint_format") == "gptq_v2" else 1)


def _of_awq(settings: Mapping[str, Any]) -> Int4Format:
    _expect("bits", settings.get("bits", settings.get("w_bit")), 4)
    version = settings.get("version") or settings.get("format") or "gemm"
    _expect("version", str(version).lower(), "gemm")
    return Int4Format("awq", (_checked_size("group_size", settings.get("group_size", settings.get("q_group_size"))),))


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], PackedFormat]]] = {
    "mxfp4": lambda settings: Mxfp4Format(),
    "compressed-tensors": _of_compressed_tensors,
    "gptq": _of_gptq,
    "awq": _of_awq,
}
METHODS: Final = tuple(_READERS)


def _expect(field: str, value: Any, *expected: Any) -> None:
    if value not in expected:
        raise _unexpected(field, value, " or ".join(map(repr, expected)))


def _checked_size(field: str, size: Any) -> int:
    if size == _WHOLE or (isinstance(size, int) and size > 0 and size % MIN_GROUP == 0):
        return int(size)
    raise _unexpected(field, size, f"-1 or a multiple of {MIN_GROUP}")


def _unexpected(field: str, value: Any, expected: str) -> CheckpointError:
    return CheckpointError(f"its quantization_config.{field} is {value!r}, expected {expected}")


_Parts = Mapping[str, torch.Tensor | None]
_ScaleAndZero = tuple[torch.Tensor, torch.Tensor | None]


def _compressed_numbers(parts: _Parts) -> torch.Tensor:
    return _unpacked(_there(parts, "weight_packed"))[:, : int(_there(parts, "weight_shape")[1])]


def _compressed_groups(parts: _Parts, n: int) -> _ScaleAndZero:
    zero = parts["weight_zero_point"]
    if zero is not None and zero.dtype == torch.int32:
        zero = _unpacked(zero.t()).t()[:n]
    elif zero is not None:  # writers before 2025 stored them unsigned, minus 8
        zero = (zero.to(torch.int16) + PLAIN_ZERO).to(torch.uint8)
    return _there(parts, "weight_scale"), zero


def _gptq_numbers(parts: _Parts) -> torch.Tensor:
    return _unpacked(_there(parts, "qweight").t())


def _gptq_groups(parts: _Parts, n: int) -> _ScaleAndZero:
    return _there(parts, "scales").t(), _unpacked(_there(parts, "qzeros")).t()


def _awq_numbers(parts: _Parts) -> torch.Tensor:
    return _in_order(_unpacked(_there(parts, "qweight"))).t()


def _awq_groups(parts: _Parts, n: int) -> _ScaleAndZero:
    return _there(parts, "scales").t(), _in_order(_unpacked(_there(parts, "qzeros"))).t()


_NUMBERS: Final = {"compressed-tensors": _compressed_numbers, "gptq": _gptq_numbers, "awq": _awq_numbers}
_GROUPS: Final = {"compressed-tensors": _compressed_groups, "gptq": _gptq_groups, "awq": _awq_groups}


def _there(parts: _Parts, name: str) -> torch.Tensor:
    tensor = parts[name]
    assert tensor is not None, "the headers were searched"
    return tensor


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, 8 * columns] from int32 [rows, columns]: the lowest bits first."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)


def _in_order(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(len(numbers), -1, 8)[:, :, list(_AWQ_PLACES)].flatten(1)


def _order(layer: str, group_of: torch.Tensor | None, k: int, size: int) -> torch.Tensor | None:
    """Columns sorted by group; None = groups are contiguous. Raises CheckpointError."""
    if group_of is None or bool((group_of < 0).all()):  # there are none, or none were assigned
        return None
    expected, group_of = torch.arange(k) // size, group_of.long()
    if torch.equal(group_of, expected):
        return None
    order = torch.argsort(group_of, stable=True)
    if not torch.equal(group_of[order], expected):
        raise CheckpointError(f"the columns of '{layer}' (g_idx) are not in groups of {size}")
    return order
