"""Times paged attention of one decode or prefill step, natively and through the torch reference.

For tuning the native attention. Every layer has its own KV memory and the rows' blocks are scattered over it,
as in a model, so that keys and values come from memory and not from a cache. Run pinned to the cores that are measured:

    taskset -c 0 python -m benchmarks.kernels.attention --threads 1 --torch

--rows is a list of NxQ@C: N rows of Q queries each, at a context of C tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from llmbackend.engine.attention.interface import AttentionOptions, LayerShape
from llmbackend.engine.attention.reference import LayerKVCache, PagedAttention, RaggedBatch
from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.library import NativeKernels, op_pointers
from llmbackend.engine.kernels.operations import AttentionOp, Kind, RotaryOp, Step, Type

BLOCK_SIZE = 32
DEFAULT = "64x1@96,64x1@160,64x1@512,1x1@256,1x1@4096,1x512@512,1x512@1024,1x512@4096"
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Model:
    layers: int
    heads: int
    kv_heads: int
    dim: int


MODELS = {
    "qwen2.5-0.5b": Model(24, 14, 2, 64),
    "llama-125m": Model(12, 12, 12, 64),
    "llama-8b": Model(4, 32, 8, 128),
}


class Rows:
    """The ragged batch of one case, with scattered blocks."""

    def __init__(self, text: str) -> None:
        rows, rest = text.split("x")
        queries, context = rest.split("@")
        self.num_rows, self.num_queries, self.context = int(rows), int(queries), int(context)
        blocks_per_row = -(-self.context // BLOCK_SIZE)
        self.num_blocks = self.num_rows * blocks_per_row
        self.table = np.random.default_rng(0).permutation(self.num_blocks).astype(np.int32).reshape(-1, blocks_per_row)
        self.positions = np.tile(np.arange(self.context - self.num_queries, self.context), self.num_rows)
        owners = np.repeat(np.arange(self.num_rows), self.num_queries)
        blocks = self.table[owners, self.positions // BLOCK_SIZE].astype(np.int64)
        self.slots = blocks * BLOCK_SIZE + self.positions % BLOCK_SIZE
        self.num_tokens = len(self.positions)

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that it attends to."""
        return int((self.positions + 1).sum())


class NativeCase:
    """The operations of all layers on one batch."""

    def __init__(self, model: Model, rows: Rows, engine: NativeKernels, kv_type: Type, rotary: bool) -> None:
        self.engine, memory = engine, engine.library.memory
        width = model.heads * model.dim
        size = rows.num_blocks * BLOCK_SIZE * model.kv_heads * model.dim * (4 if kv_type is Type.FLOAT32 else 2)
        self.kv = [memory(size + 4160)[64 * (i % 7) :] for i in range(2 * model.layers)]
        for part in self.kv:
            part[:] = 0x3C  # every element is about 0.01, in either type
        rng = np.random.default_rng(1)
        self.q, self.k, self.v = (rng.standard_normal((rows.num_tokens, width + 16), np.float32) for _ in range(3))
        self.out = np.empty_like(self.q)
        self.cos_sin = rng.standard_normal((rows.context, model.dim)).astype(np.float32)
        self.arrays = [
            rows.positions.astype(np.int32),
            rows.slots.astype(np.int32),
            np.arange(0, rows.num_tokens + 1, rows.num_queries, dtype=np.int32),
            np.full(rows.num_rows, rows.context, np.int32),
            rows.table,
        ]
        names = ("positions", "slots", "query_start", "seq_lens", "block_table")
        pointers: dict[str, Any] = {name: array.ctypes.data for name, array in zip(names, self.arrays, strict=True)}
        self.step = Step(
            num_tokens=rows.num_tokens, num_rows=rows.num_rows, block_table_stride=rows.table.shape[1], **pointers
        )
        make = self._rotary if rotary else self._attention
        self.ops = [make(model, layer, kv_type) for layer in range(model.layers)]
        self.pointers = op_pointers(self.ops)

    def _common(self, model: Model, layer: int, kv_type: Type) -> dict[str, Any]:
        return {
            "kv_type": kv_type, "q": self.q.ctypes.data, "num_heads": model.heads, "num_kv_heads": model.kv_heads,
            "head_dim": model.dim, "block_size": BLOCK_SIZE, "keys": self.kv[2 * layer].ctypes.data,
            "values": self.kv[2 * layer + 1].ctypes.data,
        }  # fmt: skip

    def _attention(self, model: Model, layer: int, kv_type: Type) -> AttentionOp | RotaryOp:
        stride = self.q.shape[1]
        return AttentionOp(
            kind=Kind.ATTENTION, out=self.out.ctypes.data, q_stride=stride, out_stride=stride,
            scaling=model.dim**-0.5, **self._common(model, layer, kv_type),
        )  # fmt: skip

    def _rotary(self, model: Model, layer: int, kv_type: Type) -> AttentionOp | RotaryOp:
        return RotaryOp(
            kind=Kind.ROTARY, k=self.k.ctypes.data, v=self.v.ctypes.data, stride=self.q.shape[1],
            cos_sin=self.cos_sin.ctypes.data, rotary_dim=model.dim, **self._common(model, layer, kv_type),
        )  # fmt: skip

    def run(self) -> None:
        self.engine.run(self.pointers, len(self.ops), self.step)


class TorchCase:
    """The reference on the same batch; two layers take turns."""

    def __init__(self, model: Model, rows: Rows, dtype: torch.dtype) -> None:
        self.layers = [nn.Identity() for _ in range(2)]
        shape = LayerShape(model.kv_heads, model.dim, model.dim)
        caches: dict[nn.Module, LayerKVCache] = {
            layer: LayerKVCache(shape, rows.num_blocks, BLOCK_SIZE, dtype, torch.device("cpu")) for layer in self.layers
        }
        counts = np.full(rows.num_rows, rows.num_queries, np.int64)
        batch = RaggedBatch(
            counts, np.full(rows.num_rows, rows.context, np.int64), rows.table, rows.slots, BLOCK_SIZE,
            torch.device("cpu"),
        )  # fmt: skip
        self.context = PagedAttention(caches, batch)
        self.q = torch.randn(rows.num_tokens, model.heads, model.dim).to(dtype)
        self.k = torch.randn(rows.num_tokens, model.kv_heads, model.dim).to(dtype)
        self.options = AttentionOptions(scaling=model.dim**-0.5)

    def run(self) -> None:
        for layer in self.layers:
            self.context.attend(layer, self.q, self.k, self.k, self.options)


def least_ms(run: Callable[[], None], repeats: int, threads: int) -> float:
    """One thread's own time, which other processes on its core do not stretch; several threads' on the clock."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    run()
    times = []
    for _ in range(repeats):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times) * 1e3


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-0.5b")
    parser.add_argument("--rows", default=DEFAULT)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--float32", action="store_true", help="KV memory of a float32 model, not of a bfloat16 one")
    parser.add_argument("--rotary", action="store_true", help="rotation and KV write instead of attention")
    parser.add_argument("--torch", action="store_true", help="also the torch reference")
    parser.add_argument("--variant", default=None)
    given = parser.parse_args(arguments)
    loaded = library.load(given.variant)
    if loaded is None:
        raise SystemExit("no native kernels are built")
    torch.set_num_threads(given.threads)
    model, kv_type = MODELS[given.model], loaded.kv_type(Type.FLOAT32 if given.float32 else Type.BFLOAT16)
    engine = NativeKernels(loaded, given.threads)
    print(f"{given.model}, {loaded.variant}, {kv_type.name.lower()}, {given.threads} threads")
    for text in given.rows.split(","):
        rows = Rows(text)
        case = NativeCase(model, rows, engine, kv_type, given.rotary)
        ms = least_ms(case.run, given.repeats, given.threads) / model.layers
        flops = 4 * rows.num_pairs * model.heads * model.dim
        kv_bytes = 2 * rows.num_rows * rows.context * model.kv_heads * model.dim * (4 if given.float32 else 2)
        line = f"{text:>12} {ms:8.3f} ms a layer {ms * model.layers:8.2f} ms a step"
        line += f" {flops / ms / 1e6:7.1f} GFLOP/s {kv_bytes / ms / 1e6:6.1f} GB/s"
        if given.torch:
            dtype = torch.float32 if given.float32 else torch.bfloat16
            torch_ms = least_ms(TorchCase(model, rows, dtype).run, 3, given.threads) / 2
            line += f"   torch {torch_ms:8.3f} ms a layer, {torch_ms / ms:5.1f} x"
        print(line, flush=True)


if __name__ == "__main__":
    main()
