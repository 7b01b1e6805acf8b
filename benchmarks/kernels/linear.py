"""Times the linear layers of one decode or prefill step, natively and through torch's packed oneDNN path.

For tuning the native linear layer. The weights of all layers are distinct, as in a model, so that they come
from memory and not from a cache. Run pinned to the cores that are measured:

    taskset -c 0 python -m benchmarks.kernels.linear --threads 1 --rows 1,8,64 --torch
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.library import NativeKernels, op_pointers, packed_bytes, scale_bytes, sums_bytes
from llmbackend.engine.kernels.operations import Epilogue, Kind, LinearOp, Rows, Step, Type

SCALES = {Type.INT8: np.float32} | dict.fromkeys(library.FOUR_BITS, np.float16)
SUMS = {Type.INT8: np.int32, Type.INT4_MIN: np.float16, Type.INT4_ZERO: np.uint8}
"""Of these types, with minima or zeros in their place."""
TYPES = (Type.FLOAT32, Type.BFLOAT16, *SCALES, *library.BLOCKS)
"""GGUF types of super-blocks need a model whose sizes are multiples of 256: qwen3-1.7b."""
MAX_HEAD_ROWS = 64
"""A prefill step samples few of its rows."""


@dataclass(frozen=True)
class Shape:
    """A linear layer: n outputs, k inputs; with SILU_MUL two weights of n."""

    n: int
    k: int
    epilogue: Epilogue = Epilogue.STORE

    @property
    def num_weights(self) -> int:
        return 2 if self.epilogue is Epilogue.SILU_MUL else 1


def layer_shapes(hidden: int, qkv: int, attention: int, mlp: int) -> list[Shape]:
    return [
        Shape(qkv, hidden),
        Shape(hidden, attention, Epilogue.ADD),
        Shape(mlp, hidden, Epilogue.SILU_MUL),
        Shape(hidden, mlp, Epilogue.ADD),
    ]


MODELS = {
    "qwen2.5-0.5b": (24, layer_shapes(896, 1152, 896, 4864), Shape(151936, 896)),
    "llama-125m": (12, layer_shapes(768, 2304, 768, 2048), Shape(32000, 768)),
    "qwen3-1.7b": (28, layer_shapes(2048, 4096, 2048, 6144), Shape(151936, 2048)),
}


class Program:
    """The linear layers of all of a model's layers, with random weights."""

    def __init__(self, engine: NativeKernels, model: str, weight_type: Type, max_rows: int) -> None:
        self.engine = engine
        self.weight_type = weight_type
        model_type = Type.FLOAT32 if weight_type is Type.FLOAT32 else Type.BFLOAT16
        self.x_type = engine.library.activation_type(model_type)
        num_layers, shapes, head = MODELS[model]
        self.shapes = shapes * num_layers + [head]
        self.keep: list[Any] = []
        self.x = {k: self._rows(max_rows, k) for k in {shape.k for shape in self.shapes}}
        self.y = {n: self._rows(max_rows if n != head.n else MAX_HEAD_ROWS, n) for n in {s.n for s in self.shapes}}
        ops = [self._op(shape, Rows.SAMPLED if shape is head else Rows.TOKENS) for shape in self.shapes]
        self.keep.append(ops)
        self.ops, self.num_ops = op_pointers(ops), len(ops)

    def _x_stride(self, k: int) -> int:
        return -(-k // 32) * 32 if self.x_type is Type.BFLOAT16_TILES else -(-k // 16) * 16 + 16

    def _rows(self, rows: int, width: int) -> Any:
        data = self.engine.library.memory(rows * (width + 31) // 16 * 16 * 4 + 4096).view(np.float32)
        data[:] = np.random.default_rng(0).standard_normal(1024).repeat(data.size // 1024 + 1)[: data.size]
        if self.x_type is not Type.FLOAT32:  # both halves of a float32 are numbers
            bits = data.view(np.uint32)
            bits[:] = bits & 0xFFFF0000 | bits >> 16
        return data

    def _weight(self, shape: Shape) -> int:
        """Random bits that are finite numbers of the type."""
        packed = self.engine.library.memory(packed_bytes(shape.n, shape.k, self.weight_type))
        block = np.random.default_rng(1).standard_normal(1 << 16).astype(np.float32)
        if self.weight_type is Type.BFLOAT16:
            block = (block.view(np.uint32) >> 16).astype(np.uint16)
        elif self.weight_type is Type.INT8:
            block = (block * 40).astype(np.int8)
        elif self.weight_type in library.BLOCKS:  # any bytes may be a block's float16 scale
            block = np.full(1 << 18, 0x11, np.uint8)
        raw = block.view(np.uint8)
        for begin in range(0, packed.size, raw.size):
            packed[begin : begin + raw.size] = raw[: packed.size - begin]
        self.keep.append(packed)
        return int(packed.ctypes.data)

    def _ones(self, size_bytes: int, dtype: Any) -> int:
        values = np.ones(size_bytes // np.dtype(dtype).itemsize, dtype)
        self.keep.append(values)
        return int(values.ctypes.data)

    def _op(self, shape: Shape, rows: Rows) -> LinearOp:
        op = LinearOp(
            kind=Kind.LINEAR, rows=rows, n=shape.n, k=shape.k, weight=self._weight(shape),
            x=self.x[shape.k].ctypes.data, x_stride=self._x_stride(shape.k),
            y=self.y[shape.n].ctypes.data, y_stride=-(-shape.n // 16) * 16 + 16,
            weight_type=self.weight_type, x_type=self.x_type, epilogue=shape.epilogue, factor=1e-9,
        )  # fmt: skip
        if shape.num_weights == 2:
            op.weight2 = self._weight(shape)
        for suffix in ("", "2")[: shape.num_weights]:
            self._add_scales(op, shape, suffix)
        return op

    def _add_scales(self, op: LinearOp, shape: Shape, suffix: str) -> None:
        packed = (shape.n, shape.k, self.weight_type)
        if self.weight_type in SCALES:
            setattr(op, f"scale{suffix}", self._ones(scale_bytes(*packed), SCALES[self.weight_type]))
        if self.weight_type in SUMS:
            setattr(op, f"sums{suffix}", self._ones(sums_bytes(*packed), SUMS[self.weight_type]))

    @property
    def weight_bytes(self) -> int:
        """With scales, sums, minima and zeros."""
        parts = (packed_bytes, scale_bytes, sums_bytes)
        per_weight = ((sum(part(s.n, s.k, self.weight_type) for part in parts), s.num_weights) for s in self.shapes)
        return sum(size * count for size, count in per_weight)

    def flops(self, rows: int) -> float:
        per_row = [2.0 * shape.n * shape.k * shape.num_weights for shape in self.shapes]
        return rows * sum(per_row[:-1]) + min(rows, MAX_HEAD_ROWS) * per_row[-1]

    def run(self, rows: int) -> None:
        step = Step(num_tokens=rows, num_sampled=min(rows, MAX_HEAD_ROWS))
        self.engine.run(self.ops, self.num_ops, step)


def torch_program(model: str, threads: int) -> Callable[[int], None]:
    """The same products through PackedLinear, epilogues left out."""
    import torch

    from llmbackend.engine.cpu.linear import PackedLinear, has_native

    torch.set_num_threads(threads)
    num_layers, shapes, head = MODELS[model]
    compute = torch.bfloat16 if has_native(torch.bfloat16) else torch.float32
    linears = [
        PackedLinear(torch.randn(shape.n * shape.num_weights, shape.k, dtype=compute), None, compute)
        for shape in shapes * num_layers + [head]
    ]

    def run(rows: int) -> None:
        with torch.inference_mode():
            for linear in linears:
                count = rows if linear is not linears[-1] else min(rows, MAX_HEAD_ROWS)
                linear(torch.ones(count, linear.in_features, dtype=compute))

    return run


def best_and_median_ms(run: Callable[[int], None], rows: int, seconds: float, threads: int) -> tuple[float, float]:
    """One thread's own time, which other processes on its core do not stretch; several threads' on the clock."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    run(rows)
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        begin = clock()
        run(rows)
        times.append(clock() - begin)
    return min(times) * 1e3, statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="qwen2.5-0.5b", choices=MODELS)
    parser.add_argument("--variant", help="instruction set; the best by default")
    parser.add_argument("--type", default="BFLOAT16", choices=[kind.name for kind in TYPES])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default="1,4,8,16,32,64,128,512")
    parser.add_argument("--seconds", type=float, default=1.0, help="per number of rows")
    parser.add_argument("--torch", action="store_true")
    arguments = parser.parse_args()
    loaded = library.load(arguments.variant)
    if loaded is None:
        raise SystemExit("no native kernels")
    all_rows = [int(rows) for rows in arguments.rows.split(",")]
    engine = NativeKernels(loaded, arguments.threads)
    program = Program(engine, arguments.model, Type[arguments.type], max(all_rows))
    other = torch_program(arguments.model, arguments.threads) if arguments.torch else None
    print(f"{arguments.model}, {loaded.variant}, {arguments.type}, {arguments.threads} threads")
    print("rows   best ms  median ms   GB/s  GFLOP/s" + ("   torch ms (median)" if other else ""))
    for rows in all_rows:
        best, median = best_and_median_ms(program.run, rows, arguments.seconds, arguments.threads)
        rates = f"{program.weight_bytes / median / 1e6:6.1f} {program.flops(rows) / median / 1e6:8.0f}"
        peer = f"{best_and_median_ms(other, rows, arguments.seconds, arguments.threads)[1]:12.1f}" if other else ""
        print(f"{rows:4d} {best:9.1f} {median:10.1f} {rates}{peer}", flush=True)


if __name__ == "__main__":
    main()
