"""Compiles the test backends once per session, and serves them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.core_host import Repository

SOURCES = Path(__file__).parent / "backends"


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiled libraries."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("compiled_backends")
    for source in sorted(SOURCES.glob("*.cpp")):
        library = folder / f"libtriton_{source.stem}.so"
        command = [compiler, "-std=c++20", "-O1", "-g", "-shared", "-fPIC", "-fvisibility=hidden"]
        subprocess.run([*command, "-o", str(library), str(source)], check=True)
    return folder


@pytest.fixture(params=["in-process", "isolated"])
def backends(request: pytest.FixtureRequest, repository: Repository, compiled: Path) -> Repository:
    """A repository whose backend directory has the compiled backends, where Triton looks for them. Each test runs
    twice: with the libraries in the host's process, and with each instance in a process of its own."""
    for library in compiled.glob("*.so"):
        folder = repository.backends / library.stem.removeprefix("libtriton_")
        folder.mkdir()
        (folder / library.name).symlink_to(library)
    if request.param == "isolated":
        repository.defaults["backend_config"] = {"": {"isolation": "process"}}
    return repository
