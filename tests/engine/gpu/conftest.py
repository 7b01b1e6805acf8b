"""Kernels run under Triton's interpreter, so that no GPU is needed (tests/conftest.py says so before triton is
imported); where there is no triton, there is nothing to test."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.helpers.gpu.tiny_models import FAMILIES, save

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the module's FAMILY."""
    path = tmp_path_factory.mktemp(request.module.FAMILY)
    save(FAMILIES[request.module.FAMILY], path)
    return path


@pytest.fixture(autouse=True)
def one_thread_here(one_thread: None) -> Iterator[None]:
    yield


@pytest.fixture(autouse=True, scope="session")
def better_interpreter() -> Iterator[None]:
    """Changes to triton 3.6's. Loops may go to a bound that a kernel computed: it keeps scalars as arrays of one
    element, of which numpy makes no int since 2.4. A kernel's call of a helper does not put the interpreted
    language in place once more, which takes a third of the time: triton's own helpers (max, zeros, …) see to their
    module once, and it stays; ours have the kernel's. And `tl.dot` adds up every row of a tile in the same order, as a
    GPU does: BLAS, which triton calls, rounds a row differently at different places of a tile on some CPUs. What it
    makes anew for each value, the shape as Triton's own numbers and the table of numpy's types, is made once."""
    import triton.language as tl
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

    @functools.cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])

    no_shape = shape_of(())
    describe_block = tl.block_type.__init__
    described: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        key = (element_ty.name, sizes)
        if key not in described:
            describe_block(self, element_ty, shape)
            self.of_tensor = shape_of(sizes)
            described[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        self.element_ty = element_ty
        vars(self).update(described[key])

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensor if type.is_block() else no_shape

    compare, same = tl.tuple.__eq__, tl.constexpr(True)

    def equal(self: Any, other: Any) -> Any:
        return same if self is other else compare(self, other)

    find_np_dtype = interpreter._get_np_dtype
    np_dtypes: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = find_np_dtype(kind)
        return np_dtypes[name]

    with (
        mock.patch.object(tl.block_type, "__init__", make_block_type),
        mock.patch.object(tl.tensor, "__init__", make_tensor),
        mock.patch.object(tl.tuple, "__eq__", equal),
        mock.patch.object(interpreter, "_get_np_dtype", np_dtype),
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", dot),
        mock.patch.object(interpreter, "_patch_lang_tensor", patch_with_index),
        mock.patch.object(interpreter.InterpretedFunction, "__call__", call),
    ):
        yield
