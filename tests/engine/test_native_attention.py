"""Native rotary, KV write and paged attention against float64, and their law: what a query gets depends on its own row
alone, bit by bit, however the prompt was cut."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from llmbackend.engine.attention.interface import AttentionOptions, LayerShape
from llmbackend.engine.attention.native_attention import NativePagedAttention
from llmbackend.engine.attention.reference import LayerKVCache, PagedAttention, RaggedBatch
from llmbackend.engine.cpu.native_memory import LayerKV, NativeKVMemory
from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.library import NativeKernels
from llmbackend.engine.kernels.operations import AttentionOp, Kind, RotaryOp, Type
from llmbackend.engine.kernels.weights import TYPE_OF
from llmbackend.engine.step import FlatStep
from tests.helpers.native_engines import COMPILER, EMULATED_TILES, Array, engine, from_bf16, to_bf16
from tests.helpers.ragged_attention import SINKS, SLOPES, Batch, Pages, Shape, Tokens, attend, rounded, run, stored

VARIANTS = [name for name in library.available() if name != "avx512_vnni"] or list(library.available())
"""The one left out compiles attention to float32 and bfloat16 as avx512 does."""
if "amx" not in VARIANTS and COMPILER:
    VARIANTS.append(EMULATED_TILES)
FIXED_POINT = [
    name
    for name in library.available()
    if (loaded := library.load(name)) and loaded.kv_type(Type.BFLOAT16) is Type.FIXED16
]

LENGTHS = (1, 31, 32, 33, 129, 260)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not VARIANTS, reason="no native kernels are built")]


def rounds(variant: str, shape: Shape) -> bool:
    """Whether queries and weights are rounded to bfloat16, for products with bfloat16 keys and values."""
    return variant in ("amx", EMULATED_TILES, "avx512_bf16") and shape.kv_type is Type.BFLOAT16


def tolerance(variant: str, shape: Shape) -> float:
    """Of an element. A rounded weight is off by up to 2**-9 of itself; the tests' values are numbers around one.
    Latents have so many that some are larger."""
    if shape.kv_type is Type.FIXED16:
        return 2.0**-10
    return (1.5 if shape.latent_dim else 1.0) * 2.0**-8 if rounds(variant, shape) else 1e-5


def expected(variant: str, shape: Shape, lengths: tuple[int, ...] = LENGTHS) -> list[Array]:
    return _expected(rounds(variant, shape), shape, lengths)


@functools.cache
def _expected(rounds_queries: bool, shape: Shape, lengths: tuple[int, ...]) -> list[Array]:
    """The same for every variant that rounds queries, or does not."""
    return [attention(rounds_queries, shape, sequence) for sequence in sequences_of(shape, lengths)]


def attention(rounds_queries: bool, shape: Shape, sequence: Tokens) -> Array:
    """In float64, of queries as the kernel reads them: [tokens, heads * dim]."""
    group = shape.heads // shape.kv_heads
    memory = stored(sequence.k, sequence.v, shape.kv_type)
    k, v = (np.repeat(x.astype(np.float64), group, 1) for x in memory)
    q = sequence.q * np.float32(shape.dim**-0.5)
    q = from_bf16(to_bf16(q)) if rounds_queries else q
    scores = q.astype(np.float64).swapaxes(0, 1) @ k.transpose(1, 2, 0)
    distance = np.arange(len(sequence))[:, None] - np.arange(len(sequence))[None]
    if shape.slopes:
        scores -= SLOPES[: shape.heads, None, None] * distance
    if shape.softcap:
        scores = np.tanh(scores / shape.softcap) * shape.softcap
    seen = (distance >= 0) & ((distance < shape.window) if shape.window else True)
    scores = np.where(seen, scores, -np.inf)
    extra = SINKS[: shape.heads, None, None] if shape.sinks else np.full((shape.heads, 1, 1), -np.inf)
    best = np.maximum(scores.max(-1, keepdims=True), extra)
    weights = np.exp(scores - best)
    weights /= weights.sum(-1, keepdims=True) + np.exp(extra - best)
    return np.asarray((weights @ v.swapaxes(0, 1)).swapaxes(0, 1).reshape(len(sequence), -1))


SHAPES = {
    "plain": Shape(),
    "float32": Shape(kv_type=Type.FLOAT32),
    "one-query-head": Shape(heads=3, kv_heads=3, block_size=64),
    "qwen": Shape(heads=14, kv_heads=2, out_type=Type.BFLOAT16),
    "wide": Shape(heads=4, kv_heads=1, dim=128, block_size=96),
    "wide-alone": Shape(heads=2, kv_heads=2, dim=128),
    "widest-bfloat16": Shape(heads=3, kv_heads=1, dim=256),
    "widest": Shape(heads=8, kv_heads=1, dim=256, kv_type=Type.FLOAT32),
    "dim-96": Shape(heads=4, kv_heads=2, dim=96),
    "dim-80": Shape(heads=2, kv_heads=2, dim=80),
    "dim-8": Shape(heads=4, kv_heads=2, dim=8),
    "dim-12-float32": Shape(heads=4, kv_heads=2, dim=12, kv_type=Type.FLOAT32),
    "window": Shape(window=50),
    "window-1": Shape(window=1),
    "softcap": Shape(softcap=3.0),
    "sinks": Shape(sinks=True),
    "slopes": Shape(heads=6, kv_heads=3, slopes=True),
    "slopes-one-query-head": Shape(heads=3, kv_heads=3, slopes=True, block_size=64),
    "all": Shape(
        heads=8, kv_heads=4, window=140, softcap=5.0, sinks=True, slopes=True, block_size=64, kv_type=Type.FLOAT32
    ),
    "latent": Shape(heads=16, kv_heads=1, dim=576, latent_dim=512),
    "latent-alone": Shape(heads=1, kv_heads=1, dim=96, latent_dim=64, out_type=Type.BFLOAT16),
    "latent-float32": Shape(heads=10, kv_heads=1, dim=128, latent_dim=96, block_size=64, kv_type=Type.FLOAT32),
    "latent-all": Shape(
        heads=20, kv_heads=1, dim=320, latent_dim=256, window=140, softcap=5.0, sinks=True, block_size=96
    ),
    "fixed-point": Shape(kv_type=Type.FIXED16),
    "fixed-point-qwen": Shape(heads=14, kv_heads=2, kv_type=Type.FIXED16, out_type=Type.BFLOAT16),
    "fixed-point-dim-80": Shape(heads=2, kv_heads=2, dim=80, kv_type=Type.FIXED16),
    "fixed-point-all": Shape(
        heads=4, dim=128, window=140, softcap=5.0, sinks=True, slopes=True, block_size=64, kv_type=Type.FIXED16
    ),
}


@functools.cache
def sequences_of(shape: Shape, lengths: tuple[int, ...] = LENGTHS) -> tuple[Tokens, ...]:
    return tuple(Tokens.random(shape, length, seed) for seed, length in enumerate(lengths))


def prompts(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    return [(row, 0, length) for row, length in enumerate(lengths)]


@functools.cache
def whole(variant: str, shape: Shape, lengths: tuple[int, ...] = LENGTHS) -> list[Array]:
    """All sequences in one prefill: what every other way to cut them must give too."""
    return attend(engine(variant), Pages(shape, lengths), sequences_of(shape, lengths), prompts(lengths))


each_variant = pytest.mark.parametrize("variant", VARIANTS)
each_case = pytest.mark.parametrize(
    ("variant", "shape"),
    [
        pytest.param(variant, shape, id=f"{variant}-{name}")
        for name, shape in SHAPES.items()
        for variant in (FIXED_POINT if shape.kv_type is Type.FIXED16 else VARIANTS)
    ],
)
each_kind = pytest.mark.parametrize(
    ("variant", "kv_type"),
    [*((name, Type.BFLOAT16) for name in VARIANTS), *((name, Type.FIXED16) for name in FIXED_POINT)],
)


@each_case
def test_it_is_attention(variant: str, shape: Shape) -> None:
    for got, wanted in zip(whole(variant, shape), expected(variant, shape), strict=True):
        if shape.out_type is Type.BFLOAT16:
            got, relative = from_bf16(got), 2.0**-8
        else:
            relative = 1e-5
        np.testing.assert_allclose(got, wanted, rtol=relative, atol=tolerance(variant, shape))


@each_kind
def test_contexts_of_several_partitions(variant: str, kv_type: Type) -> None:
    shape, lengths = Shape(heads=3, kv_heads=1, dim=32, kv_type=kv_type), (1025, 2100)
    for got, wanted in zip(whole(variant, shape, lengths), expected(variant, shape, lengths), strict=True):
        np.testing.assert_allclose(got, wanted, atol=tolerance(variant, shape))


@pytest.mark.timeout(600)  # compiles the emulation
def test_emulated_tiles_are_like_real_ones() -> None:
    """Bit by bit, so that what tests of the emulation show holds for the CPU's own tiles."""
    if "amx" not in VARIANTS or COMPILER is None:
        pytest.skip("needs a CPU with tiles, and a C++ compiler")
    everything = Shape(heads=3, kv_heads=1, dim=80, window=140, softcap=5.0, sinks=True, slopes=True)
    for shape in (everything, Shape(heads=2, kv_heads=2)):
        lengths = (33, 260)
        got, wanted = (whole(variant, shape, lengths) for variant in (EMULATED_TILES, "amx"))
        assert [bits.tobytes() for bits in got] == [bits.tobytes() for bits in wanted]


@each_variant
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_any_number_of_queries_gives_the_same_bits(variant: str, kv_heads: int) -> None:
    """The last ones of a row, up to several tiles of them."""
    shape, length = Shape(heads=3, kv_heads=kv_heads, dim=32), 170
    (sequence,) = sequences_of(shape, (length,))
    (wanted,) = whole(variant, shape, (length,))
    pages = Pages(shape, [length], 5)
    attend(engine(variant), pages, [sequence], [(0, 0, length)])
    for count in range(1, 71):
        (bits,) = attend(engine(variant), pages, [sequence], [(0, length - count, count)])
        assert bits.tobytes() == wanted[-count:].tobytes(), f"{count} queries"


@each_kind
def test_sums_next_to_zero_do_not_know_their_batch(variant: str, kv_type: Type) -> None:
    """Dot products take numbers next to zero for zero, whenever another chunk is visited for a neighbour's sake."""
    shape = Shape(kv_type=kv_type)
    tokens = sequences_of(shape)[-1]
    tiny = Tokens(tokens.q * 60, tokens.k, tokens.v * np.float32(2.0**-120))
    pages = Pages(shape, [len(tiny)])
    (together,) = attend(engine(variant), pages, [tiny], [(0, 0, len(tiny))])
    for position in range(len(tiny)):
        (alone,) = attend(engine(variant), pages, [tiny], [(0, position, 1)])
        assert alone.tobytes() == together[position : position + 1].tobytes()


@each_case
def test_a_row_alone_gets_the_same_bits(variant: str, shape: Shape) -> None:
    for row, sequence in enumerate(sequences_of(shape)):
        (alone,) = attend(engine(variant), Pages(shape, [len(sequence)], 7), [sequence], [(0, 0, len(sequence))])
        assert alone.tobytes() == whole(variant, shape)[row].tobytes()


@each_case
def test_one_token_at_a_time_gives_the_same_bits(variant: str, shape: Shape) -> None:
    """All sequences decode side by side, one of them with a head start."""
    pages, sequences = Pages(shape, LENGTHS, 3), sequences_of(shape)
    got: list[list[Array]] = [attend(engine(variant), pages, sequences, [(5, 0, 70)]), *([] for _ in LENGTHS)]
    by_row = {row: ([got[0][0]] if row == 5 else []) for row in range(len(LENGTHS))}
    for step in range(max(LENGTHS)):
        starts = {row: step + (70 if row == 5 else 0) for row in range(len(LENGTHS))}
        parts = [(row, start, 1) for row, start in starts.items() if start < LENGTHS[row]]
        for (row, _, _), bits in zip(
            parts, attend(engine(variant), pages, sequences, parts) if parts else (), strict=True
        ):
            by_row[row].append(bits)
    for row, wanted in enumerate(whole(variant, shape)):
        assert np.concatenate(by_row[row]).tobytes() == wanted.tobytes()


@each_case
def test_any_chunks_give_the_same_bits(variant: str, shape: Shape) -> None:
    rng = np.random.default_rng(5)
    for _ in range(3):
        pages, sequences, done = Pages(shape, LENGTHS, 4), sequences_of(shape), [0] * len(LENGTHS)
        by_row: list[list[Array]] = [[] for _ in LENGTHS]
        while parts := [
            (row, done[row], int(min(rng.choice([1, 3, 17, 64, 100]), length - done[row])))
            for row, length in enumerate(LENGTHS)
            if done[row] < length
        ]:
            parts = [parts[i] for i in rng.permutation(len(parts))]
            for (row, _, count), bits in zip(parts, attend(engine(variant), pages, sequences, parts), strict=True):
                by_row[row].append(bits)
                done[row] += count
        for row, wanted in enumerate(whole(variant, shape)):
            assert np.concatenate(by_row[row]).tobytes() == wanted.tobytes()


@each_case
@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_change_no_bit(variant: str, shape: Shape, num_threads: int) -> None:
    got = attend(engine(variant, num_threads), Pages(shape, LENGTHS), sequences_of(shape), prompts(LENGTHS))
    assert [bits.tobytes() for bits in got] == [bits.tobytes() for bits in whole(variant, shape)]


@each_case
@pytest.mark.parametrize("block_size", [32, 64, 160])
def test_neither_block_size_nor_places_change_a_bit(variant: str, shape: Shape, block_size: int) -> None:
    moved = Pages(replace(shape, block_size=block_size), LENGTHS, seed=9)
    got = attend(engine(variant), moved, sequences_of(shape), prompts(LENGTHS))
    assert [bits.tobytes() for bits in got] == [bits.tobytes() for bits in whole(variant, shape)]


@each_kind
@pytest.mark.parametrize("window", [0, 1500])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_long_contexts_keep_the_law(variant: str, kv_type: Type, window: int, num_threads: int) -> None:
    """Decode beside short rows, alone, and in chunks that end near the borders of partitions."""
    shape, lengths = Shape(heads=2, kv_heads=1, dim=32, window=window, kv_type=kv_type), (3100, 40)
    sequences = sequences_of(shape, lengths)
    wanted = whole(variant, shape, lengths)[0]
    pages, team = Pages(shape, lengths, 2), engine(variant, num_threads)
    for begin, end in ((0, 1020), (1020, 1025), (1025, 2047), (2047, 2048), (2048, 2049), (2049, 3050)):
        (bits,) = attend(team, pages, sequences, [(0, begin, end - begin)])
        assert bits.tobytes() == wanted[begin:end].tobytes()
    for position in range(3050, 3100):
        beside = [(1, 0, 40)] * (position % 3)
        bits = attend(team, pages, sequences, [*beside, (0, position, 1)])[-1]
        assert bits.tobytes() == wanted[position : position + 1].tobytes()


@each_kind
@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, False), (3.0, False), (0.0, True)])
def test_a_broken_query_harms_no_other_row(variant: str, kv_type: Type, softcap: float, sinks: bool) -> None:
    shape = Shape(kv_type=kv_type, softcap=softcap, sinks=sinks)
    sequences = list(sequences_of(shape))
    broken = sequences[3]
    sequences[3] = Tokens(np.full_like(broken.q, np.nan), np.full_like(broken.k, np.inf), broken.v * np.nan)
    pages = Pages(shape, LENGTHS)
    got = attend(engine(variant), pages, sequences, prompts(LENGTHS))
    for row, wanted in enumerate(whole(variant, shape)):
        assert row == 3 or got[row].tobytes() == wanted.tobytes()
    assert np.isnan(got[3]).all()
    if kv_type is Type.BFLOAT16:
        assert np.isfinite(from_bf16(pages.keys)).all()
        assert np.isfinite(from_bf16(pages.values)).all()


def test_a_decode_step_needs_little_memory_for_a_long_context() -> None:
    """One query whose heads' tasks are all cut into many parts."""
    shape, team, context = Shape(heads=32, kv_heads=8, dim=128, kv_type=Type.FLOAT32), engine(VARIANTS[0], 16), 131072
    pages = Pages(shape, [shape.block_size])
    pages.table = np.zeros((1, context // shape.block_size), np.int32)  # all positions are in one block
    pages.keys[:] = pages.values[:] = 0
    q, out = (np.ones((1, shape.heads * shape.dim), np.float32) for _ in range(2))
    op = AttentionOp(
        kind=Kind.ATTENTION, q=q.ctypes.data, keys=pages.keys.ctypes.data, values=pages.values.ctypes.data,
        out=out.ctypes.data, q_stride=q.shape[1], out_stride=out.shape[1], num_heads=shape.heads,
        num_kv_heads=shape.kv_heads, head_dim=shape.dim, block_size=shape.block_size, kv_type=shape.kv_type,
        out_type=shape.out_type, scaling=1.0,
    )  # fmt: skip
    batch, before = Batch(pages, [(0, context - 1, 1)]), mapped_bytes()
    run(team, [op], batch.step)
    assert not out.any()
    assert mapped_bytes() - before < 16 << 20


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Rotation:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    rotary_dim: int = 64
    norm: bool = False
    norm_whole: bool = False
    kv_type: Type = Type.BFLOAT16


ROTATIONS = {
    "halves": Rotation(),
    "part": Rotation(rotary_dim=24, kv_type=Type.FLOAT32),
    "small": Rotation(dim=12, rotary_dim=12),
    "none": Rotation(rotary_dim=0),
    "norm": Rotation(norm=True, dim=80, rotary_dim=80, kv_type=Type.FLOAT32),
    "norm-whole": Rotation(norm=True, norm_whole=True),
}


def rotate(shape: Rotation, x: Array, positions: Array, weight: Array | None, table: Array) -> Array:
    """x [tokens, heads, dim] as float64."""
    y = x.astype(np.float64)
    if weight is not None:
        axes = (1, 2) if shape.norm_whole else (2,)
        y = y / np.sqrt((y**2).mean(axes, keepdims=True) + 1e-6) * weight.reshape(1, -1, shape.dim)
    if not shape.rotary_dim:
        return y
    half = shape.rotary_dim // 2
    cos, sin = table[positions, None, :half], table[positions, None, half:]
    rotated = y[..., : shape.rotary_dim]
    a, b = rotated[..., :half], rotated[..., half:]
    a, b = a * cos - b * sin, b * cos + a * sin
    return np.concatenate((a, b, y[..., shape.rotary_dim :]), -1)


def unpaged(pages: Pages, memory: Array, row: int, length: int, values: bool) -> Array:
    """What the cache holds for a row: float32 [length, kv_heads, dim]."""
    heads, dim, size = pages.shape.kv_heads, pages.shape.dim, pages.shape.block_size
    paired = pages.shape.kv_type is Type.BFLOAT16
    rows, columns = (size, dim) if values else (dim, size)
    if paired:
        blocks = from_bf16(memory).reshape(-1, heads, rows // 2, columns, 2).swapaxes(-1, -2)
        blocks = blocks.reshape(-1, heads, rows, columns)
    else:
        blocks = memory.reshape(-1, heads, rows, columns)
    blocks = blocks if values else blocks.swapaxes(-1, -2)  # [blocks, heads, block_size, dim]
    positions = np.arange(length)
    return np.asarray(blocks[pages.table[row, positions // size], :, positions % size])


def rotate_natively(
    shape: Rotation, team: NativeKernels, lengths: Sequence[int], first: int
) -> tuple[Array, Array, list[Array], list[Array], dict[str, Array]]:
    """q and k after the operation, and what the cache holds; per row the positions first .. first + length - 1."""
    plain = Shape(shape.heads, shape.kv_heads, shape.dim, kv_type=shape.kv_type)
    pages = Pages(plain, [first + length for length in lengths])
    parts = [(row, first, length) for row, length in enumerate(lengths)]
    batch = Batch(pages, parts)
    rng = np.random.default_rng(8)
    stride, tokens = shape.heads * shape.dim + 16, sum(lengths)
    q, k, v = (rng.standard_normal((tokens, stride)).astype(np.float32) for _ in range(3))
    weights = [rng.standard_normal(n * shape.dim if shape.norm_whole else shape.dim).astype(np.float32)
               for n in (shape.heads, shape.kv_heads)]  # fmt: skip
    table = rng.standard_normal((first + max(lengths), max(shape.rotary_dim, 1))).astype(np.float32)
    given = {"q": q.copy(), "k": k.copy(), "v": v, "table": table, "positions": batch.positions}
    given |= {"q_norm": weights[0], "k_norm": weights[1]}
    op = RotaryOp(
        kind=Kind.ROTARY, kv_type=shape.kv_type, q=q.ctypes.data, k=k.ctypes.data, v=v.ctypes.data,
        keys=pages.keys.ctypes.data, values=pages.values.ctypes.data,
        cos_sin=table.ctypes.data if shape.rotary_dim else None,
        q_norm=weights[0].ctypes.data if shape.norm else None, k_norm=weights[1].ctypes.data if shape.norm else None,
        stride=stride, num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.dim,
        rotary_dim=shape.rotary_dim, block_size=plain.block_size,
        norm_whole=shape.norm_whole, eps=1e-6,
    )  # fmt: skip
    run(team, [op], batch.step)
    ends = [first + length for length in lengths]
    keys = [unpaged(pages, pages.keys, row, end, values=False)[first:] for row, end in enumerate(ends)]
    values = [unpaged(pages, pages.values, row, end, values=True)[first:] for row, end in enumerate(ends)]
    return q, k, keys, values, given


@each_variant
@pytest.mark.parametrize("shape", ROTATIONS.values(), ids=ROTATIONS.keys())
@pytest.mark.parametrize("lengths", [(1,), (5, 40, 1)])
def test_rotation_and_write(variant: str, shape: Rotation, lengths: tuple[int, ...]) -> None:
    q, k, keys, values, given = rotate_natively(shape, engine(variant), lengths, first=37)
    for got, name, heads in ((q, "q", shape.heads), (k, "k", shape.kv_heads)):
        width = heads * shape.dim
        weight = given[f"{name}_norm"] if shape.norm else None
        before = given[name][:, :width].reshape(-1, heads, shape.dim)
        wanted = rotate(shape, before, given["positions"], weight, given["table"])
        np.testing.assert_allclose(got[:, :width].reshape(wanted.shape), wanted, rtol=2e-6, atol=4e-6)
        assert got[:, width:].tobytes() == given[name][:, width:].tobytes()
    width = shape.kv_heads * shape.dim
    for memory, source in ((keys, k), (values, given["v"])):
        written = np.concatenate(memory).reshape(-1, width)
        np.testing.assert_array_equal(written, rounded(source[:, :width], shape.kv_type))


@each_variant
@pytest.mark.parametrize("shape", ROTATIONS.values(), ids=ROTATIONS.keys())
@pytest.mark.parametrize("num_threads", [2, 3])
def test_a_token_is_rotated_alike_in_any_company(variant: str, shape: Rotation, num_threads: int) -> None:
    q, k, keys, _, _ = rotate_natively(shape, engine(variant), (30,), first=5)
    team = engine(variant, num_threads)
    many = rotate_natively(shape, team, (30,), first=5)
    one = rotate_natively(shape, team, (1,), first=5)
    assert many[0].tobytes() == q.tobytes()
    assert many[1].tobytes() == k.tobytes()
    assert many[2][0].tobytes() == keys[0].tobytes()
    alone = rotate_natively(shape, engine(variant), (1,), first=5)
    assert one[0].tobytes() == alone[0].tobytes()
    assert one[2][0].tobytes() == alone[2][0].tobytes()


OPTIONS = {
    "plain": AttentionOptions(scaling=0.2),
    "all": AttentionOptions(scaling=0.2, sliding_window=20, softcap=4.0, sinks=torch.linspace(-2, 3, 6)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("variant", list(dict.fromkeys([*VARIANTS[:1], *FIXED_POINT])))
def test_modules_attend_as_with_the_reference(variant: str, dtype: torch.dtype, options: AttentionOptions) -> None:
    """Two steps: prompts of three rows, then one token of each, with queries strided as transformers passes them."""
    shape, block_size, cpu = LayerShape(2, 16, 16), 32, torch.device("cpu")
    layer, team = nn.Identity(), engine(variant)
    reference_cache = LayerKVCache(shape, 8, block_size, dtype, cpu)
    memory = NativeKVMemory(team.library, [LayerKV(shape.num_kv_heads, shape.key_dim)], 8, block_size, TYPE_OF[dtype])
    attention = NativePagedAttention(team, [layer], memory)
    table = np.array([[4, 0], [7, 1], [2, 5]], np.int32)
    generator = torch.Generator().manual_seed(0)
    for starts, counts in (([0, 0, 0], [3, 33, 40]), ([3, 33, 40], [1, 1, 1])):
        positions = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, counts, strict=True)]).astype(np.int32)
        rows = np.repeat(np.arange(3), counts)
        slots = (table[rows, positions // block_size] * block_size + positions % block_size).astype(np.int32)
        lens = np.array(starts, np.int32) + np.array(counts, np.int32)
        query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        none = np.empty(0, np.int32)
        q, k, v = (
            torch.randn(heads, len(rows), 16, generator=generator).to(dtype).transpose(0, 1) for heads in (6, 2, 2)
        )
        flat = FlatStep(none, np.array(counts, np.int32), lens, query_start, none, positions, slots, none)
        attention.begin(flat, table)
        got = attention.attend(layer, q, k, v, options)
        batch = RaggedBatch(
            np.array(counts, np.int64), lens.astype(np.int64), table, slots.astype(np.int64), block_size, cpu
        )
        wanted = PagedAttention({layer: reference_cache}, batch).attend(layer, q, k, v, options)
        assert got.dtype == dtype
        near = 1e-5 if dtype == torch.float32 else 2.0**-7
        torch.testing.assert_close(got, wanted, rtol=near, atol=near)
