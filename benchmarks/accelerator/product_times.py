"""How long products by weights in 16, 8 and 4 bits take for the rows of decode steps, compared with reading the
weights.

    python -m benchmarks.accelerator.product_times --shape llama-3.1-8b --device cuda --json FILE --scratch FOLDER

For choosing tiles, and for measuring the gain of fewer bits. Independent of whether results are right
(product_parity.py). Invariants: calls are replayed from a graph over copies of the weight that do not fit into the
device's cache together; rows are in the weight's own format, so that rounding does not count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from .product_ways import KINDS, Way, products, way
from .section import Section, copies_beyond_cache, in_parallel, run_alone, seconds_in_graph
from .shapes import SHAPES

ROWS = (1, 16, 64, 256)


def measure(section: Section) -> None:
    if section.on_gpu:  # into Triton's cache, so that the kinds behind wait for no compiler
        for _ in in_parallel(_Once(section), KINDS, True):
            pass
    for product, kind, one, x in _cases(section, KINDS):
        section.add(measure="product time", case=product, kind=kind, rows=len(x), **_line(one, x))


def _cases(section: Section, kinds: tuple[str, ...]) -> Iterator[tuple[str, str, Way, Any]]:
    import torch

    every = list(products(SHAPES[section.shape]).items())
    for product, (n, k) in every if section.on_gpu else every[:1]:
        random = torch.Generator(section.device).manual_seed(n + k)
        x = torch.randn(max(ROWS), k, generator=random, device=section.device).bfloat16()
        for kind in kinds:
            one = way(kind, n, k, random)
            for count in ROWS if section.on_gpu else ROWS[1:2]:
                yield product, kind, one, x[:count]


@dataclass(frozen=True)
class _Once:
    section: Section

    def __call__(self, kind: str) -> None:
        import torch

        for _product, _kind, one, x in _cases(self.section, (kind,)):
            with contextlib.suppress(Exception):  # the line of its time says so
                one.multiply(one.rows(x), x.new_empty(len(x), one.weight.n))
        torch.cuda.synchronize()


def _line(one: Way, x: Any) -> dict[str, Any]:
    out, rows = x.new_empty(len(x), one.weight.n), one.rows(x)
    try:
        every = [one, *(one.again() for _ in range(copies_beyond_cache(one.num_bytes, x.device) - 1))]
        call_s = seconds_in_graph([partial(each.multiply, rows, out) for each in every], x.device)
    except Exception as failure:  # a library refuses, or a kernel does not compile
        return {"refused": f"{type(failure).__name__}: {failure}"[:200]}
    return {"call_s": call_s, "floor_bytes": one.num_bytes}


if __name__ == "__main__":
    run_alone("product_times", measure)
