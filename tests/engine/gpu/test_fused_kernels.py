"""The fused kernels compute what their definitions give in float64, whichever other tokens share the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmbackend.engine.gpu.ops.ops import PADDING_SLOT, LayerCache, Norm, RotarySpec, StepLayout
from llmbackend.engine.gpu.ops.triton_ops import TritonOps
from tests.helpers.gpu.kernel_device import DEVICE, INTERPRETED

OPS = TritonOps()
# Hardware rounds to the nearest bfloat16; the interpreter cuts off.
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2.0**-7 if INTERPRETED else 2.0**-8, torch.float16: 2.0**-11}
DTYPES = list(ROUNDING)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), device=DEVICE).to(dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Rounded once to its type; zero may be off by what float32 makes of sums of numbers near one."""
    torch.testing.assert_close(found.double(), expected, rtol=ROUNDING[found.dtype], atol=3e-6)


def normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    if norm is None:
        return x
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed_scales_rows_and_ignores_ids_outside_the_table(dtype: torch.dtype) -> None:
    table = normal(torch.Generator().manual_seed(1), 40, 100, dtype=dtype)
    token_ids = ints(3, 39, -2, 0, 40, 3)
    residual = poisoned(6, 100)
    OPS.embed(token_ids, table, 2.5, residual)
    known = [0, 1, 3, 5]
    assert_near(residual[known], table[token_ids[known]].double() * 2.5)
    assert not residual[[2, 4]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sandwich", [False, True])
@pytest.mark.parametrize("width", [64, 1030])
def test_residual_norm_adds_then_norms(width: int, sandwich: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    residual, block = normal(generator, 5, width), normal(generator, 5, width, dtype=dtype)
    norm = Norm(normal(generator, width), 1e-5)
    block_norm = Norm(normal(generator, width), 1e-6) if sandwich else None
    expected = residual.double() + 0.7 * normed(block.double(), block_norm)
    out = poisoned(5, width, dtype=dtype)
    OPS.residual_norm(residual, block, block_norm, 0.7, norm, out)
    assert_near(residual, expected)
    assert_near(out, normed(expected, norm))


def test_residual_norm_without_its_parts() -> None:
    generator = torch.Generator().manual_seed(2)
    residual, block, out = normal(generator, 3, 70), normal(generator, 3, 70), poisoned(3, 70)
    before, norm = residual.clone(), Norm(normal(generator, 70), 1e-5)
    OPS.residual_norm(residual, None, None, 1.0, norm, out)
    assert torch.equal(residual, before)
    assert_near(out, normed(before.double(), norm))
    OPS.residual_norm(residual, block, None, 1.0, None, None)
    assert torch.equal(residual, before + block)
    OPS.residual_norm(residual, None, None, 1.0, None, out)
    assert torch.equal(out, residual)


def test_only_sampled_tokens_are_normed_when_they_are_named() -> None:
    generator = torch.Generator().manual_seed(3)
    residual, norm = normal(generator, 6, 48), Norm(normal(generator, 48), 1e-5)
    before, out = residual.clone(), poisoned(3, 48, dtype=torch.bfloat16)
    OPS.residual_norm(residual, None, None, 1.0, norm, out, ints(5, 0, 2))
    assert_near(out, normed(before[[5, 0, 2]].double(), norm))
    assert torch.equal(residual, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [96, 2100])
def test_gate(width: int, activation: Any, dtype: torch.dtype) -> None:
    gate_up = 4 * normal(torch.Generator().manual_seed(width), 4, 2 * width, dtype=dtype)
    gate_up[0, :4] = torch.tensor([0.0, -300.0, 300.0, -60.0], device=DEVICE)
    out = poisoned(4, width, dtype=dtype)
    OPS.gate(gate_up, activation, out)
    gates, ups = gate_up.double().chunk(2, -1)
    functional = torch.nn.functional
    active = functional.silu(gates) if activation == "silu" else functional.gelu(gates, approximate="tanh")
    torch.testing.assert_close(out.double(), active * ups, rtol=ROUNDING[dtype], atol=2e-5)


def layout_of(positions: list[int], slots: list[int]) -> StepLayout:
    none = ints()
    return StepLayout(none, none, none, none, ints(*positions), ints(*slots), none, 1, 1)


def angles(rotary_dim: int, length: int = 32) -> torch.Tensor:
    turns = torch.outer(torch.arange(length).double(), 100.0 ** -(torch.arange(rotary_dim // 2) / rotary_dim))
    return torch.cat((turns.cos(), turns.sin()), -1).float().to(DEVICE)


def turned(x: torch.Tensor, positions: list[int], spec: RotarySpec) -> torch.Tensor:
    if spec.cos_sin is None:
        return x
    half = spec.cos_sin.shape[1] // 2
    cos, sin = spec.cos_sin[positions].double()[:, None].chunk(2, -1)
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)


def head_normed(heads: torch.Tensor, norm: Norm | None, whole: bool) -> torch.Tensor:
    return normed(heads.flatten(1), norm).view(heads.shape) if whole else normed(heads, norm)


SPECS: dict[str, Callable[[torch.Generator], RotarySpec]] = {
    "plain": lambda g: RotarySpec(4, 2, 16, None, None, False, angles(16)),
    "part of a head": lambda g: RotarySpec(3, 3, 24, None, None, False, angles(12)),
    "none": lambda g: RotarySpec(2, 1, 20, None, None, False, None),
    "normed heads": lambda g: RotarySpec(
        9, 3, 16, Norm(normal(g, 16), 1e-6), Norm(normal(g, 16), 1e-5), False, angles(16)
    ),
    "normed whole": lambda g: RotarySpec(
        10, 5, 12, Norm(normal(g, 120), 1e-6), Norm(normal(g, 60), 1e-5), True, angles(12)
    ),
    "queries normed, nothing turned": lambda g: RotarySpec(3, 1, 10, Norm(normal(g, 10), 1e-6), None, False, None),
}
BLOCK_SIZE, NUM_BLOCKS = 4, 5


def empty_cache(spec: RotarySpec, dtype: torch.dtype) -> LayerCache:
    shape = (NUM_BLOCKS, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
    return LayerCache(poisoned(*shape, dtype=dtype), poisoned(*shape, dtype=dtype))


def at_slot(memory: torch.Tensor, slot: int) -> torch.Tensor:
    return memory[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_rotary_and_write(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    spec = SPECS[name](generator)
    positions, slots = [0, 31, 9, 4, 0], [6, 19, 0, 7, PADDING_SLOT]
    heads = spec.num_heads + 2 * spec.num_kv_heads
    qkv = normal(generator, 5, heads * spec.head_dim, dtype=dtype)
    parts = torch.split(qkv.double().view(5, heads, -1), [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
    unchanged = qkv[:, spec.num_heads * spec.head_dim :].clone()
    cache = empty_cache(spec, dtype)
    OPS.rotary_and_write(qkv, layout_of(positions, slots), spec, cache)
    queries = turned(head_normed(parts[0], spec.q_norm, spec.norm_whole), positions, spec)
    keys = turned(head_normed(parts[1], spec.k_norm, spec.norm_whole), positions, spec)
    assert_near(qkv[:, : spec.num_heads * spec.head_dim], queries.flatten(1))
    assert torch.equal(qkv[:, spec.num_heads * spec.head_dim :], unchanged)
    for token in range(4):
        assert_near(at_slot(cache.keys, slots[token]), keys[token])
        assert_near(at_slot(cache.values, slots[token]), parts[2][token])
    for memory in (cache.keys, cache.values):
        assert torch.isnan(memory).sum() == (NUM_BLOCKS * BLOCK_SIZE - 4) * spec.num_kv_heads * spec.head_dim


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_what_is_stored_is_finite(dtype: torch.dtype) -> None:
    spec = RotarySpec(1, 1, 4, None, None, False, None)
    qkv = torch.tensor([[1.0] * 4 + [float("nan"), float("inf"), -float("inf"), 1e38] + [float("-inf")] * 4])
    qkv = qkv.to(DEVICE)
    cache = empty_cache(spec, dtype)
    OPS.rotary_and_write(qkv, layout_of([0], [2]), spec, cache)
    most = torch.finfo(dtype).max
    assert at_slot(cache.keys.float(), 2).tolist() == [[0.0, most, -most, pytest.approx(min(1e38, most), rel=0.01)]]
    assert at_slot(cache.values.float(), 2).tolist() == [[-most] * 4]


def test_an_eight_bit_cache_holds_its_numbers() -> None:
    spec = RotarySpec(1, 2, 8, None, None, False, None)
    steps = torch.tensor([0.0, 1, -1.125, 1.75, 13, -208, 448, 2.0**-9], device=DEVICE)  # numbers that 8 bits hold
    qkv = torch.cat((torch.ones(8, device=DEVICE), steps, -steps, -steps, steps))[None]
    cache = empty_cache(spec, torch.float8_e4m3fn)
    OPS.rotary_and_write(qkv, layout_of([0], [13]), spec, cache)
    for memory, sign in ((cache.keys, 1), (cache.values, -1)):
        assert torch.equal(at_slot(memory.float(), 13), sign * torch.stack((steps, -steps)))


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(5)
    spec = SPECS["normed whole"](generator)
    positions, slots = [5, 6, 7, 30], [4, 9, 1, 18]
    qkv = normal(generator, 4, 20 * 12, dtype=torch.bfloat16)
    residual, norm = normal(generator, 4, 240), Norm(normal(generator, 240), 1e-5)

    def run(tokens: list[int]) -> tuple[torch.Tensor, ...]:
        cache, part, stream = empty_cache(spec, torch.bfloat16), qkv[tokens], residual[tokens]
        OPS.rotary_and_write(part, layout_of([positions[t] for t in tokens], [slots[t] for t in tokens]), spec, cache)
        normed_out, gated = poisoned(len(tokens), 240), poisoned(len(tokens), 120, dtype=torch.bfloat16)
        OPS.residual_norm(stream, part, norm, 1.0, norm, normed_out)
        OPS.gate(part, "gelu_tanh", gated)
        keys, values = (torch.stack([at_slot(m, slots[t]) for t in tokens]) for m in (cache.keys, cache.values))
        return part, keys, values, stream, normed_out, gated

    together = run([0, 1, 2, 3])
    for token in range(4):
        for found, expected in zip(run([token]), together, strict=True):
            assert torch.equal(found[0], expected[token])


def test_no_tokens_are_no_launch() -> None:
    spec = RotarySpec(1, 1, 4, None, None, False, None)
    cache = empty_cache(spec, torch.float32)
    OPS.rotary_and_write(poisoned(0, 12), layout_of([], []), spec, cache)
    OPS.embed(ints(), poisoned(3, 8), 1.0, poisoned(0, 8))
    OPS.residual_norm(poisoned(0, 8), poisoned(0, 8), None, 1.0, None, poisoned(0, 8))
    OPS.gate(poisoned(0, 8), "silu", poisoned(0, 4))
    assert torch.isnan(cache.keys).all()
