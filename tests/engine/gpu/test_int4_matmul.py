"""Products by weights of 4 bits: equal to those of the numbers they stand for, whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch

from llmbackend.engine.errors import UnshardableError
from llmbackend.engine.gpu.kernels.matmul import choose_int4_tile, int4_matmul
from llmbackend.engine.gpu.weights.int4 import Int4Weight
from tests.helpers.gpu.compile_kernels import compile_together
from tests.helpers.gpu.int4_launches import launch_int4, launch_int4_of_many_rows
from tests.helpers.gpu.kernel_device import DEVICE

DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHAPES = [(50, 192, 32), (33, 160, 64), (70, 300, 128), (40, 136, 136)]
"""(n, k, size of groups): no multiples of a tile or of a block, a last group that is smaller, one group."""


def weight_of(n: int, k: int, group_size: int, has_zero: bool = True, exact: bool = False) -> Int4Weight:
    draw = torch.Generator().manual_seed(n + k)
    numbers = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=draw)
    groups = -(-k // group_size)
    scale = torch.rand(n, groups, generator=draw).mul_(0.2).add_(0.01).half()
    zero = torch.randint(0, 16, (n, groups), dtype=torch.uint8, generator=draw) if has_zero else None
    return Int4Weight.of(numbers, scale, zero, group_size, exact).to(DEVICE)


def rows_of(count: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Within memory that is NaN around them."""
    memory = torch.full((count * k + 128,), float("nan"), dtype=dtype, device=DEVICE)
    memory[64:-64] = torch.randn(count * k, generator=torch.Generator().manual_seed(count)).to(DEVICE)
    return memory[64:-64].view(count, k)


def product(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    memory = torch.full((len(x) + 1, weight.n), float("nan"), dtype=x.dtype, device=DEVICE)
    parts = weight.data, weight.scale, weight.zero, weight.group_size, weight.slab
    int4_matmul(x, *parts, bias, memory[:-1], weight.exact)
    assert memory[-1].isnan().all()
    return memory[:-1]


def expected(x: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    return x.double() @ weight.dense(torch.float32).double().t()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
@pytest.mark.parametrize("num_rows", [3, 20, 70])
def test_equals_the_product_in_float64(num_rows: int, n: int, k: int, group_size: int, dtype: torch.dtype) -> None:
    weight, x = weight_of(n, k, group_size, has_zero=num_rows != 20), rows_of(num_rows, k, dtype)
    bias = torch.linspace(-2, 2, n, device=DEVICE).to(dtype)
    tolerance = {"rtol": DTYPES[dtype], "atol": DTYPES[dtype] * k**0.5}
    torch.testing.assert_close(product(x, weight).double(), expected(x, weight), **tolerance)
    torch.testing.assert_close(product(x, weight, bias).double(), expected(x, weight) + bias.double(), **tolerance)


def test_many_rows() -> None:
    weight, x = weight_of(150, 192, 64), rows_of(270, 192, torch.bfloat16)
    torch.testing.assert_close(product(x, weight).double(), expected(x, weight), rtol=1.6e-2, atol=0.2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_beside_any_others_bit_by_bit(dtype: torch.dtype) -> None:
    """Nor does a row that is not finite change another."""
    weight, x = weight_of(130, 200, 32, exact=True), rows_of(260, 200, dtype)
    together = product(x, weight)
    for rows in (slice(0, 1), slice(259, 260), slice(60, 69), slice(30, 130)):
        assert torch.equal(product(x[rows].contiguous(), weight), together[rows])
    x[1], x[3, 0] = float("nan"), float("inf")
    spoilt = product(x[:9].contiguous(), weight)
    assert torch.equal(spoilt[4:], together[4:9]) and torch.equal(spoilt[2], together[2])
    assert spoilt[1].isnan().all() and not spoilt[3].isfinite().any()


def test_numbers_less_their_zero_are_exact_in_both_types_of_16_bits() -> None:
    """As the kernel unpacks them; the interpreter has no bfloat16."""
    for dtype, bits, large in ((torch.bfloat16, 0x4300, 128), (torch.float16, 0x6400, 1024)):
        numbers = torch.arange(16, dtype=torch.int16)
        unpacked = (numbers | bits).view(dtype)
        for zero in range(16):
            assert torch.equal((unpacked - torch.tensor(large + zero, dtype=dtype)).float(), (numbers - zero).float())


def test_parts_and_neighbours_are_of_one_memory() -> None:
    whole, x = weight_of(48, 192, 64), rows_of(3, 192, torch.float32)
    above, below = whole.part(0, 16), whole.part(16, 32)
    joined = above.joined(below)
    assert joined is not None and joined.n == 48 and joined.data.data_ptr() == whole.data.data_ptr()
    assert below.joined(above) is None
    rows = torch.tensor([40, 2, 7])
    together = product(x, whole)
    assert torch.equal(product(x, joined), together) and torch.equal(product(x, below), together[:, 16:])
    assert torch.equal(product(x, whole.rows(rows)), together[:, rows])
    plain = weight_of(48, 192, 64, has_zero=False)
    both = torch.cat((whole.dense(torch.float32), plain.dense(torch.float32)))
    assert torch.equal(whole.above(plain).dense(torch.float32), both)


def test_numbers_may_lie_in_any_order() -> None:
    """Two of the formats store them column by column."""
    plain, x = weight_of(48, 192, 64), rows_of(3, 192, torch.float32)
    turned = plain.numbers().t().contiguous().t()
    assert plain.zero is not None
    made = Int4Weight.of(turned, plain.scale.t(), plain.zero.t(), 64)
    assert torch.equal(product(x, made), product(x, plain))


@pytest.mark.parametrize("group_size", [64, 192])
def test_columns_may_cut_groups_in_two(group_size: int) -> None:
    whole = weight_of(5, 192, group_size)
    for columns in (range(96), range(96, 192), range(64, 192)):
        cut = whole.columns(columns)
        assert torch.equal(cut.dense(torch.float32), whole.dense(torch.float32)[:, columns.start : columns.stop])


def test_columns_that_leave_no_group_are_refused() -> None:
    with pytest.raises(UnshardableError, match=r"a 4-bit matrix of 192 columns at \[0, 48\], expected multiples"):
        weight_of(5, 192, 64).columns(range(48))


def test_no_rows_are_no_product() -> None:
    assert product(rows_of(0, 160, torch.float32), weight_of(33, 160, 64)).shape == (0, 33)


def test_tiles_of_exact_products_are_of_one_kind_of_instruction() -> None:
    assert all(
        choose_int4_tile(count, torch.bfloat16, exact=True).columns >= 64 for count in (1, 16, 17, 64, 65, 256, 257)
    )


@pytest.mark.timeout(600)  # another process imports torch and compiles
def test_it_compiles() -> None:
    launches = (launch_int4, 80), (launch_int4, 90), (launch_int4_of_many_rows, 86)
    shared_bytes = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}
    for (_, capability), compiled in compile_together(*launches).items():
        assert {kernel.name for kernel in compiled} == {"int4_matmul_kernel"}
        for kernel in compiled:
            assert kernel.stack_bytes <= (0 if capability == 90 else 24), kernel  # 24: the largest tile alone
            assert kernel.shared_bytes <= shared_bytes[capability], kernel
