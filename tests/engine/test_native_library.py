"""Which native library is loaded, what happens without one, and the memory and layers that come with it."""

from __future__ import annotations

import ctypes
import importlib.machinery
import logging
import platform
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from llmbackend.engine.cpu.linear import NativeLinear, swap_linears
from llmbackend.engine.kernels import choice, library
from llmbackend.engine.kernels.library import NativeKernels, fault_of, op_pointers
from llmbackend.engine.kernels.operations import STRUCTURES, EmbedOp, Kind, Step, Type
from tests.helpers.native_engines import COMPILER, engine

pytestmark = pytest.mark.slow
native = pytest.mark.skipif(not library.available(), reason="no native kernels are built here")


@pytest.fixture
def unloaded() -> Iterator[None]:
    library.load.cache_clear()
    yield
    library.load.cache_clear()


def test_without_libraries_there_is_one_warning(
    unloaded: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "_path", lambda variant: None)
    assert library.available() == ()
    assert library.load() is None and library.load() is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "compiler" in caplog.text


def test_a_library_for_every_python_comes_before_an_older_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = tmp_path / f"_avx2{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    older.touch()
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    assert library._path("avx2") == older
    (newer := tmp_path / "_avx2.abi3.so").touch()
    assert library._path("avx2") == newer
    assert library._path("generic") is None


@native
def test_a_library_of_other_sources_is_refused(
    unloaded: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "STRUCTURES", STRUCTURES[::-1])
    assert library.load("generic") is None
    assert "built from different sources" in caplog.text


@native
@pytest.mark.parametrize("variant", library.available())
def test_every_library_passes_its_self_test(variant: str) -> None:
    loaded = library.load(variant)
    assert loaded is not None and fault_of(loaded) == ""


@native
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="the mode is x86's")
@pytest.mark.parametrize("variant", library.available())
def test_subnormal_numbers_count_as_zero(variant: str) -> None:
    """On all threads of a team, read ones as well as results; afterwards the caller computes with them as before."""
    embedding, tokens = np.array([1e-39, 1e-20], np.float32), np.repeat(np.arange(2, dtype=np.int32), 64)
    kernels = engine(variant, 2)
    for scale, expected in ((1e30, (0.0, np.float32(1e-20) * np.float32(1e30))), (1e-20, (0.0, 0.0))):
        out = np.full(len(tokens), np.nan, np.float32)
        op = EmbedOp(
            kind=Kind.EMBED, weight_type=Type.FLOAT32, weight=embedding.ctypes.data, out=out.ctypes.data, width=1,
            out_stride=1, scale=scale,
        )  # fmt: skip
        kernels.run(op_pointers([op]), 1, Step(num_tokens=len(tokens), token_ids=tokens.ctypes.data))
        assert np.array_equal(out, np.repeat(np.array(expected, np.float32), 64))
    assert np.array([1e-39], np.float32) * np.float32(1e30) > 0


@native
def test_a_library_that_computes_wrongly_gives_way_to_the_next(
    unloaded: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    best, *others = library.available()
    pack = NativeKernels.pack

    def pack_wrongly(self: NativeKernels, *arguments: Any) -> None:
        pack(self, *arguments)
        if self.library.variant == best:
            ctypes.memset(arguments[4], 0, 64)

    monkeypatch.setattr(NativeKernels, "pack", pack_wrongly)
    loaded = library.load()
    assert (loaded and loaded.variant) == next(iter(others), None)
    assert f"'{best}' cannot be used: FLOAT32 weights times FLOAT32: off by" in caplog.text
    chosen = choice.choose_library.__wrapped__(Type.FLOAT32)
    assert (chosen and chosen.library.variant) in (others or (None,))
    assert ("torch computes" in caplog.text) == (not others)


@native
def test_the_best_of_what_can_run_is_loaded() -> None:
    names = library.available()
    assert "generic" in names and names[-1] == "generic"
    best = library.load()
    assert best is not None and best.variant == names[0]


@native
@pytest.mark.parametrize("weights", [Type.FLOAT32, Type.BFLOAT16, Type.INT8])
def test_what_computes_a_model_is_measured(weights: Type) -> None:
    """Each library that can run is, and the words for the log name them all."""
    chosen = choice.choose_library(weights)
    assert chosen is not None and chosen is choice.choose_library(weights)
    assert chosen.library.variant in library.available()
    assert chosen.report.startswith(chosen.library.variant)
    assert all(name in chosen.report for name in library.VARIANTS if name != "generic")


@native
@pytest.mark.skipif(len(library.available()) < 3, reason="fewer than two libraries for vector units can run here")
def test_the_fastest_is_chosen_and_the_widest_of_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    vector_units = [name for name in library.available() if name != "generic"]

    def chosen(seconds: dict[str, float]) -> str:
        monkeypatch.setattr(choice, "_least_seconds", lambda pieces: [seconds.get(name, 1.0) for name in vector_units])
        found = choice.choose_library.__wrapped__(Type.BFLOAT16)
        assert found is not None
        return found.library.variant

    assert chosen({}) == vector_units[0]
    assert chosen(dict.fromkeys(vector_units[1:], 0.97)) == vector_units[0]
    assert [chosen({name: 0.5}) for name in vector_units] == vector_units


@native
def test_memory_is_zero_and_may_be_kept_longer_than_its_library() -> None:
    loaded = library.load("generic")
    assert loaded is not None
    memory = loaded.memory(5 << 20)
    assert memory.dtype == np.uint8 and memory.size == 5 << 20 and not memory.any()
    part = memory[4096:8192].view(np.float32)
    del memory
    part[:] = 1.5
    assert part.sum() == 1.5 * 1024


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.plain = nn.Linear(70, 40)
        self.transposed = Conv1D(33, 70)
        self.other = nn.Bilinear(2, 2, 2)

    def get_output_embeddings(self) -> nn.Module:
        return self.plain


@native
@pytest.mark.parametrize(
    ("dtype", "quantization", "tolerance"),
    [(torch.float32, None, 1e-5), (torch.bfloat16, None, 2e-2), (torch.float32, "int8", 2e-2)],
)
def test_swapped_layers_compute_the_same(dtype: torch.dtype, quantization: str | None, tolerance: float) -> None:
    loaded = library.load()
    assert loaded is not None
    model = Small().to(dtype).eval()
    x = torch.randn(3, 5, 70, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = [layer(x).float().detach() for layer in (model.plain, model.transposed)]
    engine = library.NativeKernels(loaded, 1)
    swap_linears(model, engine, quantization)
    assert isinstance(model.plain, NativeLinear) and isinstance(model.transposed, NativeLinear)
    assert isinstance(model.other, nn.Bilinear)
    for layer, wanted in zip((model.plain, model.transposed), expected, strict=True):
        got = layer(x)
        assert got.dtype == dtype and got.shape == wanted.shape
        assert (got.float() - wanted).abs().max() <= tolerance * wanted.abs().max()
    engine.close()


@native
def test_a_team_ends_with_its_engine() -> None:
    loaded = library.load("generic")
    assert loaded is not None
    before = len(list(Path("/proc/self/task").iterdir()))
    engine = library.NativeKernels(loaded, 3)
    assert len(list(Path("/proc/self/task").iterdir())) == before + 2
    engine.close()
    assert len(list(Path("/proc/self/task").iterdir())) == before


FEW_THREADS = """
import os, resource
from pathlib import Path
from llmbackend.engine.kernels import library
loaded = library.load("generic")
used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
try:
    library.NativeKernels(loaded, 200)
except OSError as error:
    print(error)
print(len(os.listdir("/proc/self/task")))
library.NativeKernels(loaded, 2).close()
"""
"""Each thread has a stack of megabytes."""


@native
def test_threads_that_cannot_be_started_are_an_error() -> None:
    result = subprocess.run([sys.executable, "-c", FEW_THREADS], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    error, threads = result.stdout.splitlines()
    assert error.startswith("num_threads is 200: the system does not start so many")
    assert threads == "1"


EXIT_IN_A_STEP = """
import threading
import numpy as np
from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.operations import Kind, LinearOp, Step, Type
n, k, rows = 4096, 4096, 256
loaded = library.load()
kernels = library.NativeKernels(loaded, 2)
weight = loaded.memory(library.packed_bytes(n, k, Type.FLOAT32))
x, y = np.zeros((rows, k), np.float32), np.zeros((rows, n), np.float32)
op = LinearOp(
    kind=Kind.LINEAR, weight=weight.ctypes.data, x=x.ctypes.data, y=y.ctypes.data, n=n, k=k, x_stride=k, y_stride=n,
    weight_type=Type.FLOAT32, x_type=Type.FLOAT32, y_type=Type.FLOAT32, factor=1.0,
)
ops, begun = library.op_pointers([op]), threading.Event()
def step_forever():
    while True:
        kernels.run(ops, 1, Step(num_tokens=rows))
        begun.set()
threading.Thread(target=step_forever, daemon=True).start()
begun.wait()
"""


@native
def test_a_process_may_exit_while_a_daemon_thread_computes() -> None:
    result = subprocess.run([sys.executable, "-c", EXIT_IN_A_STEP], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


FEATURES_OF = """
#include <cstdio>
#include <cstring>
static int num_flags;
static char** flags;
static bool has(const char* name) {
    for (int i = 0; i < num_flags; i++)
        if (std::strcmp(flags[i], name) == 0) return true;
    return false;
}
#define __builtin_cpu_supports(name) has(name)
#include "cpu.h"
int main(int count, char** arguments) {
    num_flags = count, flags = arguments;
    std::printf("%d", llmb::cpu_features());
}
"""
"""Of a CPU with the named flags."""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="other CPUs have the generic one")
def test_a_library_runs_only_with_all_that_it_is_compiled_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what setup.py takes it to need, and the options in pyproject.toml."""
    root = Path(__file__).parents[2]
    monkeypatch.setattr("setuptools.setup", lambda **options: None)
    needed: dict[str, set[str]] = runpy.run_path(str(root / "setup.py"))["REQUIRED_FLAGS"]
    for extension in tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]:
        options = " ".join(extension.get("extra-compile-args", []))
        if (variant := extension["name"].rpartition("._")[2]) in needed:
            needed[variant] = needed[variant] | set(re.findall(r"-m(avx2|fma|bmi2)\b", options))
    (tmp_path / "main.cpp").write_text(FEATURES_OF)
    native_sources = Path(library.__file__).parent / "native"
    command = [str(COMPILER), "-std=c++20", f"-I{native_sources}", "main.cpp", "-o", "features"]
    subprocess.run(command, check=True, cwd=tmp_path)

    def features(flags: set[str]) -> int:
        return int(subprocess.check_output([tmp_path / "features", *flags]))

    def compilers_name(flag: str) -> str:
        return flag.replace("avx512_", "avx512").replace("amx_", "amx-")

    everything = {compilers_name(flag) for flags in needed.values() for flag in flags}
    assert features(everything) & library.VARIANTS["avx512_vnni"]
    for variant, flags in needed.items():
        for flag in flags - {"avx_vnni"}:  # the CPU itself is asked for that
            assert not features(everything - {compilers_name(flag)}) & library.VARIANTS[variant], (variant, flag)
