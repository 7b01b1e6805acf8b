"""The experts of a layer on the native kernels: packed one after the other, replacing transformers' module.

Used by the loader and by descriptions. Invariant: a row of the output depends, bit by bit, only on that row of the
input, its experts and shares.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ..cpu.linear import StoredMatrices, kept_weights, one_type, pack_stored
from ..cpu.native_memory import release_pages
from ..errors import ProgramUnsupportedError
from ..gpu.ops.ops import ACTIVATIONS, Activation, gated
from ..kernels.expert_layout import MAX_EXPERTS, ExpertMatrix, Pairs, experts_op, gated_experts_op, steps_of
from ..kernels.library import NativeKernels, op_pointers
from ..kernels.operations import Step, Type
from ..kernels.weights import TYPE_OF, FourBits, PackedWeight, WeightStore
from ..load_progress import counted
from .recognition import plain_activation_of

logger = logging.getLogger(__name__)

ExpertActivation = Activation | Literal["relu2"]
"""For gates; relu2, max(0, x)², for experts without a gate."""
_WITHOUT_GATE: Final = {"up_proj", "down_proj"}
_WEIGHTS: Final = {"gate_up_proj", "down_proj"}
_BIASES: Final = {"gate_up_proj_bias", "down_proj_bias"}


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """A matrix [n, k] for each expert."""

    first: PackedWeight
    """Of expert 0; the others follow. Its permutation applies to all."""
    count: int
    bias: torch.Tensor | None
    """float32 [count, n]"""

    def ordered(self, address: int) -> PackedExperts:
        """With input permutations at this address."""
        return dataclasses.replace(self, first=dataclasses.replace(self.first, order=address))

    @property
    def matrix(self) -> ExpertMatrix:
        first = self.first
        bias = None if self.bias is None else self.bias.data_ptr()
        parts = first.address, first.scale or None, first.sums or None
        return ExpertMatrix(*parts, first.n, first.k, first.type, bias, first.order or None)


def activation_of(experts: Any) -> ExpertActivation | None:
    """Recognised by its output for gates and ups, beyond any bound; None = unknown."""
    if hasattr(experts, "up_proj"):
        with suppress(ProgramUnsupportedError):
            return "relu2" if plain_activation_of(experts) == "relu2" else None
        return None
    x = 12 * torch.arange(1.0, 513.0).sin().view(4, 128)
    given = experts._apply_gate(x) if hasattr(experts, "_apply_gate") else None
    for name in ACTIVATIONS:
        if given is not None and torch.allclose(given, gated(x, name), rtol=1e-5, atol=1e-5):
            return name
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Plain:
    """transformers' experts module, and the layer's router."""

    path: str
    """Path of the parent, which prefixes the layer's tensor names."""
    parent: nn.Module
    experts: Any
    router: Any
    """What has its weight."""
    activation: ExpertActivation

    @property
    def up_name(self) -> str:
        return "gate_up_proj" if self.has_gate else "up_proj"

    @property
    def has_gate(self) -> bool:
        return self.activation != "relu2"

    @property
    def gate_up(self) -> torch.Tensor:
        """[experts, 2 * n, width], or without a gate [experts, n, width]"""
        return self._by_output(self.up_name)

    @property
    def down(self) -> torch.Tensor:
        return self._by_output("down_proj")

    def _by_output(self, name: str) -> torch.Tensor:
        weight: torch.Tensor = getattr(self.experts, name).detach()
        return weight.transpose(1, 2) if getattr(self.experts, "is_transposed", False) else weight

    @property
    def ups(self) -> tuple[str, ...]:
        """The layers of an expert that read its input."""
        return ("gate_proj", "up_proj") if self.has_gate else ("up_proj",)

    @property
    def vectors(self) -> Iterator[torch.Tensor]:
        """Candidates for a router's correction."""
        yield from self.parent.buffers()
        yield from self.parent.parameters(recurse=False)
        yield from (each for each in router_of(self.parent).parameters() if each.numel() == len(self.router.weight))

    def split(self, gate_up: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Splits the second dimension into equally many gates and ups."""
        if not self.has_gate:
            return None, gate_up
        if self.activation == "swigluoai":
            return gate_up[:, ::2], gate_up[:, 1::2]
        half = gate_up.shape[1] // 2
        return gate_up[:, :half], gate_up[:, half:]

    def expert(self, index: int, name: str) -> str:
        """The name of one expert's layer in checkpoints."""
        return f"{self.path}.experts.{index}.{name}"

    def bias(self, name: str) -> torch.Tensor | None:
        bias = getattr(self.experts, f"{name}_bias", None)
        return None if bias is None else bias.detach().float()


def router_of(parent: Any) -> Any:
    """The router of this module; None = it has none."""
    return getattr(parent, "router", getattr(parent, "gate", None))


def router_linear(router: nn.Module) -> Any:
    """The part of a router that has its weight: it itself, or its only linear layer."""
    if isinstance(getattr(router, "weight", None), torch.Tensor):
        return router
    linears = [child for child in router.children() if type(child) in (nn.Linear, RouterLinear)]
    return linears[0] if len(linears) == 1 else router


class RouterLinear(nn.Linear):
    """A router's, which is packed with the experts and is none of the model's plain linear layers."""


def _plain_experts(model: nn.Module) -> Iterator[_Plain]:
    for path, parent in list(model.named_modules()):
        experts = getattr(parent, "experts", None)
        router = router_of(parent)
        if not isinstance(experts, nn.Module) or not isinstance(router, nn.Module):
            continue
        linear = router_linear(router)
        if _fits(experts, linear) and (activation := activation_of(experts)) is not None:
            yield _Plain(path, parent, experts, linear, activation)


def _fits(experts: Any, router: Any) -> bool:
    """Whether the matrices are gates, ups and downs with equal shapes for all experts."""
    names = {name for name, _ in experts.named_parameters()}
    weight = getattr(router, "weight", None)
    is_known = names == _WITHOUT_GATE or _WEIGHTS <= names <= _WEIGHTS | _BIASES
    if not is_known or weight is None or weight.dim() != 2:
        return False
    gate_up, down = experts.up_proj if names == _WITHOUT_GATE else experts.gate_up_proj, experts.down_proj
    if gate_up.dim() != 3 or down.dim() != 3 or gate_up.dtype not in TYPE_OF:
        return False
    count, width = weight.shape
    if getattr(experts, "is_transposed", False):
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    n = down.shape[2]
    shapes = (tuple(gate_up.shape), tuple(down.shape))
    ups = n if names == _WITHOUT_GATE else 2 * n
    return count <= MAX_EXPERTS and shapes == ((count, ups, width), (count, width, n))


class _Types(NamedTuple):
    """Types of a layer's matrices, and whether they are kept as stored."""

    gate_up: Type
    down: Type
    gate_up_is_kept: bool
    down_is_kept: bool


Order = npt.NDArray[np.int32]


class ExpertsToPack:
    """The experts of a model to pack for the native kernels. Input permutations (desc_act): those of gates and ups, one
    per expert, are applied to each row; those of downs are folded into the rows of gates and ups."""

    def __init__(self, model: nn.Module, quantization: str | None, stored: StoredMatrices | None = None) -> None:
        """quantization, stored: as in `swap_linears`; single experts are named like linear layers."""
        self._stored = stored
        rounded = {"int8": Type.INT8, "int4": Type.INT4_MIN if stored is None else Type.INT8}.get(quantization or "")
        self._found = [(plain, self._types(plain, rounded)) for plain in _plain_experts(model)]
        for plain, _ in self._found:
            if type(plain.router) is nn.Linear and plain.router is not router_of(plain.parent):
                plain.router.__class__ = RouterLinear

    @property
    def shapes(self) -> list[tuple[int, int, Type]]:
        """(n, k, type) of all matrices, in packing order."""
        shapes: list[tuple[int, int, Type]] = []
        for plain, types in self._found:
            count, width, n = plain.down.shape
            shapes += [(n, width, types.gate_up)] * ((1 + plain.has_gate) * count) + [(width, n, types.down)] * count
            shapes.append((count, width, TYPE_OF[plain.router.weight.dtype]))
        return shapes

    @property
    def vector_bytes(self) -> int:
        """Space for float32 biases and routers' vectors, and for input permutations, each starting on a cache line."""
        modules = ((*plain.experts.parameters(), *plain.vectors) for plain, _ in self._found)
        orders = (self._orders(plain, plain.ups[0]) for plain, types in self._found if types.gate_up_is_kept)
        vectors = sum(4 * int(each.numel()) + 3 * 64 for tensors in modules for each in tensors if each.dim() < 3)
        return vectors + sum(4 * each.size + 64 for each in orders if each is not None)

    @property
    def kept_weights(self) -> frozenset[str]:
        """Names of the weights that are read directly from the checkpoint."""
        return frozenset(
            f"{plain.path}.experts.{name}"
            for plain, types in self._found
            for name, is_kept in ((plain.up_name, types.gate_up_is_kept), ("down_proj", types.down_is_kept))
            if is_kept
        )

    def pack(self, store: WeightStore, kernels: NativeKernels) -> None:
        """Replaces the modules, layer by layer."""
        if self._stored is not None and self._found:
            layers = Counter(kind.name for _, types in self._found for kind in (types.gate_up, types.down))
            text = ", ".join(f"{count} {name}" for name, count in layers.most_common())
            logger.info("gates and ups, and downs, of a layer's experts: %s", text)
        for plain, types in counted("packing experts", self._found):
            experts = self._packed(plain, types, store, kernels)
            for name in (plain.up_name, "down_proj"):
                weight = getattr(plain.experts, name)
                if not weight.is_meta:
                    release_pages(weight.data_ptr(), weight.nbytes)
                delattr(plain.experts, name)
            plain.parent.experts = experts

    def _types(self, plain: _Plain, rounded: Type | None) -> _Types:
        gate_up, down = (self._kept_type(plain, names) for names in (plain.ups, ("down_proj",)))
        other = rounded or TYPE_OF[plain.down.dtype]
        return _Types(gate_up or other, down or other, gate_up is not None, down is not None)

    def _kept_type(self, plain: _Plain, names: tuple[str, ...]) -> Type | None:
        """The type of all experts; None = they have no type in common, or not all are kept, or layers that are
        multiplied together have different input permutations."""
        stored = self._stored
        if stored is None:
            return None
        experts = [[plain.expert(index, name) for name in names] for index in range(plain.down.shape[0])]
        kinds = {stored.type_of(layer) for layers in experts for layer in layers}
        if any(len({stored.order_of(layer) for layer in layers}) > 1 for layers in experts):
            return None
        return one_type(kinds)

    def _orders(self, plain: _Plain, name: str) -> Order | None:
        """Input permutations of all experts' layers with this name, [experts, k]; None = none."""
        assert self._stored is not None, "kept matrices are read from somewhere"
        orders = [self._stored.order_of(plain.expert(index, name)) for index in range(plain.down.shape[0])]
        if not any(orders):
            return None
        as_it_is = np.arange(max(map(len, orders)) // 4, dtype=np.int32).tobytes()
        return np.stack([np.frombuffer(order or as_it_is, np.int32) for order in orders])

    def _packed(self, plain: _Plain, types: _Types, store: WeightStore, kernels: NativeKernels) -> NativeExperts:
        gate_up_bias = plain.bias(plain.up_name)
        biases = (None, None) if gate_up_bias is None else plain.split(gate_up_bias)
        parts = plain.split(plain.gate_up)
        inner = self._orders(plain, "down_proj") if types.down_is_kept else None
        gate, up = (
            self._matrices(store, plain, name, types.gate_up, None if types.gate_up_is_kept else part, bias, inner)
            if plain.has_gate or name == "up_proj" else None
            for name, part, bias in zip(("gate_proj", "up_proj"), parts, biases, strict=True)
        )  # fmt: skip
        assert up is not None, "experts have ups"
        own = None if types.down_is_kept else plain.down
        down = self._matrices(store, plain, "down_proj", types.down, own, plain.bias("down_proj"))
        if types.gate_up_is_kept and (orders := self._orders(plain, plain.ups[0])) is not None:
            address = store.add_order(orders)
            gate, up = (None if each is None else each.ordered(address) for each in (gate, up))
            assert up is not None, "experts have ups"
        router = store.pack(plain.router.weight, TYPE_OF[plain.router.weight.dtype])
        return NativeExperts(kernels, gate, up, down, router, plain.activation)

    def _matrices(
        self, store: WeightStore, plain: _Plain, name: str, kind: Type, own: torch.Tensor | None,
        bias: torch.Tensor | None, outputs: Order | None = None,
    ) -> PackedExperts:  # fmt: skip
        """own: the matrices; None = those of the checkpoint, without their input permutations. outputs: a permutation
        of each expert's outputs; None = none."""
        count = plain.down.shape[0]
        if outputs is not None and bias is not None:
            bias = bias.gather(1, torch.from_numpy(outputs).long())
        if own is not None:
            rows = own if outputs is None else (own[i][torch.from_numpy(outputs[i])] for i in range(count))
            return _in_steps([store.pack(matrix, kind) for matrix in rows], bias)
        stored = self._stored
        assert stored is not None, "kept matrices are read from somewhere"
        packed = []
        for index in range(count):
            matrix = stored.read(plain.expert(index, name))
            if isinstance(matrix, FourBits):
                matrix = dataclasses.replace(matrix if outputs is None else matrix.outputs(outputs[index]), order=None)
            assert isinstance(matrix, FourBits) or outputs is None, "other matrices have no order"
            packed.append(pack_stored(store, matrix, kind))
        return _in_steps(packed, bias)


def kept_names(model: nn.Module, stored: StoredMatrices) -> frozenset[str]:
    """Names of all weights that are read directly from the checkpoint. Works on models with or without memory."""
    experts = ExpertsToPack(model, "int4", stored)  # first: separates routers from linear layers
    return experts.kept_weights | kept_weights(model, stored)


def _in_steps(packed: Sequence[PackedWeight], bias: torch.Tensor | None) -> PackedExperts:
    first, last, steps = packed[0], packed[-1], steps_of(packed[0].n, packed[0].k, packed[0].type)
    moved = (last.address - first.address, last.scale - first.scale, last.sums - first.sums)
    assert moved == tuple(step * (len(packed) - 1) for step in steps), "experts are not placed in equal steps"
    return PackedExperts(first, len(packed), None if bias is None else bias.contiguous())


class NativeExperts(nn.Module):
    """Replaces transformers' experts module."""

    def __init__(
        self, kernels: NativeKernels, gate: PackedExperts | None, up: PackedExperts, down: PackedExperts,
        router: PackedWeight, activation: ExpertActivation,
    ) -> None:  # fmt: skip
        """router: the layer's, packed for a program."""
        super().__init__()
        self.gate, self.up, self.down, self.router, self.activation = gate, up, down, router, activation
        self._kernels = kernels

    @torch.no_grad()
    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """The sum, over the experts that each token of x [tokens, width] selected, of their outputs times their shares;
        chosen, shares [tokens, top_k]."""
        top_k = chosen.shape[1]
        flat = chosen.reshape(-1).numpy()
        places = np.empty(len(flat), np.int32)
        places[np.argsort(flat, kind="stable")] = np.arange(len(flat), dtype=np.int32)
        mixed = self._outputs(x.float().contiguous(), flat, places, top_k)
        by_rank = mixed[torch.from_numpy(places).long()].view(len(x), top_k, -1)
        total = torch.zeros(by_rank.shape[0], by_rank.shape[2])
        for rank in range(top_k):
            total += by_rank[:, rank] * shares[:, rank, None].float()
        return total.to(x.dtype)

    def _outputs(self, x: torch.Tensor, chosen: Any, places: Any, top_k: int) -> torch.Tensor:
        """float32 [pairs, width], indexed by places."""
        first = np.zeros(self.up.count + 1, np.int32)
        first[1:] = np.bincount(chosen, minlength=self.up.count).cumsum()
        inner = torch.empty(len(places), self.down.first.k)
        mixed = torch.empty(len(places), self.down.first.n)
        pairs = Pairs(self.up.count, top_k, first.ctypes.data, places.ctypes.data)
        rows = [(each.data_ptr(), each.shape[1]) for each in (x, inner, mixed)]
        gate = None if self.gate is None else self.gate.matrix
        ops = [
            gated_experts_op(pairs, gate, self.up.matrix, rows[0], rows[1], self.activation),
            experts_op(pairs, self.down.matrix, rows[1], rows[2], False),
        ]
        self._kernels.run(op_pointers(ops), 2, Step(num_tokens=len(x)))
        return mixed


def packed_routers(model: nn.Module) -> Iterator[tuple[Any, NativeExperts]]:
    """The routers of layers with packed experts that include the router's weight."""
    for parent in model.modules():
        if isinstance(experts := getattr(parent, "experts", None), NativeExperts):
            yield router_linear(router_of(parent)), experts
