"""Linear layers with weights packed once for oneDNN: the CPU's answer to where a decode step spends its time.

For: the loader, which swaps a model's linear layers when it runs on CPU. Does not know: models. Invariant: a row of the
output depends on that row of the input alone, bit by bit: oneDNN's packed kernels treat rows alike from two rows up,
so a single row is computed as two (plain `F.linear` changes kernels with the number of rows, and results with it).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

# The number of rows that oneDNN is told to pack for; any from 16 to 512 gave the same layout and speed.
_PACK_ROWS = 64


def has_native(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of this type faster than float32 ones."""
    if dtype == torch.bfloat16:
        return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.cpu._is_amx_fp16_supported())
    return dtype == torch.float32


class PackedLinear(nn.Module):
    """y = x·Wᵀ + b for x [..., in_features] in the model's dtype.

    compute_dtype is the type of the packed weight and of the product. Where the CPU has no bfloat16 products,
    widening the same bfloat16 weights to float32 at load is exact and about three times as fast; outputs are rounded
    to x's type.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._compute_dtype = compute_dtype
        # Some models ask for the weight's type; to compute with this one is an error.
        self.weight = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        widened = weight.detach().to(compute_dtype).contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(widened, _PACK_ROWS)
        self._bias = None if bias is None else bias.detach().to(compute_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        count = rows.shape[0]
        if count == 0:
            return x.new_empty((*x.shape[:-1], self.out_features))
        if count == 1:
            rows = rows.expand(2, -1).contiguous()
        wide = rows.to(self._compute_dtype)
        y = torch.ops.mkldnn._linear_pointwise(wide, self._packed, self._bias, "none", [], "")
        output: torch.Tensor = y[:count].to(x.dtype).view(*x.shape[:-1], self.out_features)
        return output


def pack_linears(model: nn.Module, dtype: torch.dtype) -> str:
    """Swaps every plain linear layer of the model in place. Returns one word about how they compute now."""
    compute_dtype = dtype if has_native(dtype) else torch.float32
    if compute_dtype != dtype and not _fits(model, compute_dtype):
        compute_dtype = dtype
    if compute_dtype == torch.float16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "torch"
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # Exact types only: a subclass may compute something else.
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child.weight, child.bias, compute_dtype))
            elif type(child) is Conv1D:
                transposed: Any = child
                setattr(parent, name, PackedLinear(transposed.weight.t(), transposed.bias, compute_dtype))
    return f"packed {str(compute_dtype).removeprefix('torch.')}"


def _fits(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the widened weights leave half of the free memory to the rest."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear | Conv1D)]
    wanted = sum(weight.numel() for weight in weights) * dtype.itemsize
    return bool(wanted < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
