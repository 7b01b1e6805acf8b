"""Products by weights in 16, 8 and 4 bits, by libraries and own kernels, compared with float32, in shapes of real
models.

    python -m benchmarks.accelerator.product_parity --device cuda --json FILE --scratch FOLDER

Shows what libraries support on this GPU for which number of rows, which only the GPU can tell. Independent of times
(product_times.py). Invariants: fresh random numbers for each shape; outputs are NaN before a call; every product is in
the results before anything fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .product_ways import KINDS, Way, products, way
from .section import Section, in_parallel, run_alone
from .shapes import SHAPES

ROWS = (1, 2, 16, 17, 64, 256, 2048, 8192)
REAL = ("llama-3.1-8b", "qwen2.5-0.5b", "qwen3-1.7b")


def measure(section: Section) -> None:
    wrong = []
    for lines in in_parallel(_Checks(section.device, section.on_gpu), KINDS, section.on_gpu):
        for line in lines:
            section.add(measure="product", **line)
            if line["wrong"]:
                wrong.append(f"{line['case']} by {line['kind']}, {line['rows']} rows: {line['wrong']}")
    section.fail(wrong)


@dataclass(frozen=True)
class _Checks:
    """All lines of one kind, whose kernels one process compiles."""

    device: str
    on_gpu: bool

    def __call__(self, kind: str) -> list[dict[str, Any]]:
        return list(self._lines(kind))

    def _lines(self, kind: str) -> Iterator[dict[str, Any]]:
        import torch

        names, counts = (REAL, ROWS) if self.on_gpu else (("tiny",), (3,))
        for name in names:
            every = list(products(SHAPES[name]).items())
            for product, (n, k) in every if self.on_gpu else every[:1]:
                random = torch.Generator(self.device).manual_seed(n + k)
                one = way(kind, n, k, random)
                x = torch.randn(max(counts), k, generator=random, device=self.device).bfloat16()
                for count in counts:
                    named = {"case": f"{name} {product}", "n": n, "k": k, "kind": kind, "rows": count}
                    yield {**named, **_checked(one, x[:count])}


def _checked(one: Way, x: Any) -> dict[str, Any]:
    import torch

    out = torch.full((len(x), one.weight.n), float("nan"), dtype=x.dtype, device=x.device)
    try:
        one.multiply(one.rows(x), out)
        expected = x.float() @ one.plain.t()
        error = float((out.float() - expected).norm() / expected.norm())
    except Exception as failure:  # as CUBLAS_STATUS_NOT_SUPPORTED, or a kernel that needs too much shared memory
        return {"wrong": f"{type(failure).__name__}: {failure}"[:300]}
    return {"error": error, "wrong": "" if error <= one.max_error else "far from float32"}


if __name__ == "__main__":
    run_alone("product_parity", measure)
