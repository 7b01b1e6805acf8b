"""Launches the attention kernels: tile sizes, workspace, arguments.

Used by triton_ops.py, and by benchmarks. Invariant: a call allocates nothing and reads nothing back, so it can be
captured in a graph. attention.py describes the algorithm and its guarantees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from ..ops.ops import AttendSpec, LayerCache, StepLayout
from . import attention
from .matmul import dot_dtype, has_group_products, has_little_shared_memory, has_tensor_memory

SPLIT = 256
"""Keys per split. Not tunable, because results depend on it in their rounding: 256 keys of 128 dimensions are 128 KiB
of memory traffic, enough to hide the start of a program, and 8192 keys of one head are 32 programs."""

_PREFILL_PROGRAMS = 4
"""Prefill programs per multiprocessor; one runs at a time, and the device starts the next one on any free
multiprocessor."""
_CPU_MULTIPROCESSORS = 2
"""Used under the interpreter."""
_UNROLL = 8
"""Splits that combine_kernel loads at a time."""
_LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiles:
    """Launch parameters for one head_dim, dtype and cache dtype."""

    keys: int
    """Keys per tile, the same for decode and prefill."""
    rows: int
    """(query, head) pairs per prefill tile."""
    warps: int
    stages: int
    """Pipeline stages of prefill."""
    decode_warps: int
    decode_stages: int
    decode_programs: int = 2
    """Decode programs per multiprocessor that run concurrently. If fewer fit than are launched, the last ones start
    when the first ones have ended, and have the device to themselves."""
    decode_registers: int | None = None
    """Limit per thread of decode, so that its programs fit."""


def choose_tiles(head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, exact_chunks: bool) -> Tiles:
    """cache_dtype changes no result, only how many programs run."""
    padded = _padded(head_dim)
    tiles = _choose_tiles(padded, dtype, exact_chunks)
    if has_little_shared_memory():
        return replace(tiles, decode_programs=2 if padded * cache_dtype.itemsize <= 256 else 1)
    if padded > 128 or cache_dtype.itemsize != 2:  # the limit would cost 40 to 170 bytes of local memory per thread
        return tiles
    return replace(tiles, decode_programs=3, decode_registers=168)


def _choose_tiles(padded: int, dtype: torch.dtype, exact_chunks: bool) -> Tiles:
    """Chosen by the padded head_dim: shared memory holds `stages` tiles of keys and values, registers the sums."""
    if dtype == torch.float32:  # no tensor cores; meant for verification, not for speed
        return Tiles(keys=16, rows=16, warps=4, stages=2, decode_warps=4, decode_stages=2)
    tall = has_group_products()
    keys = 64 if padded <= (128 if tall else 64) else 32
    if exact_chunks:
        return Tiles(keys, rows=16, warps=4, stages=5, decode_warps=4, decode_stages=5)
    if tall:
        rows = 128 if padded <= (64 if has_tensor_memory() else 128) else 64
        return Tiles(keys, rows, warps=8, stages=3, decode_warps=4, decode_stages=5)
    if padded > 128:
        # More keys than rows, so that warps share the columns of the sums. If they shared the rows, a thread would hold
        # 128 numbers of this split and 128 of the previous ones, more than it has registers.
        return Tiles(keys=64, rows=32, warps=8, stages=2, decode_warps=4, decode_stages=2)
    return Tiles(keys, rows=64, warps=4, stages=3, decode_warps=4, decode_stages=5)


def _padded(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))


class PagedAttention:
    """Launches the kernels; owns the workspace of decode, which the layers and the graphs of one stream share."""

    def __init__(
        self,
        device: torch.device,
        *,
        num_heads: int,
        head_dim: int,
        max_num_seqs: int,
        max_seq_len: int,
        workspace_bytes: int = 256 << 20,
        exact_chunks: bool = False,
        num_multiprocessors: int | None = None,
    ) -> None:
        """num_heads, head_dim: the largest of any layer. max_num_seqs: sequences of a step, padding included.
        workspace_bytes: limit for splits; sequences whose splits do not fit are computed by fewer programs, with the
        same result. exact_chunks: see attention.py. num_multiprocessors: the device's, unless given."""
        place = num_heads * (head_dim + 2)
        splits = min(max_num_seqs * triton.cdiv(max_seq_len, SPLIT), workspace_bytes // (place * 4))
        self._workspace = torch.empty((splits + max_num_seqs) * place, dtype=torch.float32, device=device)
        self._max_num_seqs = max_num_seqs
        self._sequences = int(triton.next_power_of_2(max_num_seqs))
        self._num_multiprocessors = num_multiprocessors or _multiprocessors(device)
        self._exact_chunks = exact_chunks

    def attend(
        self,
        qkv: torch.Tensor,
        layout: StepLayout,
        block_table: torch.Tensor,
        spec: AttendSpec,
        cache: LayerCache,
        out: torch.Tensor,
    ) -> None:
        """As Ops.attend. Raises ValueError for what the kernels do not support."""
        _check(qkv, spec, cache, out)
        num_sequences = layout.query_start.shape[0] - 1
        if num_sequences > self._max_num_seqs or self._places(spec) < self._max_num_seqs:
            raise ValueError(
                f"{num_sequences} sequences, {spec.num_heads} heads of {spec.head_dim}: more than promised"
            )
        tiles = choose_tiles(spec.head_dim, qkv.dtype, cache.keys.dtype, self._exact_chunks)
        sinks = self._workspace if spec.sinks is None else spec.sinks  # any float32 tensor: it is not read
        sequences = layout.rows, layout.query_start, layout.seq_lens
        tensors = qkv, cache.keys, cache.values, block_table, *sequences, sinks
        strides = qkv.stride(0), cache.keys.stride(0), cache.keys.stride(1), out.stride(0), block_table.stride(0)
        common = {"SEQUENCES": self._sequences, **_constants(spec, cache, qkv.dtype, tiles), "enable_fp_fusion": False}
        if layout.max_query_len > 1:
            programs = self._num_prefill_programs(tiles, spec, qkv.shape[0], num_sequences)
            attention.prefill_kernel[(programs,)](
                *tensors, out, *strides, num_sequences, *_factors(spec), KV_HEADS=spec.num_kv_heads, ROWS=tiles.rows,
                **common, num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
        places = self._places(spec)
        capacity = places - self._max_num_seqs
        head_tiles = spec.num_kv_heads * triton.cdiv(spec.num_heads // spec.num_kv_heads, 16)
        max_splits = _max_splits(layout.max_seq_len, spec.window)
        programs = min(num_sequences * head_tiles * max_splits, tiles.decode_programs * self._num_multiprocessors)
        attention.decode_kernel[(programs,)](
            *tensors, self._workspace, out, *strides, num_sequences, capacity, places, *_factors(spec),
            HEADS=spec.num_heads, **common, num_warps=tiles.decode_warps, num_stages=tiles.decode_stages,
            maxnreg=tiles.decode_registers,
        )  # fmt: skip
        if max_splits > 1:
            self._combine(layout, spec, out, capacity, places)

    def _num_prefill_programs(self, tiles: Tiles, spec: AttendSpec, num_tokens: int, num_sequences: int) -> int:
        group = spec.num_heads // spec.num_kv_heads
        heads_here = min(group, tiles.rows)
        most_tiles = num_tokens // (tiles.rows // heads_here) + min(num_sequences, num_tokens)
        most_items = most_tiles * spec.num_kv_heads * triton.cdiv(group, heads_here)
        return int(min(most_items, _PREFILL_PROGRAMS * self._num_multiprocessors))

    def _combine(self, layout: StepLayout, spec: AttendSpec, out: torch.Tensor, capacity: int, places: int) -> None:
        attention.combine_kernel[(layout.query_start.shape[0] - 1, spec.num_heads)](
            self._workspace, layout.query_start, layout.seq_lens,
            self._workspace if spec.sinks is None else spec.sinks, out, out.stride(0), capacity, places, spec.window,
            HEADS=spec.num_heads, HEAD_DIM=spec.head_dim, PADDED=_padded(spec.head_dim), SPLIT=SPLIT,
            SEQUENCES=self._sequences, UNROLL=_UNROLL, HAS_WINDOW=spec.window > 0, HAS_SINKS=spec.sinks is not None,
            num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip

    def _places(self, spec: AttendSpec) -> int:
        return self._workspace.numel() // (spec.num_heads * (spec.head_dim + 2))


def _check(qkv: torch.Tensor, spec: AttendSpec, cache: LayerCache, out: torch.Tensor) -> None:
    """Raises ValueError for what the kernels do not support; some of it would make them read out of bounds."""
    block_size, head_dim = cache.keys.shape[2:]
    if block_size < 16 or block_size & (block_size - 1):
        raise ValueError(f"block_size {block_size}: expected a power of two from 16")
    if spec.scaling <= 0:
        raise ValueError(f"scaling {spec.scaling}: expected a factor above 0")
    if cache.keys.stride() != cache.values.stride() or cache.keys.stride()[2:] != (head_dim, 1):
        raise ValueError(f"key and value strides {cache.keys.stride()}, {cache.values.stride()}: expected equal ones")
    if qkv.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("qkv, out: expected rows without gaps between their elements")
    expected = (spec.num_kv_heads, spec.head_dim)
    if (cache.keys.shape[1], head_dim) != expected:
        raise ValueError(f"cache of (num_kv_heads, head_dim) {(cache.keys.shape[1], head_dim)}: expected {expected}")


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _max_splits(max_seq_len: int, window: int) -> int:
    """Maximum number of splits that the last query of a sequence attends to."""
    splits = max(1, -(-max_seq_len // SPLIT))
    return min(splits, -(-window // SPLIT) + 1) if window else splits


def _factors(spec: AttendSpec) -> tuple[float, float, int]:
    """key_scale, softcap and window as _attend_tile expects them."""
    if spec.softcap:
        return spec.scaling / spec.softcap, spec.softcap * _LOG2E, spec.window
    return spec.scaling * _LOG2E, 0.0, spec.window


def _constants(spec: AttendSpec, cache: LayerCache, dtype: torch.dtype, tiles: Tiles) -> dict[str, object]:
    return {
        "GROUP": spec.num_heads // spec.num_kv_heads,
        "HEAD_DIM": spec.head_dim,
        "PADDED": _padded(spec.head_dim),
        "BLOCK_SIZE": cache.keys.shape[2],
        "TILE": tiles.keys,
        "SPLIT": SPLIT,
        "HAS_WINDOW": spec.window > 0,
        "HAS_SOFTCAP": spec.softcap > 0,
        "HAS_SINKS": spec.sinks is not None,
        "DOT": dot_dtype(dtype),
        "PRECISION": "ieee",
    }
