"""Weights in device memory, dense or in 8 bits, and layers that multiply by quantised ones.

Used by the loader on an accelerator, and by programs that multiply by the loaded weights. Invariants: each matrix is in
memory once, adjacent to its neighbours, and modules and programs read the same memory; an 8-bit weight has a scale per
output, and its input a scale per token that depends only on that token, so the result of a token depends on no other.
8-bit products are torch's own (_scaled_mm, which torchao calls too; importing torchao would take as long as importing
torch with its whole compiler), and on a GPU, for int8 and for shapes that torch refuses, a kernel that also applies the
scales. The library's support for per-row scales is incomplete: users of torch 2.10 and newer report that it refuses few
rows with a long k on Hopper, and all shapes on compute capability 12.0. So each shape is tried once per process, at its
first use, before the engine takes requests and outside captured graphs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, Protocol, cast, runtime_checkable

import torch
from torch import nn

from ...kernels.weights import NEIGHBOURS

logger = logging.getLogger(__name__)

NEVER: Final = sys.maxsize
_PROBED_ROWS = (1, 16, 32, 64, 128, 256, 257, 512, 2048)


@cache
def min_library_rows(n: int, k: int, device: torch.device) -> int:
    """Minimum number of rows that the library multiplies by weights [n, k]; NEVER = it refuses them all."""
    weight, least, why = torch.zeros((n, k), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn), NEVER, ""
    for count in reversed(_PROBED_ROWS):
        if why := _why_refused(count, weight):
            break
        least = count
    if why:
        taken = "none" if least == NEVER else f"{least} rows and more"
        logger.warning("fp8 by [%d, %d]: torch takes %s, the engine's kernel the rest (%s)", n, k, taken, why)
    return least


def multiply_by_library(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor
) -> None:
    """out [T, n] = (x * x_scale) · (weight * scale[:, None])ᵀ; x_scale float32 [T, 1], scale float32 [n]."""
    torch._scaled_mm(x, weight.t(), scale_a=x_scale, scale_b=scale[None], out_dtype=out.dtype, out=out)


def _why_refused(count: int, weight: torch.Tensor) -> str:
    """A refused shape is a RuntimeError of this call only; after the loss of the device, every call would fail."""
    (n, k), device = weight.shape, weight.device
    x = torch.zeros((count, k), dtype=torch.uint8, device=device).view(weight.dtype)
    scales = torch.ones((count, 1), device=device), torch.ones(n, device=device)
    out = torch.empty((count, n), dtype=torch.bfloat16, device=device)
    try:
        multiply_by_library(x, scales[0], weight, scales[1], out)
        if weight.is_cuda:
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


class Matmul(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """out [T, n] = x [T, k] · weight [n, k]ᵀ + bias [n]; all in one dtype, contiguous."""


@dataclass(frozen=True, slots=True, eq=False)
class EightBitRows:
    """A matrix [T, k] with a scale for each row: data * scale."""

    data: torch.Tensor
    """float8_e4m3fn or int8 [T, k], contiguous"""
    scale: torch.Tensor
    """float32 [T, 1]; NaN for a row that is not finite, whose data are undefined."""

    def __len__(self) -> int:
        return len(self.data)


Rows = torch.Tensor | EightBitRows


@runtime_checkable
class DeviceWeight(Protocol):
    """A matrix [n, k] that programs multiply by: dense, quantised, or sharded over several devices."""

    @property
    def n(self) -> int: ...

    @property
    def k(self) -> int:
        """Columns of x in `multiply`."""

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The preferred 8-bit type of x; None = the model's dtype."""

    def multiply(self, matmul: Matmul, x: Rows, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """out [T, n] = x [T, k] · thisᵀ + bias [n], all in the model's dtype, or x in `input_dtype`; products of plain
        matrices use `matmul`."""


def follows(below: torch.Tensor, above: torch.Tensor) -> bool:
    """Whether the rows of `below` follow those of `above` in the same allocation; both are contiguous."""
    if below.untyped_storage().data_ptr() != above.untyped_storage().data_ptr():
        return False
    is_alike = below.dtype == above.dtype and below.shape[1] == above.shape[1]
    return is_alike and below.storage_offset() == above.storage_offset() + above.numel()


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """A matrix [n, k] in the model's dtype, contiguous."""

    tensor: torch.Tensor

    @property
    def n(self) -> int:
        return self.tensor.shape[0]

    @property
    def k(self) -> int:
        return self.tensor.shape[1]

    @property
    def input_dtype(self) -> torch.dtype | None:
        return None

    def multiply(self, matmul: Matmul, x: Rows, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        assert isinstance(x, torch.Tensor), "a dense weight multiplies rows in the model's dtype"
        matmul(x, self.tensor, bias, out)

    def part(self, start: int, n: int) -> DenseWeight:
        """Rows start .. start + n - 1, in the same memory."""
        return DenseWeight(self.tensor[start : start + n])

    def joined(self, other: DenseWeight) -> DenseWeight | None:
        """One matrix with the rows of the other appended, if they are adjacent in memory."""
        if not follows(other.tensor, self.tensor):
            return None
        return DenseWeight(self.tensor.as_strided((self.n + other.n, self.k), (self.k, 1)))

    def rows(self, rows: torch.Tensor) -> DenseWeight:
        """A copy of these rows."""
        return DenseWeight(self.tensor[rows])

    def columns(self, columns: range) -> DenseWeight:
        """A copy of these columns."""
        return DenseWeight(self.tensor[:, columns.start : columns.stop].clone())

    def above(self, other: DenseWeight) -> DenseWeight:
        """A copy with the rows of the other appended."""
        return DenseWeight(torch.cat((self.tensor, other.tensor)))

    def to(self, device: torch.device) -> DenseWeight:
        return DenseWeight(self.tensor.to(device))


@torch.no_grad()
def join_neighbours(model: nn.Module) -> None:
    """Moves the weights of layers with the same input into one allocation, a group at a time; the layers' parameters
    become views of it, and their old memory is freed."""
    for parent in model.modules():
        for names in NEIGHBOURS:
            layers = [getattr(parent, name, None) for name in names]
            # Exact types only: a subclass may interpret its weight differently.
            linears = [layer for layer in layers if type(layer) is nn.Linear]
            if len(linears) == len(names) and len({(x.in_features, x.weight.dtype) for x in linears}) == 1:
                _join(linears)


def _join(linears: list[nn.Linear]) -> None:
    memory = torch.cat([linear.weight for linear in linears])
    parts = torch.split(memory, [linear.out_features for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)


Quantization = Literal["fp8", "int8"]

FP8 = torch.float8_e4m3fn
LARGEST = {FP8: 448.0, torch.int8: 127.0}
TINIEST_SCALE = 1e-12
_DIVISOR = 16
"""n and k of a matrix for 8-bit products are multiples of this."""
_UNTOUCHED = ("gate", "router")
"""Routers of experts: small, and sensitive to rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A matrix [n, k]: data * scale[:, None]."""

    data: torch.Tensor
    """float8_e4m3fn or int8 [n, k]"""
    scale: torch.Tensor
    """float32 [n]"""

    @classmethod
    def of(cls, weight: torch.Tensor, kind: Quantization) -> QuantizedWeight:
        dtype = FP8 if kind == "fp8" else torch.int8
        rows = eight_bit_rows(weight, dtype)
        return cls(rows.data, rows.scale[:, 0].contiguous())

    @property
    def n(self) -> int:
        return self.data.shape[0]

    @property
    def k(self) -> int:
        return self.data.shape[1]

    @property
    def input_dtype(self) -> torch.dtype | None:
        return self.data.dtype

    def multiply(self, matmul: Matmul, x: Rows, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        rows = x if isinstance(x, EightBitRows) else eight_bit_rows(x, self.data.dtype)
        if not self._by_library(len(rows.data)):
            from ..kernels.matmul import scaled_matmul  # imports Triton, which only GPU builds of torch include

            scaled_matmul(rows.data, rows.scale, self.data, self.scale, bias, out)
            return
        if self.data.dtype == FP8:
            multiply_by_library(rows.data, rows.scale, self.data, self.scale, out)
        else:
            out.copy_(torch._int_mm(rows.data, self.data.t()) * rows.scale * self.scale)
        if bias is not None:
            out += bias

    def _by_library(self, num_rows: int) -> bool:
        if self.data.dtype == FP8:
            return num_rows >= min_library_rows(self.n, self.k, self.data.device)
        return not self.data.is_cuda

    def part(self, start: int, n: int) -> QuantizedWeight:
        return QuantizedWeight(self.data[start : start + n], self.scale[start : start + n])

    def joined(self, other: QuantizedWeight) -> QuantizedWeight | None:
        """As DenseWeight.joined."""
        if not follows(other.data, self.data):
            return None
        n = self.n + other.n
        return QuantizedWeight(self.data.as_strided((n, self.k), (self.k, 1)), self.scale.as_strided((n,), (1,)))

    def rows(self, rows: torch.Tensor) -> QuantizedWeight:
        return QuantizedWeight(as_bytes(self.data)[rows].view(self.data.dtype), self.scale[rows])

    def columns(self, columns: range) -> QuantizedWeight:
        return QuantizedWeight(self.data[:, columns.start : columns.stop].contiguous(), self.scale)

    def above(self, other: QuantizedWeight) -> QuantizedWeight:
        data = torch.cat((as_bytes(self.data), as_bytes(other.data))).view(self.data.dtype)
        return QuantizedWeight(data, torch.cat((self.scale, other.scale)))

    def to(self, device: torch.device) -> QuantizedWeight:
        return QuantizedWeight(self.data.to(device), self.scale.to(device))


class QuantizedLinear(nn.Module):
    """y = x·Wᵀ + bias; replaces an nn.Linear."""

    def __init__(self, quantized: DeviceWeight, bias: nn.Parameter | None) -> None:
        """quantized: on the device that multiplies."""
        super().__init__()
        self.quantized = quantized
        self.bias = bias

    @property
    def out_features(self) -> int:
        return self.quantized.n

    @property
    def in_features(self) -> int:
        return self.quantized.k

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((*x.shape[:-1], self.quantized.n))
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        self.quantized.multiply(torch.mm, flat, self.bias, out.view(-1, self.quantized.n))  # type: ignore[arg-type]
        return out


@torch.no_grad()
def quantize_linears(model: nn.Module, head: nn.Module, kind: Quantization, device: torch.device) -> int:
    """Replaces the linear layers of a model in host memory by quantised ones with weights on the device, a group of
    neighbours at a time, except the head and layers of unsuitable sizes. Returns the number of replaced layers."""
    num_changed = 0
    for parent in list(model.modules()):
        linears = {name: child for name, child in parent.named_children() if is_quantizable(name, child, head)}
        groups = [names for names in NEIGHBOURS if all(name in linears for name in names)]
        alone = [(name,) for name in linears if not any(name in names for names in groups)]
        for names in (*groups, *alone):
            group = [cast(nn.Linear, linears[name]) for name in names]
            for name, layer in zip(names, _quantized_layers(group, kind, device), strict=True):
                setattr(parent, name, layer)
            num_changed += len(group)
    return num_changed


def _quantized_layers(group: list[nn.Linear], kind: Quantization, device: torch.device) -> Iterator[QuantizedLinear]:
    """The layers of the group, their weights adjacent in memory."""
    whole, start = QuantizedWeight.of(torch.cat([linear.weight for linear in group]), kind).to(device), 0
    for linear in group:
        bias = cast("nn.Parameter | None", linear.bias)
        yield QuantizedLinear(whole.part(start, linear.out_features), bias)
        start += linear.out_features


def is_quantizable(name: str, module: nn.Module, head: nn.Module) -> bool:
    """name: the module's name in its parent."""
    if type(module) is not nn.Linear or module is head or name in _UNTOUCHED:
        return False
    return module.in_features % _DIVISOR == 0 and module.out_features % _DIVISOR == 0


def check_device(kind: Quantization, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError if the device cannot multiply by such weights."""
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
        raise ValueError(f"{subject}, expected null where the model's dtype is {shown}: GPU products return bfloat16")


def eight_bit_rows(x: torch.Tensor, dtype: torch.dtype) -> EightBitRows:
    largest = LARGEST[dtype]
    size = x.abs().amax(dim=-1, keepdim=True).float()
    scale = (size / largest).clamp(min=TINIEST_SCALE).masked_fill(~size.isfinite(), float("nan"))
    numbers = (x.float() / scale).clamp(-largest, largest).nan_to_num(0.0)
    return EightBitRows((numbers if dtype == FP8 else numbers.round()).to(dtype), scale)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """8-bit types as bytes: torch supports 8-bit floats only in some operations."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
