"""What tests of real, tiny models share."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.library import KernelLibrary, NativeKernels
from tests.helpers.native_engines import engine


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from a second thread, and lose much when the machine is busy."""
    import torch  # most tests here do without

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", params=["tile unit", pytest.param("emulated tiles", marks=pytest.mark.slow)])
def tiles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    """The library for the CPU's tile unit, or the generic one with that unit emulated in plain C++."""
    if request.param == "tile unit":
        if "amx" not in library.available():
            pytest.skip("no tile unit")
        return engine("amx")
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = Path(library.__file__).parent / "native" / "library.cpp"
    target = tmp_path_factory.mktemp("tiles") / "tiles.so"
    flags = "-std=c++20 -O1 -ffp-contract=off -fno-math-errno -fvisibility=hidden -pthread -shared -fPIC"
    subprocess.run([compiler, *flags.split(), "-DLLMB_EMULATE_AMX", "-o", target, source], check=True)
    return NativeKernels(KernelLibrary("emulated tiles", target), 1)
