"""What tests of real, tiny models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.library import NativeKernels
from tests.helpers.native_engines import COMPILER, EMULATED_TILES, engine


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from a second thread, and lose much when the machine is busy."""
    import torch  # most tests here do without

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", params=["tile unit", pytest.param("emulated tiles", marks=pytest.mark.slow)])
def tiles(request: pytest.FixtureRequest) -> NativeKernels:
    """The library for the CPU's tile unit, or one with that unit emulated in plain C++."""
    if request.param == "tile unit":
        if "amx" not in library.available():
            pytest.skip("no tile unit")
        return engine("amx")
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    return engine(EMULATED_TILES)
