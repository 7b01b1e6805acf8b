"""The batch-invariant product equals the product in float64, and a row of it is the same beside any others."""

from __future__ import annotations

import pytest
import torch

from llmbackend.engine.gpu.kernels.matmul import invariant_matmul
from tests.helpers.gpu.kernel_device import DEVICE

DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHAPES = [(33, 50), (140, 129)]
"""(n, k), no multiples of a tile among them."""


def operands(num_rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x and weight within memory that is NaN around them, and a bias."""
    generator = torch.Generator().manual_seed(n + k)

    def draw(*shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        memory = torch.full((count + 128,), float("nan"), dtype=dtype, device=DEVICE)
        memory[64:-64] = torch.randn(count, generator=generator).to(DEVICE)
        return memory[64:-64].view(shape)

    return draw(num_rows, k), draw(n, k), draw(n)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    memory = torch.full((len(x) + 1, len(weight)), float("nan"), dtype=x.dtype, device=DEVICE)
    invariant_matmul(x, weight, bias, memory[:-1])
    assert memory[-1].isnan().all()
    return memory[:-1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("num_rows", [3, 70, 270])
def test_equals_the_product_in_float64(num_rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = operands(num_rows, n, k, dtype)
    plain = x.double() @ weight.double().T
    tolerance = {"rtol": DTYPES[dtype], "atol": DTYPES[dtype] * k**0.5 / 4}
    torch.testing.assert_close(product(x, weight, None).double(), plain, **tolerance)
    torch.testing.assert_close(product(x, weight, bias).double(), plain + bias.double(), **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_beside_any_others_bit_by_bit(dtype: torch.dtype) -> None:
    x, weight, bias = operands(260, 160, 200, dtype)
    together = product(x, weight, bias)
    for rows in (slice(0, 1), slice(259, 260), slice(60, 69), slice(30, 130)):
        assert torch.equal(product(x[rows].contiguous(), weight, bias), together[rows])


def test_no_rows_are_no_product() -> None:
    x, weight, bias = operands(0, 5, 7, torch.float32)
    assert product(x, weight, bias).shape == (0, 5)
