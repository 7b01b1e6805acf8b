"""Products by LoRA adapters on the accelerator path: each token's own adapter, in any company."""

from __future__ import annotations

import pytest
import torch

from llmbackend.engine.gpu.lora import LoraSlots
from llmbackend.engine.gpu.ops.ops import NO_ADAPTER, LoraScratch, LoraSpec, Ops
from llmbackend.engine.gpu.ops.torch_ops import TorchOps
from llmbackend.engine.gpu.ops.triton_ops import TritonOps
from llmbackend.engine.model.lora import LoraMatrices
from tests.helpers.gpu.compile_kernels import compile_in_process
from tests.helpers.gpu.kernel_device import DEVICE
from tests.helpers.gpu.lora_launches import launch_loras

WIDTHS, K = (136, 24, 40), 1100
RANKS = {0: (3, 0, 16), 2: (20, 8, 0)}
"""Of each part, by slot; slot 1 has garbage that no token may see."""


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def adapters(dtype: torch.dtype, max_rank: int = 20) -> LoraSpec:
    """Each slot held an adapter of other ranks before."""
    slots = LoraSlots(3, max_rank, dtype, DEVICE)
    layers = [torch.nn.Identity() for _ in WIDTHS]
    spec = slots.for_product(list(zip(layers, WIDTHS, strict=True)), K)
    spec.down.fill_(float("nan")), spec.up.fill_(float("nan")), spec.ranks.fill_(max_rank)
    for slot, ranks in RANKS.items():
        for part, (layer, width, rank) in enumerate(zip(layers, WIDTHS, ranks, strict=True)):
            down, up = draw(10 * slot + part, rank, K) / K**0.5, draw(90 + 10 * slot + part, width, rank)
            slots.by_layer[layer].write(slot, LoraMatrices(down.to(dtype), up.to(dtype)) if rank else None)
    return spec


def step(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, each token's slot, and what the base layer gave."""
    slots = torch.tensor([(0, 2, NO_ADAPTER, 2, 0, 0)[i * 5 % 7 % 6] for i in range(count)], dtype=torch.int32)
    return draw(1, count, K).to(dtype), slots.to(DEVICE), draw(2, count, sum(WIDTHS)).to(dtype)


def added(ops: Ops, spec: LoraSpec, x: torch.Tensor, slots: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    scratch = LoraScratch.of(len(x) + 20, [spec])
    for name in LoraScratch.__slots__:
        getattr(scratch, name).fill_(77)
    out = torch.full((len(x) + 1, base.shape[1]), float("nan"), device=DEVICE).to(x.dtype)
    out[:-1] = base
    ops.group_by_adapter(slots, scratch)
    ops.add_loras(x, slots, spec, scratch, out[:-1])
    assert out[-1].isnan().all()
    return out[:-1]


def expected(spec: LoraSpec, x: torch.Tensor, slots: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """In float64, a token and a part at a time."""
    out = base.double()
    for token, slot in enumerate(slots.tolist()):
        if slot == NO_ADAPTER:
            continue
        begin = 0
        for part, (width, rank) in enumerate(zip(WIDTHS, RANKS[slot], strict=True)):
            first = part * spec.max_rank
            hidden = spec.down[slot, first : first + rank].double() @ x[token].double()
            out[token, begin : begin + width] += spec.up[slot, begin : begin + width, :rank].double() @ hidden
            begin += width
    return out


@pytest.mark.parametrize("ops", [TritonOps(), TorchOps()])
@pytest.mark.parametrize(("count", "dtype"), [(1, torch.float32), (23, torch.float32), (40, torch.bfloat16)])
def test_a_token_gets_what_its_adapter_adds(count: int, dtype: torch.dtype, ops: Ops) -> None:
    spec, given = adapters(dtype), step(count, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    found = added(ops, spec, *given)
    torch.testing.assert_close(found.double(), expected(spec, *given), rtol=tolerance, atol=4 * tolerance)
    assert torch.equal(found[given[1] == NO_ADAPTER], given[2][given[1] == NO_ADAPTER])


def test_ranks_of_several_tiles() -> None:
    spec, given = adapters(torch.float32, max_rank=100), step(5, torch.float32)
    assert spec.max_rank == 128
    torch.testing.assert_close(added(TritonOps(), spec, *given).double(), expected(spec, *given), rtol=1e-5, atol=4e-5)


def test_a_token_is_its_own_bit_by_bit() -> None:
    spec, (x, slots, base) = adapters(torch.bfloat16), step(40, torch.bfloat16)
    together = added(TritonOps(), spec, x, slots, base)
    for part in (slice(0, 1), slice(11, 12), slice(5, 30)):
        alone = added(TritonOps(), spec, x[part].contiguous(), slots[part].contiguous(), base[part].contiguous())
        assert torch.equal(alone, together[part])
    x[3], base[3] = float("nan"), float("nan")
    spoilt = added(TritonOps(), spec, x, slots, base)
    assert spoilt[3].isnan().any()
    others = [token for token in range(40) if token != 3]
    assert torch.equal(spoilt[others], together[others])


def test_a_step_without_adapters_is_as_it_was() -> None:
    spec, (x, slots, base) = adapters(torch.bfloat16), step(20, torch.bfloat16)
    assert torch.equal(added(TritonOps(), spec, x, torch.full_like(slots, NO_ADAPTER), base), base)


def test_they_compile() -> None:
    names = {"count_pairs_kernel", "place_pairs_kernel", "lora_shrink_kernel", "lora_expand_kernel"}
    for compiled in compile_in_process(launch_loras, 80, 90).values():
        assert {kernel.name for kernel in compiled} == names
        for kernel in compiled:
            assert kernel.stack_bytes == 0, kernel
            assert kernel.shared_bytes <= 100 * 1024, kernel
