"""Kernels that round rows to 8 bits, alone or behind a norm or a gate, and the product of such rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.gpu.kernels.matmul import scaled_matmul
from llmbackend.engine.gpu.ops.ops import Norm, Ops
from llmbackend.engine.gpu.ops.torch_ops import TorchOps
from llmbackend.engine.gpu.ops.triton_ops import TritonOps
from llmbackend.engine.gpu.weights import dense
from llmbackend.engine.gpu.weights.dense import FP8, EightBitRows, eight_bit_rows
from llmbackend.engine.messages import InferRequest, SamplingParams
from tests.helpers.gpu.compile_kernels import compile_together
from tests.helpers.gpu.eight_bit_launches import launch_eight_bits, launch_whole_numbers
from tests.helpers.gpu.gpu_engines import config_for, gpu_runner
from tests.helpers.gpu.kernel_device import DEVICE, INTERPRETED
from tests.helpers.gpu.tiny_models import FAMILIES, save

KINDS = [FP8, torch.int8]


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def room(rows: int, width: int, kind: torch.dtype) -> EightBitRows:
    data = torch.full((rows, width), 85, dtype=torch.uint8, device=DEVICE).view(kind)
    return EightBitRows(data, torch.full((rows, 1), 99.0, device=DEVICE))


def assert_same(found: EightBitRows, expected: EightBitRows) -> None:
    """Sums in another order may move a number over the border between two neighbours."""
    torch.testing.assert_close(found.scale, expected.scale, rtol=1e-5, atol=0)
    steps = (found.data.view(torch.uint8).int() - expected.data.view(torch.uint8).int()).abs()
    steps = torch.where(expected.data.float() == 0, found.data.float().abs().int(), steps)
    if INTERPRETED and expected.data.dtype == FP8:  # it forgets to carry into the exponent
        steps = torch.where(expected.data.view(torch.uint8) % 8 == 0, 0, steps)
    assert steps.max() <= 1
    assert (steps > 0).float().mean() < 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [64, 2100])
def test_rows_are_rounded_behind_a_norm_a_gate_or_alone(width: int, kind: torch.dtype) -> None:
    norm = Norm(normal(2, width), 1e-5)

    def run(ops: Ops) -> list[EightBitRows]:
        rows = [room(4, width, kind) for _ in range(4)]
        residual, both = normal(0, 4, width), normal(1, 4, 2 * width, dtype=torch.bfloat16)
        ops.residual_norm(residual, both[:, :width].contiguous(), None, 0.5, norm, rows[0])
        ops.gate(both, "silu", rows[1])
        ops.gate(both, "gelu_tanh", rows[2])
        ops.quantize(both[:, :width], rows[3])
        return rows

    for found, expected in zip(run(TritonOps()), run(TorchOps()), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_row_has_no_scale_and_changes_no_other(kind: torch.dtype) -> None:
    x = normal(3, 5, 48, dtype=torch.bfloat16)
    x[1, 7], x[3, 0], x[4] = float("nan"), float("inf"), 0
    out = room(5, 48, kind)
    TritonOps().quantize(x, out)
    assert out.scale.isnan()[:, 0].tolist() == [False, True, False, True, False]
    assert not out.data[4].float().any()
    assert_same(EightBitRows(out.data[::2], out.scale[::2]), eight_bit_rows(x[::2], kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_rows", "n", "k"), [(3, 50, 80), (70, 33, 144), (270, 140, 48)])
def test_a_product_is_that_of_the_numbers(num_rows: int, n: int, k: int, kind: torch.dtype) -> None:
    x, weight = eight_bit_rows(normal(4, num_rows, k), kind), eight_bit_rows(normal(5, n, k), kind)
    bias, out = normal(6, n), torch.full((num_rows + 1, n), float("nan"), device=DEVICE)
    exact = (x.data.double() * x.scale) @ (weight.data.double() * weight.scale).t()
    for given in (None, bias):
        scaled_matmul(x.data, x.scale, weight.data, weight.scale[:, 0].contiguous(), given, out[:-1])
        expected = exact if given is None else exact + given
        # Tensor cores add products of float8 with about 13 bits.
        tolerance = 2e-2 if kind == torch.float8_e4m3fn and not INTERPRETED else 1e-5
        torch.testing.assert_close(out[:-1].double(), expected, rtol=1e-5, atol=tolerance)
    assert out[-1].isnan().all()


def test_a_step_rounds_rows_in_the_kernels_before_its_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(FAMILIES["qwen2"], tmp_path)
    config = config_for(tmp_path, quantization="int8", enforce_eager=True, block_size=16)
    sampling, tokens = SamplingParams(max_tokens=2, temperature=0.0), []
    request = InferRequest(request_id="r", prompt_token_ids=tuple(range(5, 20)), sampling=sampling)
    for triton in (False, True):
        core = EngineCore(config, gpu_runner(config, triton=triton))
        if triton:
            monkeypatch.setattr(dense, "eight_bit_rows", _refuse)
        core.add(request)
        found: list[int] = []
        while core.has_work:
            for output in core.step().outputs:
                assert not output.error
                found += output.token_ids
        core.close()
        tokens.append(found)
    assert tokens[0] == tokens[1]


def _refuse(x: torch.Tensor, dtype: torch.dtype) -> Any:
    raise AssertionError("rows are rounded by themselves")


def test_they_compile_for_hopper_and_whole_numbers_for_ampere() -> None:
    kernels, older = compile_together((launch_eight_bits, 90), (launch_whole_numbers, 80)).values()
    names = {"residual_norm_kernel", "gate_in_eight_bits_kernel", "quantize_kernel", "scaled_matmul_kernel"}
    assert {kernel.name for kernel in kernels} == {kernel.name for kernel in older} == names
    for kernel in kernels + older:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.shared_bytes <= (227 if kernel in kernels else 163) * 1024, kernel
    versions = {version for kernel in kernels for version, *_ in kernel.products}
    assert versions == {3}, "Hopper's own instruction multiplies"
