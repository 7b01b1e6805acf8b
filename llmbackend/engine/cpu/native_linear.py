"""Linear layers on native kernels: what the loader puts in the place of a model's own on CPU.

For: models that run as transformers modules, and as the owner of the packed weights of those that run as a program.
Does not know: models. Invariant: a row of the output depends on that row of the input alone, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from llmbackend.engine.kernels.abi import Epilogue, Kind, LinearOp, Rows, Step, Type
from llmbackend.engine.kernels.library import NativeEngine, op_pointers
from llmbackend.engine.kernels.weights import TYPE_OF, PackedWeight, WeightStore, release_pages
from llmbackend.engine.load_progress import counted


class NativeLinear(nn.Module):
    """y = x·Wᵀ + b for x [..., in_features] in the model's dtype, float32 or bfloat16."""

    def __init__(
        self, engine: NativeEngine, packed: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = packed.k, packed.n
        self.packed = packed
        self.float_bias = None if bias is None else bias.detach().float().contiguous()
        # Some models ask for the weight's type; to compute with this one is an error.
        self.weight = torch.empty((packed.n, packed.k), dtype=dtype, device="meta")
        self._engine = engine
        self._op = LinearOp(
            kind=Kind.LINEAR,
            rows=Rows.TOKENS,
            weight=packed.address,
            scale=packed.scale or None,
            sums=packed.sums or None,
            bias=None if self.float_bias is None else self.float_bias.data_ptr(),
            n=packed.n,
            k=packed.k,
            x_stride=packed.k,
            y_stride=packed.n,
            weight_type=packed.type,
            epilogue=Epilogue.STORE,
            factor=1.0,
        )
        self._pointers = op_pointers([self._op])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        y = rows.new_empty((rows.shape[0], self.out_features))
        op = self._op
        op.x, op.x_type, op.y, op.y_type = rows.data_ptr(), TYPE_OF[rows.dtype], y.data_ptr(), TYPE_OF[y.dtype]
        self._engine.run(self._pointers, 1, Step(num_tokens=rows.shape[0]))
        return y.view(*x.shape[:-1], self.out_features)


def swap_linears(model: Any, engine: NativeEngine, quantization: str | None) -> None:
    """Packs and replaces every plain linear layer of a float32 or bfloat16 model in place.

    quantization "int8": all of these weights become int8, the output head's among them, which costs a tenth of a
    percent of greedy agreement (benchmarks/quantization_quality.py) and saves a quarter of what a token reads.
    """
    found = list(_plain_linears(model))
    matrices = [_matrix(linear) for _, _, linear in found]
    types = [Type.INT8 if quantization == "int8" else TYPE_OF[matrix.dtype] for matrix in matrices]
    store = WeightStore(engine, [(*matrix.shape, kind) for matrix, kind in zip(matrices, types, strict=True)])
    shared = _shared_addresses(model)
    parts = list(zip(found, matrices, types, strict=True))
    for (parent, name, linear), matrix, kind in counted("packing weights", parts):
        packed = store.pack(matrix, kind)
        setattr(parent, name, NativeLinear(engine, packed, linear.bias, matrix.dtype))
        if linear.weight.data_ptr() not in shared:
            release_pages(linear.weight)


def _plain_linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Parent, name and layer. Exact types only: a subclass may compute something else."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear or type(child) is Conv1D:
                yield parent, name, child


def _matrix(linear: Any) -> torch.Tensor:
    """The weight as [out_features, in_features]; Conv1D keeps it the other way round."""
    weight: torch.Tensor = linear.weight.detach()
    return weight.t() if type(linear) is Conv1D else weight


def _shared_addresses(model: nn.Module) -> set[int]:
    """Where weights lie that more than one module holds: tied embeddings are still read after they are packed."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            address = parameter.data_ptr()
            (shared if address in seen else seen).add(address)
    return shared
