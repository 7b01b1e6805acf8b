"""Rows in float8: multiplied by the library where it takes them, else by the engine's kernel."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from llmbackend.engine.gpu.program import library_matmul
from llmbackend.engine.gpu.weights.dense import NEVER, QuantizedWeight, min_library_rows

SCALED_MM = torch._scaled_mm
CPU = torch.device("cpu")


class Library:
    """Refuses fewer rows than `least` by weights with k of 48, as torch does on Hopper where k is long."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.num_products = 0

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        if len(x) < self.least and x.shape[1] == 48:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul…`\nmore")
        self.num_products += 1
        return SCALED_MM(x, weight, **options)


@pytest.fixture(autouse=True)
def tried_anew() -> Iterator[None]:
    min_library_rows.cache_clear()
    yield
    min_library_rows.cache_clear()


@pytest.mark.parametrize(("refused_below", "least"), [(0, 1), (257, 257), (100, 128), (5000, NEVER)])
def test_the_library_is_used_from_the_rows_on_that_it_takes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused_below: int, least: int
) -> None:
    library = Library(refused_below)
    monkeypatch.setattr(torch, "_scaled_mm", library)
    with caplog.at_level(logging.WARNING):
        assert min_library_rows(32, 48, CPU) == least
        assert min_library_rows(32, 64, CPU) == 1
    assert len(caplog.messages) == (least > 1)
    assert not caplog.messages or "fp8 by [32, 48]: torch takes " in caplog.messages[0]
    tried = library.num_products
    assert min_library_rows(32, 48, CPU) == least and library.num_products == tried


@pytest.mark.parametrize("rows", [3, 257])
def test_what_the_library_refuses_is_multiplied_all_the_same(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    library, draw = Library(257), torch.Generator().manual_seed(1)
    weight = QuantizedWeight.of(torch.randn(32, 48, generator=draw), "fp8")
    x = torch.randn(rows, 48, generator=draw).bfloat16()
    bias = torch.randn(32, generator=draw).bfloat16()
    out = [torch.full((rows, 32), float("nan"), dtype=torch.bfloat16) for _ in range(2)]
    weight.multiply(library_matmul, x, bias, out[0])
    min_library_rows.cache_clear()
    monkeypatch.setattr(torch, "_scaled_mm", library)
    weight.multiply(library_matmul, x, bias, out[1])
    torch.testing.assert_close(out[1], out[0], rtol=0.02, atol=0.05)  # bfloat16; one of them rounds before the bias
