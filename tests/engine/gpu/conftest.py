"""Kernels run under Triton's interpreter, so that no GPU is needed (tests/conftest.py says so before triton is
imported); where there is no triton, there is nothing to test."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def one_thread_here(one_thread: None) -> Iterator[None]:
    yield


@pytest.fixture(autouse=True, scope="session")
def better_interpreter() -> Iterator[None]:
    """Three changes to triton 3.6's. Loops may go to a bound that a kernel computed: it keeps scalars as arrays of one
    element, of which numpy makes no int since 2.4. A kernel's call of a helper does not put the interpreted
    language in place once more, which takes a third of the time: triton's own helpers (max, zeros, …) see to their
    module once, and it stays; ours have the kernel's. And `tl.dot` adds up every row of a tile in the same order, as a
    GPU does: BLAS, which triton calls, rounds a row differently at different places of a tile on some CPUs."""
    from triton import knobs
    from triton.runtime import interpreter

    if not knobs.runtime.interpret:
        yield
        return
    patch = interpreter._patch_lang_tensor
    modules: set[str] = set()

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__module__
        if module.startswith("triton.") and module not in modules:
            interpreter._patch_lang(self.fn)
            modules.add(module)
        return self.rewrite()(*args, **kwargs)

    blas_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype != np.float32 or min(a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth) == 8:
            return blas_dot(self, a, b, d, *options)
        product = np.einsum("ik,kj->ij", a.data.astype(np.float32), b.data.astype(np.float32))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    with (
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", dot),
        mock.patch.object(interpreter, "_patch_lang_tensor", patch_with_index),
        mock.patch.object(interpreter.InterpretedFunction, "__call__", call),
    ):
        yield
