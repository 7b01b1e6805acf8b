"""The experts of a layer on the native kernels: packed one after the other, in the place of transformers' module.

For: the loader, descriptions. Does not know: how tokens choose experts, families. Invariant: a row of the output
depends on that row of the input, its experts and shares alone, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from ..cpu.native_memory import release_pages
from ..gpu.ops.ops import ACTIVATIONS, Activation, gated
from ..kernels.expert_layout import MOST_EXPERTS, ExpertMatrix, Pairs, experts_op, steps_of
from ..kernels.library import Epilogue, NativeKernels, Step, Type, op_pointers
from ..kernels.weights import TYPE_OF, PackedWeight, WeightStore

EPILOGUES: Final[dict[Activation, Epilogue]] = {
    "silu": Epilogue.SILU_MUL, "gelu_tanh": Epilogue.GELU_MUL, "swigluoai": Epilogue.SWIGLU_OAI,
}  # fmt: skip
_WEIGHTS: Final = {"gate_up_proj", "down_proj"}
_BIASES: Final = {"gate_up_proj_bias", "down_proj_bias"}


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """A matrix [n, k] for each expert."""

    first: PackedWeight
    """Of expert 0; the others follow."""
    count: int
    bias: torch.Tensor | None
    """float32 [count, n]"""

    @property
    def matrix(self) -> ExpertMatrix:
        first = self.first
        bias = None if self.bias is None else self.bias.data_ptr()
        return ExpertMatrix(first.address, first.scale or None, first.sums or None, first.n, first.k, first.type, bias)


def activation_of(experts: Any) -> Activation | None:
    """Recognised by what it computes of gates and ups, beyond any bound."""
    x = 12 * torch.arange(1.0, 513.0).sin().view(4, 128)
    given = experts._apply_gate(x) if hasattr(experts, "_apply_gate") else None
    for name in ACTIVATIONS:
        if given is not None and torch.allclose(given, gated(x, name), rtol=1e-5, atol=1e-5):
            return name
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Plain:
    """Experts of transformers, and the layer's router."""

    parent: nn.Module
    experts: Any
    router: Any
    activation: Activation

    @property
    def gate_up(self) -> torch.Tensor:
        """[experts, 2 * n, width]"""
        return self._by_output("gate_up_proj")

    @property
    def down(self) -> torch.Tensor:
        return self._by_output("down_proj")

    def _by_output(self, name: str) -> torch.Tensor:
        weight: torch.Tensor = getattr(self.experts, name).detach()
        return weight.transpose(1, 2) if getattr(self.experts, "is_transposed", False) else weight

    def split(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gates and ups, of which there are as many in the second dimension."""
        if self.activation == "swigluoai":
            return gate_up[:, ::2], gate_up[:, 1::2]
        half = gate_up.shape[1] // 2
        return gate_up[:, :half], gate_up[:, half:]

    def bias(self, name: str) -> torch.Tensor | None:
        bias = getattr(self.experts, f"{name}_bias", None)
        return None if bias is None else bias.detach().float()


def router_of(parent: Any) -> Any:
    """What chooses the experts of this module; None: it has none."""
    return getattr(parent, "router", getattr(parent, "gate", None))


def _plain_experts(model: nn.Module) -> Iterator[_Plain]:
    for parent in list(model.modules()):
        experts = getattr(parent, "experts", None)
        router = router_of(parent)
        if isinstance(experts, nn.Module) and isinstance(router, nn.Module) and _fits(experts, router):
            activation = activation_of(experts)
            if activation is not None:
                yield _Plain(parent, experts, router, activation)


def _fits(experts: Any, router: Any) -> bool:
    """Whether the matrices are those of gates, ups and downs, of equal shape for all experts."""
    names = {name for name, _ in experts.named_parameters()}
    weight = getattr(router, "weight", None)
    if not _WEIGHTS <= names <= _WEIGHTS | _BIASES or weight is None or weight.dim() != 2:
        return False
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if gate_up.dim() != 3 or down.dim() != 3 or gate_up.dtype not in TYPE_OF:
        return False
    count, width = weight.shape
    if getattr(experts, "is_transposed", False):
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    n = down.shape[2]
    shapes = (tuple(gate_up.shape), tuple(down.shape))
    return count <= MOST_EXPERTS and shapes == ((count, 2 * n, width), (count, width, n))


class ExpertsToPack:
    """The experts of a model that native kernels multiply by."""

    def __init__(self, model: nn.Module, quantization: str | None) -> None:
        self._found = list(_plain_experts(model))
        self._kind = {"int8": Type.INT8, "int4": Type.INT4_MIN}.get(quantization or "")

    @property
    def shapes(self) -> list[tuple[int, int, Type]]:
        """(n, k, type) of all matrices in the order in which they are packed."""
        shapes: list[tuple[int, int, Type]] = []
        for plain in self._found:
            count, width, n = plain.down.shape
            kind = self._type_of(plain)
            shapes += [(n, width, kind)] * (2 * count) + [(width, n, kind)] * count
            shapes.append((count, width, TYPE_OF[plain.router.weight.dtype]))
        return shapes

    @property
    def vector_bytes(self) -> int:
        """Room for biases and routers' vectors as float32, each beginning anew in a cache line."""
        tensors = (tensor for plain in self._found for tensor in (*plain.experts.parameters(), *plain.router.buffers()))
        return sum(4 * each.numel() + 3 * 64 for each in tensors if each.dim() < 3)

    def pack(self, store: WeightStore, kernels: NativeKernels) -> None:
        """Replaces the modules, layer by layer."""
        for plain in self._found:
            experts = self._packed(plain, store, kernels)
            for name in _WEIGHTS:
                weight = getattr(plain.experts, name)
                if not weight.is_meta:
                    release_pages(weight.data_ptr(), weight.nbytes)
                delattr(plain.experts, name)
            plain.parent.experts = experts

    def _type_of(self, plain: _Plain) -> Type:
        return self._kind or TYPE_OF[plain.down.dtype]

    def _packed(self, plain: _Plain, store: WeightStore, kernels: NativeKernels) -> NativeExperts:
        kind, gate_up_bias = self._type_of(plain), plain.bias("gate_up_proj")
        biases = (None, None) if gate_up_bias is None else plain.split(gate_up_bias)
        gate, up = (
            _packed(store, part, kind, bias) for part, bias in zip(plain.split(plain.gate_up), biases, strict=True)
        )
        down = _packed(store, plain.down, kind, plain.bias("down_proj"))
        router = store.pack(plain.router.weight, TYPE_OF[plain.router.weight.dtype])
        return NativeExperts(kernels, gate, up, down, router, plain.activation)


def _packed(store: WeightStore, matrices: torch.Tensor, kind: Type, bias: torch.Tensor | None) -> PackedExperts:
    packed = [store.pack(matrix, kind) for matrix in matrices]
    first, last, steps = packed[0], packed[-1], steps_of(packed[0].n, packed[0].k, kind)
    moved = (last.address - first.address, last.scale - first.scale, last.sums - first.sums)
    assert moved == tuple(step * (len(packed) - 1) for step in steps), "experts are not placed in equal steps"
    return PackedExperts(first, len(packed), None if bias is None else bias.contiguous())


class NativeExperts(nn.Module):
    """Replaces the experts of transformers."""

    def __init__(
        self, kernels: NativeKernels, gate: PackedExperts, up: PackedExperts, down: PackedExperts,
        router: PackedWeight, activation: Activation,
    ) -> None:  # fmt: skip
        """router: of the layer, packed for a program."""
        super().__init__()
        self.gate, self.up, self.down, self.router, self.activation = gate, up, down, router, activation
        self._kernels = kernels

    @torch.no_grad()
    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """The sum, over the experts that each token of x [tokens, width] chose, of their outputs times their shares;
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
        """float32 [pairs, width], by places."""
        first = np.zeros(self.gate.count + 1, np.int32)
        first[1:] = np.bincount(chosen, minlength=self.gate.count).cumsum()
        inner = torch.empty(len(places), self.down.first.k)
        mixed = torch.empty(len(places), self.down.first.n)
        pairs = Pairs(self.gate.count, top_k, first.ctypes.data, places.ctypes.data)
        rows = [(each.data_ptr(), each.shape[1]) for each in (x, inner, mixed)]
        epilogue = EPILOGUES[self.activation]
        ops = [
            experts_op(pairs, self.gate.matrix, rows[0], rows[1], True, self.up.matrix, epilogue),
            experts_op(pairs, self.down.matrix, rows[1], rows[2], False),
        ]
        self._kernels.run(op_pointers(ops), 2, Step(num_tokens=len(x)))
        return mixed
