"""Kernels run under Triton's interpreter, so that no GPU is needed (tests/conftest.py says so before triton is
imported); where there is no triton, there is nothing to test."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def one_thread_here(one_thread: None) -> Iterator[None]:
    yield
