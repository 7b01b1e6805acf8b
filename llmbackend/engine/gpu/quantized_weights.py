"""Weights in 8 bits, and layers that multiply by them: half the memory and half the way from it.

For: the loader on an accelerator, and programs that multiply by what it left there. Does not know: which model a layer
belongs to. Invariants: a weight has a scale for each output, and what it is multiplied by gets one for each token,
found in that token alone, so that a token's result depends on no other; a token that is not finite spoils no other's;
layers and programs multiply by the same memory.
Products are torch's own (_scaled_mm, _int_mm), which torchao calls too: importing torchao costs an engine as long as
torch and all of its compiler, for nothing that is needed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self, cast

import torch
from torch import nn

from .dense_weights import NEIGHBOURS, Matmul

Quantization = Literal["fp8", "int8"]

FP8 = torch.float8_e4m3fn
_LARGEST = {FP8: 448.0, torch.int8: 127.0}
_TINIEST_SCALE = 1e-12
_DIVISOR = 16
"""Of both sizes of a matrix that the products take."""
_FEWEST_ROWS = 32
"""Of what a whole-number product takes on a GPU: it wants more than 16."""
_UNTOUCHED = ("gate", "router")
"""Layers that choose among others: small, and their mistakes are not."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A matrix [n, k]: data, in 8 bits, times scale float32 [n]."""

    data: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, kind: Quantization) -> QuantizedWeight:
        dtype = FP8 if kind == "fp8" else torch.int8
        data, scale = _quantized(weight, dtype)
        return cls(data, scale[:, 0].contiguous())

    @property
    def n(self) -> int:
        return self.data.shape[0]

    @property
    def k(self) -> int:
        return self.data.shape[1]

    def multiply(self, matmul: Matmul, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        numbers, scale = _quantized(x, self.data.dtype)
        if self.data.dtype == FP8:
            weight, scale_b = self.data.t(), self.scale[None]
            torch._scaled_mm(numbers, weight, scale_a=scale, scale_b=scale_b, out_dtype=out.dtype, out=out)
        else:
            rows = nn.functional.pad(numbers, (0, 0, 0, max(_FEWEST_ROWS - len(x), 0)))
            out.copy_(torch._int_mm(rows, self.data.t())[: len(x)] * scale * self.scale)
        if bias is not None:
            out += bias

    def part(self, start: int, n: int) -> QuantizedWeight:
        return QuantizedWeight(self.data[start : start + n], self.scale[start : start + n])

    def joined(self, other: QuantizedWeight) -> QuantizedWeight | None:
        """One matrix with the other's rows below, when both lie so in one piece of memory."""
        above, below = self.data, other.data
        same_memory = above.untyped_storage().data_ptr() == below.untyped_storage().data_ptr()
        if not same_memory or self.k != other.k or below.storage_offset() != above.storage_offset() + above.numel():
            return None
        n = self.n + other.n
        return QuantizedWeight(above.as_strided((n, self.k), (self.k, 1)), self.scale.as_strided((n,), (1,)))

    def rows(self, rows: torch.Tensor) -> QuantizedWeight:
        return QuantizedWeight(_bytes(self.data)[rows].view(self.data.dtype), self.scale[rows])

    def columns(self, columns: range) -> QuantizedWeight:
        return QuantizedWeight(self.data[:, columns.start : columns.stop].contiguous(), self.scale)

    def above(self, other: Self) -> QuantizedWeight:
        data = torch.cat((_bytes(self.data), _bytes(other.data))).view(self.data.dtype)
        return QuantizedWeight(data, torch.cat((self.scale, other.scale)))

    def to(self, device: torch.device) -> QuantizedWeight:
        return QuantizedWeight(self.data.to(device), self.scale.to(device))


class QuantizedLinear(nn.Module):
    """y = x·Wᵀ + bias, in the place of an nn.Linear."""

    def __init__(self, quantized: QuantizedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.quantized = quantized
        self.bias = bias

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((*x.shape[:-1], self.quantized.n))
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        self.quantized.multiply(torch.mm, flat, self.bias, out.view(-1, self.quantized.n))  # type: ignore[arg-type]
        return out


@torch.no_grad()
def quantize_linears(model: nn.Module, head: nn.Module, kind: Quantization, device: torch.device) -> int:
    """Puts quantised layers into a model in host memory, their weights on the device, a group of neighbours at a time.
    Its head stays as it is, and so do layers of sizes that the products do not take. How many it changed."""
    num_changed = 0
    for parent in list(model.modules()):
        linears = {name: child for name, child in parent.named_children() if _is_quantizable(name, child, head)}
        groups = [names for names in NEIGHBOURS if all(name in linears for name in names)]
        alone = [(name,) for name in linears if not any(name in names for names in groups)]
        for names in (*groups, *alone):
            group = [cast(nn.Linear, linears[name]) for name in names]
            for name, layer in zip(names, _quantized_layers(group, kind, device), strict=True):
                setattr(parent, name, layer)
            num_changed += len(group)
    return num_changed


def _quantized_layers(group: list[nn.Linear], kind: Quantization, device: torch.device) -> Iterator[QuantizedLinear]:
    """Side by side in memory."""
    whole, start = QuantizedWeight.of(torch.cat([linear.weight for linear in group]), kind).to(device), 0
    for linear in group:
        bias = cast("nn.Parameter | None", linear.bias)
        yield QuantizedLinear(whole.part(start, linear.out_features), bias)
        start += linear.out_features


def _is_quantizable(name: str, module: nn.Module, head: nn.Module) -> bool:
    if type(module) is not nn.Linear or module is head or name in _UNTOUCHED:
        return False
    return module.in_features % _DIVISOR == 0 and module.out_features % _DIVISOR == 0


def check_device(kind: Quantization, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError when a device cannot multiply by such weights."""
    if device.type != "cuda" or kind == "int8":
        return
    subject = f"engine argument 'quantization' is '{kind}'"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ValueError(
            f"{subject}, which {name} cannot compute with (compute capability {major}.{minor}, expected 8.9 or more)"
        )
    if dtype != torch.bfloat16:
        shown = str(dtype).removeprefix("torch.")
        raise ValueError(f"{subject}, expected null where the model's dtype is {shown}: a GPU's product gives bfloat16")


def _quantized(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of 8 bits [rows, k] and each row's scale float32 [rows, 1]."""
    largest = _LARGEST[dtype]
    scale = (x.abs().amax(dim=-1, keepdim=True).float() / largest).clamp(min=_TINIEST_SCALE)
    numbers = (x.float() / scale).clamp(-largest, largest)
    return (numbers if dtype == FP8 else numbers.round()).to(dtype), scale


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Torch moves plain bytes anywhere, and floats of 8 bits only in places."""
    return x.view(torch.uint8)
