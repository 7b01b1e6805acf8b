"""Attention and the batch-invariant product compile to machine code, fit the device and use the instruction that their
laws rest on."""

from __future__ import annotations

import pytest

from tests.helpers.gpu.attention_launches import (
    decode_8_bits,
    decode_16_bits,
    launch_exact,
    launch_plain,
    launch_products,
    launch_wide,
)
from tests.helpers.gpu.compile_kernels import Compiled, Launch, compile_together

pytestmark = pytest.mark.timeout(600)  # the first test compiles for all

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Of one program; a multiprocessor has as much, and 1 KiB, which each of its programs takes."""
REGISTERS = 1 << 16
"""Of a multiprocessor; a warp gets a multiple of 256."""
ADA = (decode_8_bits, 89)
DECODE = (*((decode_16_bits, capability) for capability in (80, 86, 90)), ADA, (decode_8_bits, 90))
ATTENTION = {"prefill_kernel", "decode_kernel", "combine_kernel"}

AllCompiled = dict[tuple[Launch, int], list[Compiled]]


@pytest.fixture(scope="module")
def compiled() -> AllCompiled:
    both = ((launch, capability) for launch in (launch_plain, launch_wide, launch_products) for capability in (80, 90))
    others = (launch for launch in DECODE if launch != ADA)
    # Triton 3.6 converts float8 in the whole process as it did for the first device, which Ada's assembler refuses.
    return compile_together(*both, (launch_plain, 100), *others, (launch_exact, 90)) | compile_together(ADA)


def _by_name(kernels: list[Compiled]) -> dict[str, Compiled]:
    assert {kernel.name for kernel in kernels} == ATTENTION
    return {kernel.name: kernel for kernel in kernels}


def test_attention_fits_ampere_hopper_and_blackwell(compiled: AllCompiled) -> None:
    """Prefill keeps the sums of a split and those merged so far, which wait outside the loop: a few of them in local
    memory."""
    for capability in (80, 90, 100):
        kernels = compiled[launch_plain, capability]
        prefill = _by_name(kernels)["prefill_kernel"]
        # A program that merges splits in memory waits before it reads what its threads stored, and before it stores.
        assert _by_name(kernels)["decode_kernel"].num_barriers == 2
        # Blackwell's own products are not described by warps.
        assert [generation for generation, _, _ in prefill.products] == {80: [2], 90: [3], 100: []}[capability]
        for kernel in kernels:
            assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel
            assert kernel.stack_bytes <= (64 if kernel is prefill else 16), kernel


@pytest.mark.parametrize(("launch", "capability"), DECODE)
def test_all_programs_of_decode_run_at_a_time(compiled: AllCompiled, launch: Launch, capability: int) -> None:
    """At the largest number of sequences, whose list takes registers. Otherwise the last programs start when the
    others end, with the same share of the work each."""
    decode = [kernel for kernel in compiled[launch, capability] if kernel.name == "decode_kernel"]
    assert len(decode) == 3
    for kernel in decode:
        by_registers = REGISTERS // (-(-kernel.registers * 32 // 256) * 256 * kernel.num_warps)
        by_shared_memory = (SHARED_BYTES[capability] + 1024) // (kernel.shared_bytes + 1024)
        assert kernel.programs == min(kernel.programs, by_registers, by_shared_memory) > 0, kernel
        assert kernel.stack_bytes <= (32 if launch is decode_16_bits else 80), kernel


def test_heads_of_256_fit_hopper(compiled: AllCompiled) -> None:
    for name, kernel in _by_name(compiled[launch_wide, 90]).items():
        assert kernel.stack_bytes <= (16 if name == "prefill_kernel" else 32), kernel
        assert kernel.shared_bytes <= SHARED_BYTES[90], kernel


def test_heads_of_256_fit_ampere(compiled: AllCompiled) -> None:
    """Warps share a tile's columns: where they shared its rows, a thread kept half a kilobyte in local memory."""
    kernels = compiled[launch_wide, 80]
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_BYTES[86], kernel
    assert _by_name(kernels)["prefill_kernel"].products == ((2, 1, 8),)


def test_exact_chunks_are_computed_by_the_instruction_of_decode(compiled: AllCompiled) -> None:
    kernels = _by_name(compiled[launch_exact, 90])
    assert kernels["prefill_kernel"].products == kernels["decode_kernel"].products != ()


def test_products_of_any_number_of_rows_are_one_instruction(compiled: AllCompiled) -> None:
    for capability in (80, 90):
        kernels = compiled[launch_products, capability]
        assert len(kernels) == 3
        assert {generation for kernel in kernels for generation, _, _ in kernel.products} == {
            2 if capability == 80 else 3
        }
        for kernel in kernels:
            assert kernel.stack_bytes == 0, kernel
            assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel
