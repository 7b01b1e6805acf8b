"""Products by weights in 8 bits and by the engine's own kernel, beside float32, in the shapes of real models.

    python -m benchmarks.accelerator.product_parity --device cuda --json FILE --scratch FOLDER

For: what libraries support on this GPU at which number of rows, which nothing but the GPU says. Does not know: how
activations are rounded; a product by rounded numbers may be as far off as its kind's bound. Invariants: fresh random
numbers for each shape; outputs are NaN before a call; every product is in the results before anything fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from .section import Section, run_alone, seconds_per_call
from .shapes import SHAPES, Shape

ROWS = (1, 2, 16, 17, 64, 256, 2048, 8192)
MAX_ERROR = {"bfloat16": 6e-3, "own kernel": 6e-3, "int8": 2.5e-2, "fp8": 5e-2}
"""Of all numbers together, relative to float32's product by the plain weight."""
_EIGHT_BITS: tuple[Literal["int8", "fp8"], ...] = ("int8", "fp8")
REAL = ("qwen2.5-0.5b", "qwen3-1.7b", "llama-3.1-8b")


def products(shape: Shape) -> dict[str, tuple[int, int]]:
    """Columns of the output and of the input, by the product's name."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "qkv": (query + 2 * key, shape.hidden_size),
        "out": (shape.hidden_size, query),
        "gate and up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
    }


def measure(section: Section) -> None:
    import torch

    wrong, device = [], torch.device(section.device)
    names, rows = (REAL, ROWS) if section.on_gpu else (("tiny",), (3,))
    for name in names:
        for product, (n, k) in products(SHAPES[name]).items():
            for line in _lines(n, k, rows, device):
                section.add(measure="product", case=f"{name} {product}", n=n, k=k, **line)
                if line["wrong"]:
                    wrong.append(f"{name} {product} by {line['kind']}, {line['rows']} rows: {line['wrong']}")
    section.fail(wrong)


def _lines(n: int, k: int, rows: tuple[int, ...], device: Any) -> Iterator[dict[str, Any]]:
    import torch

    random = torch.Generator(device).manual_seed(n + k)
    weight = torch.randn(n, k, generator=random, device=device).bfloat16() * k**-0.5
    inputs = torch.randn(max(rows), k, generator=random, device=device).bfloat16()
    for kind, multiply in _ways(weight).items():
        for count in rows:
            yield {"kind": kind, "rows": count, **_checked(multiply, inputs[:count], weight, MAX_ERROR[kind])}


def _ways(weight: Any) -> dict[str, Any]:
    from llmbackend.engine.gpu.kernels.matmul import invariant_matmul
    from llmbackend.engine.gpu.program import library_matmul
    from llmbackend.engine.gpu.weights import DenseWeight, QuantizedWeight

    dense = DenseWeight(weight)
    ways = {"bfloat16": _by(dense, library_matmul), "own kernel": _by(dense, invariant_matmul)}
    for kind in _EIGHT_BITS:
        ways[kind] = _by(QuantizedWeight.of(weight, kind), library_matmul)
    return ways


def _by(weight: Any, matmul: Any) -> Any:
    return lambda x, out: weight.multiply(matmul, x, None, out)


def _checked(multiply: Any, x: Any, weight: Any, max_error: float) -> dict[str, Any]:
    import torch

    out = torch.full((len(x), len(weight)), float("nan"), dtype=x.dtype, device=x.device)
    try:
        multiply(x, out)
        expected = x.float() @ weight.float().t()
        error = float((out.float() - expected).norm() / expected.norm())
        seconds = seconds_per_call(lambda: multiply(x, out), x.device) if x.is_cuda else 0.0
    except RuntimeError as failure:  # as CUBLAS_STATUS_NOT_SUPPORTED
        return {"wrong": f"{type(failure).__name__}: {failure}"[:300]}
    return {"error": error, "call_s": seconds, "wrong": "" if error <= max_error else "far from float32"}


if __name__ == "__main__":
    run_alone("product_parity", measure)
