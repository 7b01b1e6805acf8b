"""All ways in which programs multiply by a matrix, in the shapes of real models, with random numbers.

Used by product_parity.py and product_times.py. Independent of tolerances and times. Invariants: rows are given in each
implementation's best format, so that rounding them does not count; the values represented by an implementation's
numbers are known exactly or within the bound that it states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

from .shapes import Shape

GROUP_SIZE = 128
"""Of weights of 4 bits; most checkpoints have this one."""


def products(shape: Shape) -> dict[str, tuple[int, int]]:
    """Columns of the output and of the input, by the product's name; layers of one input are one product."""
    sizes = {name.rpartition(".")[2]: size for name, size in shape.linears().items()}
    joined = {
        "qkv": ("q_proj", "k_proj", "v_proj"),
        "out": ("o_proj",),
        "gate and up": ("gate_proj", "up_proj"),
        "down": ("down_proj",),
    }
    return {name: (sum(sizes[part][0] for part in parts), sizes[parts[0]][1]) for name, parts in joined.items()}


@dataclass(frozen=True, eq=False)
class Way:
    kind: str
    weight: Any
    """A DeviceWeight [n, k]."""
    matmul: Any
    plain: Any
    """float32 [n, k]: what the weight stands for, or was made of."""
    max_error: float
    """Of all numbers of a product together, relative to float32's by `plain`."""

    def rows(self, x: Any) -> Any:
        """x as the program gives it to this weight."""
        from llmbackend.engine.gpu.weights.dense import eight_bit_rows

        return x if self.weight.input_dtype is None else eight_bit_rows(x, self.weight.input_dtype)

    def multiply(self, rows: Any, out: Any) -> None:
        self.weight.multiply(self.matmul, rows, None, out)

    @property
    def num_bytes(self) -> int:
        """Of the weight."""
        return sum(part.nbytes for part in self._tensors().values())

    def again(self) -> Way:
        """The same in other memory."""
        return replace(self, weight=replace(self.weight, **{k: v.clone() for k, v in self._tensors().items()}))

    def _tensors(self) -> dict[str, Any]:
        import torch

        parts = {field.name: getattr(self.weight, field.name) for field in fields(self.weight)}
        return {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}


def way(kind: str, n: int, k: int, random: Any) -> Way:
    """kind: of KINDS. random: the generator of all numbers, on their device."""
    return _MAKERS[kind](n, k, random)


def _dense(kind: str, n: int, k: int, random: Any) -> Way:
    from llmbackend.engine.gpu.kernels.matmul import invariant_matmul
    from llmbackend.engine.gpu.program import library_matmul
    from llmbackend.engine.gpu.weights.dense import DenseWeight

    weight = _drawn(n, k, random)
    matmul = library_matmul if kind == "bfloat16" else invariant_matmul
    return Way(kind, DenseWeight(weight), matmul, weight.float(), 6e-3)


def _eight_bits(kind: Literal["int8", "fp8"], n: int, k: int, random: Any) -> Way:
    from llmbackend.engine.gpu.program import library_matmul
    from llmbackend.engine.gpu.weights.dense import QuantizedWeight

    weight = _drawn(n, k, random)
    bound = 2.5e-2 if kind == "int8" else 5e-2
    return Way(kind, QuantizedWeight.of(weight, kind), library_matmul, weight.float(), bound)


def _int4(has_zero: bool, n: int, k: int, random: Any) -> Way:
    import torch

    from llmbackend.engine.gpu.weights.int4 import Int4Weight

    def numbers(*shape: int) -> Any:
        return torch.randint(0, 16, shape, dtype=torch.uint8, generator=random, device=random.device)

    groups = -(-k // GROUP_SIZE)
    scale = torch.rand(n, groups, generator=random, device=random.device).add_(0.5).mul_(0.2 * k**-0.5).half()
    weight = Int4Weight.of(numbers(n, k), scale, numbers(n, groups) if has_zero else None, GROUP_SIZE)
    return Way("int4 with zeros" if has_zero else "int4", weight, None, weight.dense(torch.float32), 6e-3)


def _drawn(n: int, k: int, random: Any) -> Any:
    import torch

    return torch.randn(n, k, generator=random, device=random.device).bfloat16() * k**-0.5


_MAKERS: dict[str, Callable[[int, int, Any], Way]] = {
    "bfloat16": partial(_dense, "bfloat16"),
    "own kernel": partial(_dense, "own kernel"),
    "int8": partial(_eight_bits, "int8"),
    "fp8": partial(_eight_bits, "fp8"),
    "int4": partial(_int4, False),
    "int4 with zeros": partial(_int4, True),
}
KINDS = tuple(_MAKERS)
