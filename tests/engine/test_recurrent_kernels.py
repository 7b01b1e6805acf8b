"""Operations of recurrent layers beside plain torch, and that cuts of a sequence change no bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.library import NativeKernels, op_pointers
from llmbackend.engine.kernels.operations import (
    ArrangeOp,
    ConvOp,
    GateFunction,
    GateNorm,
    GateOp,
    Kind,
    ScanOp,
    Step,
    Type,
)
from tests.helpers.native_engines import best_is_fast, engine, to_bf16

pytestmark = pytest.mark.skipif(not library.available(), reason="no native kernels are built here")

TOKENS, CHANNELS, TAPS = 150, 96, 4
HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 20, 48
KEYS, VALUES = KEY_HEADS * KEY_DIM, HEADS * VALUE_DIM
CUTS = ([TOKENS], [1] * TOKENS, [64, 1, 65, 20], [3, 147])
NONE = -1
BETA = 1.7


@pytest.fixture(params=best_is_fast(library.available()))
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return engine(request.param)


def random(*shape: int, seed: int = 1, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)


def run(
    kernels: NativeKernels,
    op: Any,
    lens: list[int],
    slots: list[int],
    sources: list[int],
    copies: np.ndarray | None = None,
) -> None:
    """One step of rows with so many tokens each."""
    start = int32([0, *np.cumsum(lens)])
    arrays = int32(slots), int32(sources), int32([NONE] * sum(lens)) if copies is None else copies
    step = Step(num_tokens=sum(lens), num_rows=len(lens), query_start=start.ctypes.data,
                state_slots=arrays[0].ctypes.data, state_sources=arrays[1].ctypes.data,
                state_copies=arrays[2].ctypes.data)  # fmt: skip
    kernels.run(op_pointers([op]), 1, step)


def conv(
    kernels: NativeKernels, x: np.ndarray, state: np.ndarray, taps: np.ndarray, bias: np.ndarray | None, is_gated: bool,
    **how: Any,
) -> np.ndarray:  # fmt: skip
    out = np.full((len(x), CHANNELS), np.nan, np.float32)
    op = ConvOp(kind=Kind.CONV, gated=is_gated, x=x.ctypes.data, taps=taps.ctypes.data, out=out.ctypes.data,
                bias=None if bias is None else bias.ctypes.data, state=state.ctypes.data, slot_stride=state.shape[1],
                x_stride=x.shape[1], out_stride=CHANNELS, channels=CHANNELS, num_taps=TAPS,
                out_type=Type.FLOAT32)  # fmt: skip
    run(kernels, op, **{"lens": [len(x)], "slots": [0], "sources": [NONE], **how})
    return out


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_convolution_is_torch_s(kernels: NativeKernels, is_gated: bool) -> None:
    x, taps, bias = random(TOKENS, 3 * CHANNELS if is_gated else CHANNELS), random(TAPS, CHANNELS, seed=2), random(96)
    state = np.full((3, 3 * 128), np.nan, np.float32)
    found = conv(kernels, x, state, taps, bias, is_gated)
    b, c, inner = torch.from_numpy(x).chunk(3, -1) if is_gated else (torch.ones(1), torch.ones(1), torch.from_numpy(x))
    padded = functional.pad((b * inner).t(), (TAPS - 1, 0))[None]
    expected = functional.conv1d(
        padded, torch.from_numpy(taps.T.copy())[:, None], torch.from_numpy(bias), groups=CHANNELS
    )[0].t()
    expected = c * expected if is_gated else functional.silu(expected)
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-5, atol=2e-5)
    cuts_change_nothing(
        lambda part, state, **how: conv(kernels, part, state, taps, bias, is_gated, **how), x, found, 384
    )


def cuts_change_nothing(compute: Any, x: np.ndarray, whole: np.ndarray, state_floats: int) -> None:
    """Neither chunks, other rows, another slot, a state that was kept on the way, nor stale contents of a slot."""
    for lens in CUTS:
        state = random(3, state_floats, seed=9)
        ends = np.cumsum(lens)
        parts = [
            compute(np.ascontiguousarray(x[end - length : end]), state, sources=[NONE if end == length else 0])
            for end, length in zip(ends, lens, strict=True)
        ]
        assert np.array_equal(np.concatenate(parts), whole)
    state, copies = random(3, state_floats, seed=8), int32([NONE] * TOKENS)
    copies[70] = 2
    compute(x.copy(), state, copies=copies)
    rest = np.concatenate([x[71:], x])  # a row that begins from what was kept, beside one that begins anew
    found = compute(rest, state, lens=[TOKENS - 71, TOKENS], slots=[1, 0], sources=[2, NONE])
    assert np.array_equal(found, np.concatenate([whole[71:], whole]))


COLUMNS = {"q": 0, "k": KEYS, "v": 2 * KEYS, "a": 2 * KEYS + VALUES, "b": 2 * KEYS + VALUES + HEADS}
WIDTH = 2 * KEYS + VALUES + 2 * HEADS
STATE_FLOATS = HEADS * KEY_DIM * VALUE_DIM


def scan(
    kernels: NativeKernels, x: np.ndarray, state: np.ndarray, vectors: Sequence[np.ndarray], is_delta: bool, **how: Any
) -> np.ndarray:
    decay, bias, skip = vectors
    places = {name: x.ctypes.data + 4 * column for name, column in COLUMNS.items()}
    op = ScanOp(kind=Kind.SCAN, delta=is_delta, **places, decay=decay.ctypes.data, bias=bias.ctypes.data,
                skip=None if is_delta else skip.ctypes.data, state=state.ctypes.data, slot_stride=state.shape[1],
                stride=WIDTH, a_stride=WIDTH, b_stride=WIDTH, num_heads=HEADS, num_key_heads=KEY_HEADS,
                key_dim=KEY_DIM, value_dim=VALUE_DIM, eps=1e-6, dt_min=1e-3, dt_max=0.9, beta=BETA)  # fmt: skip
    run(kernels, op, **{"lens": [len(x)], "slots": [0], "sources": [NONE], **how})
    return x[:, COLUMNS["v"] : COLUMNS["a"]].copy()


def plain_scan(x: np.ndarray, vectors: Sequence[np.ndarray], is_delta: bool) -> np.ndarray:
    """In float64, one token after the other."""
    decay, bias, skip = (torch.from_numpy(each).double() for each in vectors)
    sizes = [KEYS, KEYS, VALUES, HEADS, HEADS]
    q, k, v, a, b = torch.split(torch.from_numpy(x).double(), sizes, -1)
    q, k = (each.view(-1, KEY_HEADS, KEY_DIM).repeat_interleave(HEADS // KEY_HEADS, 1) for each in (q, k))
    v, rate = v.view(-1, HEADS, VALUE_DIM), functional.softplus(a + bias)
    if is_delta:
        q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
        q = q / KEY_DIM**0.5
    else:
        rate = rate.clamp(1e-3, 0.9)
    state, outputs = torch.zeros(HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64), []
    for t in range(len(x)):
        state = state * (decay * rate[t]).exp()[:, None, None]
        if is_delta:
            u = BETA * b[t].sigmoid()[:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        else:
            u = rate[t][:, None] * v[t]
        state = state + k[t][:, :, None] * u[:, None]
        o = torch.einsum("hk,hkv->hv", q[t], state)
        outputs.append(o if is_delta else o + skip[:, None] * v[t])
    return torch.stack(outputs).reshape(len(x), VALUES).float().numpy()


@pytest.mark.parametrize("is_delta", [False, True])
def test_a_recurrence_is_its_definition_token_by_token(kernels: NativeKernels, is_delta: bool) -> None:
    x = random(TOKENS, WIDTH)
    vectors = -np.exp(random(HEADS, seed=4)), random(HEADS, seed=5), random(HEADS, seed=6)
    expected = plain_scan(x, vectors, is_delta)
    found = scan(kernels, x.copy(), np.full((3, STATE_FLOATS), np.nan, np.float32), vectors, is_delta)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found / scale, expected / scale, atol=3e-6)
    cuts_change_nothing(
        lambda part, state, **how: scan(kernels, part.copy(), state, vectors, is_delta, **how), x, found, STATE_FLOATS
    )


def test_rates_far_from_zero_are_finite(kernels: NativeKernels) -> None:
    """softplus is its argument, or nothing; what decays below the smallest number is zero."""
    x = random(TOKENS, WIDTH)
    x[:, COLUMNS["a"] : COLUMNS["b"]] = np.linspace(-120, 120, TOKENS, dtype=np.float32)[:, None]
    vectors = -np.exp(random(HEADS, seed=4)), np.zeros(HEADS, np.float32), random(HEADS, seed=6)
    for is_delta in (True, False):
        found = scan(kernels, x.copy(), np.zeros((3, STATE_FLOATS), np.float32), vectors, is_delta)
        expected = plain_scan(x, vectors, is_delta)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found / scale, expected / scale, atol=3e-6)


_GATES: dict[GateFunction, Callable[[torch.Tensor], torch.Tensor]] = {
    GateFunction.SILU: functional.silu, GateFunction.SIGMOID: torch.sigmoid, GateFunction.SOFTPLUS: functional.softplus,
}  # fmt: skip


@pytest.mark.parametrize("norm", GateNorm)
@pytest.mark.parametrize("one_per_group", [False, True])
@pytest.mark.parametrize("function", GateFunction)
def test_a_gate_comes_before_or_after_its_norm(
    kernels: NativeKernels, norm: GateNorm, function: GateFunction, one_per_group: bool
) -> None:
    groups, group = 3, 48
    x, z, weight = random(TOKENS, groups * group), random(TOKENS, groups * 2 * group, seed=2), random(group, seed=3)
    out, given = np.full((TOKENS, groups * group), np.nan, np.float32), x.copy()
    op = GateOp(kind=Kind.GATE, norm=norm, x=given.ctypes.data, z=z.ctypes.data + 4 * group, weight=weight.ctypes.data,
                out=out.ctypes.data, x_stride=x.shape[1], z_stride=z.shape[1], z_group_stride=2 * group,
                out_stride=out.shape[1], group=group, num_groups=groups, out_type=Type.FLOAT32, function=function,
                eps=1e-5, weight_group_stride=0, one_per_group=one_per_group)  # fmt: skip
    kernels.run(op_pointers([op]), 1, Step(num_tokens=TOKENS))
    values, gates = (torch.from_numpy(each).view(TOKENS, groups, -1) for each in (x, z))
    gates = _GATES[function](gates[..., group : group + 1 if one_per_group else None])
    if norm is GateNorm.BEFORE:
        expected = functional.rms_norm(values, [group], torch.from_numpy(weight), 1e-5) * gates
    elif norm is GateNorm.AFTER:
        expected = functional.rms_norm(values * gates, [group], torch.from_numpy(weight), 1e-5)
    else:
        expected = values * gates
    np.testing.assert_allclose(out, expected.reshape(TOKENS, -1).numpy(), rtol=1e-5, atol=1e-5)


def test_columns_are_put_in_order_and_multiplied(kernels: NativeKernels) -> None:
    x, factors = random(TOKENS, 50), random(37, seed=2)
    order = np.random.default_rng(3).permutation(50)[:37].astype(np.int32)
    ordered, out = x[:, order], np.full((TOKENS, 37), np.nan, np.float32)
    op = ArrangeOp(kind=Kind.ARRANGE, columns=37, x=x.ctypes.data, order=order.ctypes.data, out=out.ctypes.data,
                   x_stride=50, out_stride=37)  # fmt: skip
    kernels.run(op_pointers([op]), 1, Step(num_tokens=TOKENS))
    assert np.array_equal(out, ordered)
    op.x, op.x_stride, op.order, op.factors = out.ctypes.data, 37, None, factors.ctypes.data
    kernels.run(op_pointers([op]), 1, Step(num_tokens=TOKENS))
    assert np.array_equal(out, ordered * factors)


def unpacked(out: np.ndarray, kind: Type, columns: int) -> np.ndarray:
    """Rows of bfloat16, or of its tiles, as float32."""
    values = (out.astype(np.uint32) << 16).view(np.float32)
    if kind is Type.BFLOAT16_TILES:
        values = values.reshape(-1, columns // 32, 16, 32).transpose(0, 2, 1, 3).reshape(-1, columns)
    return values.reshape(-1, columns)[:TOKENS]


@pytest.mark.parametrize("kind", [Type.BFLOAT16, Type.BFLOAT16_TILES])
def test_inputs_of_the_last_layer_are_rounded_where_they_go(kernels: NativeKernels, kind: Type) -> None:
    x, taps = random(TOKENS, 3 * CHANNELS), random(TAPS, CHANNELS, seed=2)
    exact = conv(kernels, x, np.zeros((1, 384), np.float32), taps, None, True)
    rows = -(-TOKENS // 16) * 16
    out, state = np.zeros((rows, CHANNELS), np.uint16), np.zeros((1, 384), np.float32)
    op = ConvOp(kind=Kind.CONV, gated=1, x=x.ctypes.data, taps=taps.ctypes.data, out=out.ctypes.data,
                state=state.ctypes.data, slot_stride=384, x_stride=x.shape[1], out_stride=CHANNELS, channels=CHANNELS,
                num_taps=TAPS, out_type=kind)  # fmt: skip
    run(kernels, op, [TOKENS], [0], [NONE])
    rounded = unpacked(to_bf16(exact), Type.BFLOAT16, CHANNELS)
    assert np.array_equal(unpacked(out, kind, CHANNELS), rounded)
    gates, plain = random(TOKENS, CHANNELS, seed=5), np.zeros((TOKENS, CHANNELS), np.float32)
    for target, out_type in ((plain, Type.FLOAT32), (out, kind)):
        gate = GateOp(kind=Kind.GATE, norm=GateNorm.NONE, x=exact.ctypes.data, z=gates.ctypes.data,
                      out=target.ctypes.data, x_stride=CHANNELS, z_stride=CHANNELS, z_group_stride=48,
                      out_stride=CHANNELS, group=48, num_groups=2, out_type=out_type)  # fmt: skip
        kernels.run(op_pointers([gate]), 1, Step(num_tokens=TOKENS))
    assert np.array_equal(unpacked(out, kind, CHANNELS), unpacked(to_bf16(plain), Type.BFLOAT16, CHANNELS))
