"""Shared by tests of the native kernels: engines of each built library, and bfloat16 in numpy."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from _pytest.mark.structures import ParameterSet

from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.library import KernelLibrary, NativeKernels
from llmbackend.engine.kernels.operations import Epilogue, Rows, Type

Array = npt.NDArray[Any]

NAN_BFLOAT16 = 0x7FC0


def best_is_fast(variants: Sequence[str]) -> list[ParameterSet]:
    """Parameters of tests that run on every variant: the fast tests (`make check`) take the best one alone."""
    return [pytest.param(name, marks=[pytest.mark.slow] if i else []) for i, name in enumerate(variants)]


EMULATED_TILES = "emulated-tiles"
"""The library `amx` for CPUs without tiles: these in plain C++, and otherwise as many lanes as this CPU has."""
COMPILER = shutil.which("g++") or shutil.which("c++")
_LANES = {"avx512_vnni": "-march=cascadelake", "avx2": "-mavx2 -mfma -mbmi2 -DLLMB_EMULATE_AVX_VNNI"}
"""Flags by the best library of this CPU: with products of bytes, which every CPU with tiles has."""
_NATIVE: Final = Path(library.__file__).parent / "native"
_COMPILED: Final = Path(__file__).parents[2] / ".cache" / "kernels"
_FLAGS: Final = (
    "-std=c++20", "-O1", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-pthread", "-shared", "-fPIC",
    "-fsanitize=signed-integer-overflow", "-fsanitize-undefined-trap-on-error",  # installed: -fno-wrapv
)  # fmt: skip


def compiled(source: Path, *flags: str) -> Path:
    """A library of the kernels with other flags. It takes a minute, so the first worker that needs it compiles it for
    all, and for all runs with the same sources."""
    assert COMPILER is not None
    command = [COMPILER, *_FLAGS, *flags, str(source)]
    made_from = hashlib.sha256(" ".join(command).encode() + subprocess.check_output([COMPILER, "--version"]))
    for part in sorted(path for path in _NATIVE.rglob("*") if path.is_file()):
        made_from.update(part.read_bytes())
    target = _COMPILED / f"{source.stem}-{made_from.hexdigest()}.so"
    _COMPILED.mkdir(parents=True, exist_ok=True)
    with (_COMPILED / f"{source.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            for old in _COMPILED.glob(f"{source.stem}-*.so"):
                old.unlink()
            begun = target.with_suffix(".begun")
            subprocess.run([*command, "-o", begun], check=True)
            begun.replace(target)
    return target


@functools.cache
def emulated_tiles() -> KernelLibrary:
    lanes = next((flags.split() for name, flags in _LANES.items() if name in library.available()), [])
    return KernelLibrary(EMULATED_TILES, compiled(_NATIVE / "library.cpp", "-DLLMB_EMULATE_AMX", *lanes))


@functools.cache
def engine(variant: str, num_threads: int = 1) -> NativeKernels:
    loaded = emulated_tiles() if variant == EMULATED_TILES else library.load(variant)
    assert loaded is not None
    return NativeKernels(loaded, num_threads)


def fused_vectors() -> NativeKernels:
    """A library without tiles and with fused operations: those of `amx`, to the bit, but where weights are bfloat16."""
    found = [name for name in library.available() if name not in ("amx", "generic")]
    if not found:
        pytest.skip("needs fused operations")
    return engine(found[0])


def to_bf16(x: Array) -> Array:
    """Bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def stored(x: Array, kind: Type) -> Array:
    """x as a kernel reads it."""
    return np.ascontiguousarray(x, np.float32) if kind is Type.FLOAT32 else to_bf16(x)


def in_tiles(rows: Array) -> Array:
    """bfloat16 [rows, columns] as native/tile_rows.h orders it: [rows/16, columns/32, 16, 32]; NaN in added rows."""
    num_rows, columns = rows.shape
    padded = np.full((-(-num_rows // 16) * 16, -(-columns // 32) * 32), NAN_BFLOAT16, np.uint16)
    padded[:num_rows, :columns] = rows
    padded[:num_rows, columns:] = 0
    return np.ascontiguousarray(padded.reshape(-1, 16, padded.shape[1] // 32, 32).transpose(0, 2, 1, 3))


def out_of_tiles(tiles: Array) -> Array:
    return np.ascontiguousarray(tiles.transpose(0, 2, 1, 3).reshape(tiles.shape[0] * 16, -1))


def stride(rows: Array) -> int:
    """Elements from row to row, or the columns of rows in tiles."""
    return int(rows.shape[1] * (32 if rows.ndim == 4 else 1))


def numbers(x: Array, kind: Type) -> Array:
    """What a kernel's memory stands for."""
    return x if kind is Type.FLOAT32 else from_bf16(x)


def gated(gate: Array, up: Array, epilogue: Epilogue) -> Array:
    """What an epilogue makes of two products; the gate itself for one that does not multiply."""
    if epilogue is Epilogue.SILU_MUL:
        return np.asarray(gate / (1 + np.exp(-np.maximum(gate, -80))) * up)
    if epilogue is Epilogue.SWIGLU_OAI:
        gate = np.minimum(gate, 7)
        return np.asarray(gate / (1 + np.exp(-1.702 * np.maximum(gate, -40))) * (np.clip(up, -7, 7) + 1))
    if epilogue is Epilogue.GELU_MUL:
        return np.asarray(0.5 * gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up)
    return np.asarray(gate)


def check_margins(y: Array, before: Array, rows: int, columns: int) -> None:
    """What is around the results is as it was, NaN."""
    bits = np.uint32 if y.dtype.itemsize == 4 else np.uint16
    assert np.array_equal(y[:, columns:].view(bits), before[:, columns:].view(bits)), "wrote past the columns"
    assert np.array_equal(y[rows:].view(bits), before[rows:].view(bits)), "wrote past the rows"


# --- laws of every linear layer: layer.x(rows) makes rows of 70, layer.run computes their 40 outputs ------------------


def check_bad_row(layer: Any, bad: float) -> None:
    """It is NaN, and no other."""
    x = layer.x(15)
    good = layer.run(x)
    x[4, 69] = bad
    result = layer.run(x, threads=2)
    assert np.isnan(result[4]).all()
    others = np.arange(15) != 4
    assert np.array_equal(result[others], good[others])


def check_dominating_element(layer: Any, matrix: Array) -> None:
    """A row of zeros but one times the layer's dequantised weights, however wide they are."""
    x = layer.x(2)
    x[:, : layer.k] = 0
    x[:, 40] = [1, -1]
    expected = np.outer([1, -1], matrix[:, 40])
    assert np.linalg.norm(layer.run(x) - layer.biases[0] - expected) < 0.01 * np.linalg.norm(expected)


def check_rows_in_batches(layer: Any, threads: int) -> None:
    """A row is the same in every batch."""
    x = layer.x(140, outliers=True)
    whole = layer.run(x, threads)
    for rows in (*range(1, 14), 24, 25, 33, 64, 97, 128):
        assert np.array_equal(layer.run(x[:rows], threads), whole[:rows]), f"{rows} rows"
    assert np.array_equal(np.concatenate([layer.run(x[row : row + 1]) for row in range(140)]), whole)


def check_variants_agree(variants: Sequence[str], make: Callable[[NativeKernels], Any]) -> None:
    """The layers of all variants with fused operations give the same bits."""
    results = {}
    for variant in (name for name in variants if name != "generic"):
        layer = make(engine(variant))
        results[variant] = np.concatenate([layer.run(layer.x(29)), layer.run(layer.x(29, outliers=True))])
    first = next(iter(results.values()))
    for variant, result in results.items():
        assert np.array_equal(result, first), variant


def check_sampled_rows(layer: Any) -> None:
    x = layer.x(3)
    assert np.array_equal(layer.run(x, rows=Rows.SAMPLED), layer.run(x))
    assert layer.run(x[:0]).shape == (0, 40)
