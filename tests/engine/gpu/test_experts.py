"""Experts on the accelerator path: what they compute together, alone and spread over ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.errors import UnshardableError
from llmbackend.engine.gpu.kernels import experts as kernels
from llmbackend.engine.gpu.ops.ops import ExpertScratch, ExpertSpec, Ops
from llmbackend.engine.gpu.ops.torch_ops import TorchOps
from llmbackend.engine.gpu.ops.triton_ops import TritonOps
from llmbackend.engine.gpu.parallel.collectives import StageGroup
from llmbackend.engine.gpu.weights.experts import DenseExperts, ExpertProjection, Int4Experts
from llmbackend.engine.gpu.weights.int4 import Int4Weight
from llmbackend.engine.messages import InferRequest, SamplingParams
from llmbackend.engine.model.decoder_description import Experts
from tests.helpers.gpu.compile_kernels import compile_in_process
from tests.helpers.gpu.expert_launches import launch_experts, launch_packed_experts
from tests.helpers.gpu.fake_device import FakeDevice
from tests.helpers.gpu.gpu_engines import config_for, gpu_runner, mixed_requests, tokens_of
from tests.helpers.gpu.kernel_device import DEVICE
from tests.helpers.gpu.tiny_models import WITH_EXPERTS, save
from tests.helpers.gpu.tiny_programs import all_logits, load, on_ranks, part_of, program_of_rank, prompts

EXPERTS, TOP_K, WIDTH, INNER = 6, 2, 40, 24


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def spec(dtype: torch.dtype, renormalises: bool = True, has_bias: bool = False) -> ExpertSpec:
    """Those with biases are stored as gpt-oss', the inputs of an expert first."""

    def projection(seed: int, n: int, k: int) -> ExpertProjection:
        weight = (draw(seed, EXPERTS, n, k) / k**0.5).to(dtype)
        if not has_bias:
            return ExpertProjection(DenseExperts(weight), None)
        stored = weight.transpose(1, 2).contiguous()
        return ExpertProjection(DenseExperts(stored.transpose(1, 2)), (4 * draw(seed + 2, EXPERTS, n)).to(dtype))

    return ExpertSpec(projection(1, 2 * INNER, WIDTH), projection(2, WIDTH, INNER), TOP_K, renormalises)


def tokens(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x, and logits by which expert 4 has no token and expert 1 most of them."""
    logits = draw(4, count, EXPERTS)
    logits[:, 4], logits[:, 1] = -9, logits[:, 1] + 2
    return draw(3, count, WIDTH).to(dtype), logits


def mixed(ops: Ops, x: torch.Tensor, logits: torch.Tensor, experts: ExpertSpec, activation: Any = "silu") -> Any:
    scratch = ExpertScratch.of(len(x) + 3, [experts], x.dtype, x.device)
    for name in ExpertScratch.__slots__:
        getattr(scratch, name).fill_(77)
    out = torch.full((len(x) + 1, WIDTH), float("nan"), device=DEVICE).to(x.dtype)
    ops.mix_experts(x, logits, experts, activation, scratch, out[:-1])
    assert out[-1].isnan().all()
    return out[:-1]


def expected(x: torch.Tensor, logits: torch.Tensor, experts: ExpertSpec, activation: str) -> torch.Tensor:
    """In float64, a token and an expert at a time."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
    shares = logits.double().softmax(-1)
    for token in range(len(x)):
        chosen = shares[token].argsort(descending=True)[: experts.top_k]
        total = shares[token, chosen].sum() if experts.renormalises else 1.0
        for expert in chosen:
            inner = gate(by_expert(x[token].double(), experts.gate_up, expert), activation)
            out[token] += shares[token, expert] / total * by_expert(inner, experts.down, expert)
    return out


def by_expert(x: torch.Tensor, projection: ExpertProjection, expert: Any) -> torch.Tensor:
    product = projection.weight.matrix(expert, torch.float64) @ x
    return product if projection.bias is None else product + projection.bias[expert].double()


def gate(gate_up: torch.Tensor, activation: str) -> Any:
    if activation == "swigluoai":
        gate, up = gate_up.view(-1, 2).t()
        gate = gate.clamp(max=7.0)
        return gate / (1 + torch.exp(-1.702 * gate)) * (up.clamp(-7.0, 7.0) + 1)
    gate, up = gate_up.chunk(2)
    functional = torch.nn.functional
    return up * (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh"))


@pytest.mark.parametrize("ops", [TritonOps(), TritonOps(exact_products=True), TorchOps()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("count", "renormalises", "activation"),
    [(1, True, "silu"), (7, False, "gelu_tanh"), (20, True, "silu"), (9, True, "swigluoai")],
)
def test_a_token_gets_the_sum_of_its_experts(
    count: int, renormalises: bool, activation: str, dtype: torch.dtype, ops: Ops
) -> None:
    experts, (x, logits) = spec(dtype, renormalises, has_bias=activation == "swigluoai"), tokens(count, dtype)
    found = mixed(ops, x, logits, experts, activation).double()
    exact = expected(x, logits, experts, activation)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, exact, rtol=tolerance, atol=tolerance * max(1.0, exact.std().item()))


def test_many_tokens_are_sorted_in_several_passes_into_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_AT_ONCE", 32)
    experts, (x, logits) = spec(torch.bfloat16), tokens(110, torch.bfloat16)
    found = mixed(TritonOps(exact_products=True), x, logits, experts)
    torch.testing.assert_close(found, mixed(TorchOps(), x, logits, experts), rtol=3e-2, atol=3e-2)


def test_a_token_is_its_own_bit_by_bit() -> None:
    experts, (x, logits) = spec(torch.bfloat16), tokens(20, torch.bfloat16)
    ops = TritonOps(exact_products=True)
    together = mixed(ops, x, logits, experts)
    for part in (slice(0, 1), slice(11, 12), slice(5, 19)):
        assert torch.equal(mixed(ops, x[part].contiguous(), logits[part].contiguous(), experts), together[part])
    x[3], logits[3] = float("nan"), float("nan")
    spoilt = mixed(ops, x, logits, experts)
    assert spoilt[3].isnan().all()
    others = [token for token in range(20) if token != 3]
    assert torch.equal(spoilt[others], together[others])


@pytest.mark.timeout(600)  # of interpreted kernels
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_an_engine_with_kernels_gives_the_tokens_of_one_without(family: str, tmp_path: Path) -> None:
    save(WITH_EXPERTS[family], tmp_path)
    small: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 32, "num_kv_blocks": 6}
    config = config_for(tmp_path, block_size=16, enforce_eager=True, **small)
    sampling, found = SamplingParams(max_tokens=3, temperature=0.0), []
    request = InferRequest(request_id="r", prompt_token_ids=tuple(range(5, 20)), sampling=sampling)
    for triton in (False, True):
        core = EngineCore(config, gpu_runner(config, triton=triton))
        core.add(request)
        outputs: list[Any] = []
        while core.has_work:
            outputs += core.step().outputs
        core.close()
        assert not [output.error for output in outputs if output.error]
        found.append([token for output in outputs for token in output.token_ids])
    assert found[0] == found[1] and len(found[0]) == 3


def test_steps_with_experts_are_replayed_as_graphs(tmp_path: Path) -> None:
    """Decode steps and mixed ones, padded up to the sizes that were captured."""
    save(WITH_EXPERTS["qwen3_moe"], tmp_path)
    requests, found = mixed_requests(4, seed=5, greedy=True), []
    for options in ({"enforce_eager": True}, {}):
        config, device = config_for(tmp_path, max_num_seqs=3, max_num_batched_tokens=24, **options), FakeDevice()
        runner = gpu_runner(config, device)
        with mock.patch.object(runner, "launch", wraps=runner.launch) as launch:
            found.append(tokens_of(config, runner, requests)[0])
        assert device.num_graph_replays == (0 if options else launch.call_count)
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_each_rank_has_columns_of_every_expert(family: str, tmp_path: Path) -> None:
    model = save(WITH_EXPERTS[family], tmp_path)
    loaded = load(tmp_path)
    assert loaded.decoder is not None
    whole = loaded.decoder.layers[0].mlp
    for decoder, _ in on_ranks(2, lambda ranks: part_of(loaded, ranks)):
        part = decoder.layers[0].mlp
        assert isinstance(part, Experts) and isinstance(whole, Experts)
        assert part.gate_up.weight.n * 2 == whole.gate_up.weight.n and part.down.weight.k * 2 == whole.down.weight.k
    first, second = on_ranks(2, lambda ranks: all_logits(program_of_rank(loaded, ranks), prompts()))
    for tokens, logits, same in zip(prompts(), first, second, strict=True):
        with torch.inference_mode():
            exact = model(tokens[None].long()).logits[0]
        torch.testing.assert_close(logits, exact, atol=1e-3 * exact.abs().max().item(), rtol=0)
        assert torch.equal(logits, same)


def test_columns_of_experts_that_do_not_divide_are_refused_by_name(tmp_path: Path) -> None:
    save(WITH_EXPERTS["mixtral"], tmp_path)
    loaded = load(tmp_path)
    assert loaded.decoder is not None
    layer = loaded.decoder.layers[0]
    assert isinstance(layer.mlp, Experts)
    down = ExpertProjection(layer.mlp.down.weight.columns(range(95)), None)
    odd = replace(layer, mlp=replace(layer.mlp, down=down))
    loaded = replace(loaded, decoder=replace(loaded.decoder, layers=(odd,)))

    def refusal(ranks: StageGroup) -> str:
        with pytest.raises(UnshardableError) as caught:
            part_of(loaded, ranks)
        return str(caught.value)

    assert all("it has 95 columns of its experts" in text for text in on_ranks(2, refusal))


def test_they_compile() -> None:
    names = {
        "choose_experts_kernel", "count_pairs_kernel", "place_pairs_kernel", "grouped_matmul_kernel",
        "add_experts_kernel", "gate_kernel",
    }  # fmt: skip
    for capability, compiled in compile_in_process(launch_experts, 80, 90).items():
        assert {kernel.name for kernel in compiled} == names
        for kernel in compiled:
            assert kernel.stack_bytes == 0, kernel
            assert kernel.shared_bytes <= (227 if capability == 90 else 163) * 1024, kernel


def test_products_of_packed_ones_compile() -> None:
    for capability, compiled in compile_in_process(launch_packed_experts, 80, 90).items():
        products = [kernel for kernel in compiled if kernel.name == "grouped_int4_matmul_kernel"]
        assert products
        for kernel in products:
            assert kernel.stack_bytes == 0, kernel
            assert kernel.shared_bytes <= (227 if capability == 90 else 163) * 1024, kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("is_float", "has_zero", "group_size"), [(True, False, 32), (False, True, 64)])
def test_packed_experts_are_multiplied_as_the_numbers_they_stand_for(
    is_float: bool, has_zero: bool, group_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(7)

    def projection(n: int, k: int) -> ExpertProjection:
        groups = EXPERTS * n, -(-k // group_size)
        numbers = torch.randint(0, 16, (EXPERTS * n, k), dtype=torch.uint8, generator=generator)
        scale = torch.randint(121, 126, groups, dtype=torch.uint8, generator=generator)
        if not is_float:
            scale = scale.float() / 4000
        zero = torch.randint(0, 16, groups, dtype=torch.uint8, generator=generator) if has_zero else None
        weight = Int4Weight.of(numbers, scale, zero, group_size, is_float=is_float).to(DEVICE)
        return ExpertProjection(Int4Experts(weight, EXPERTS), draw(n, EXPERTS, n).to(dtype))

    experts = ExpertSpec(projection(2 * 64, WIDTH), projection(WIDTH, 64), TOP_K, True)
    x, logits = tokens(9, dtype)
    exact = expected(x, logits, experts, "swigluoai")
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for exact_products in (False, True):
        found = mixed(TritonOps(exact_products=exact_products), x, logits, experts, "swigluoai").double()
        torch.testing.assert_close(found, exact, rtol=tolerance, atol=tolerance * max(1.0, exact.std().item()))
