"""The fused kernels and those of sampling compile to machine code, and next to nothing is spilled."""

from __future__ import annotations

import pytest

from tests.helpers.gpu.compile_kernels import Compiled, Launch, compile_together
from tests.helpers.gpu.fused_launches import launch_drafts, launch_operations
from tests.helpers.gpu.sampling_launches import launch_sampling

AllCompiled = dict[tuple[Launch, int], list[Compiled]]

pytestmark = pytest.mark.timeout(600)  # the first test compiles for all


@pytest.fixture(scope="module")
def compiled() -> AllCompiled:
    hopper = ((launch, 90) for launch in (launch_operations, launch_sampling, launch_drafts))
    return compile_together(*hopper, (launch_drafts, 80))


def test_operations_compile_for_hopper(compiled: AllCompiled) -> None:
    kernels = compiled[launch_operations, 90]
    assert {kernel.name for kernel in kernels} == {
        "embed_kernel", "residual_norm_kernel", "rotary_kernel", "gate_kernel", "step_inputs_kernel",
        "put_tokens_kernel", "move_blocks_kernel",
    }  # fmt: skip
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.registers <= 80, kernel


@pytest.mark.parametrize("capability", [80, 90])
def test_drafts_compile(compiled: AllCompiled, capability: int) -> None:
    kernels = compiled[launch_drafts, capability]
    assert {kernel.name for kernel in kernels} == {"look_up_kernel", "begin_drafts_kernel", "accept_drafts_kernel"}
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.registers <= 80, kernel


def test_sampling_compiles_for_hopper(compiled: AllCompiled) -> None:
    kernels = compiled[launch_sampling, 90]
    assert {kernel.name for kernel in kernels} == {
        "summarise_kernel", "choose_kernel", "choose_pivots_kernel", "measure_splits_kernel", "collect_bins_kernel",
        "draw_limited_kernel", "slots_kernel", "copy_kernel", "edit_kernel", "logprobs_kernel", "mask_kernel",
    }  # fmt: skip
    for kernel in kernels:
        assert kernel.stack_bytes <= 128, kernel
        assert kernel.shared_bytes <= 48 * 1024, kernel
        if kernel.name in ("choose_pivots_kernel", "measure_splits_kernel"):
            # Three programs of those that share a row's passes run at a time on a multiprocessor of 65,536 registers.
            assert kernel.registers * 32 * kernel.num_warps <= 65536 // 3, kernel
