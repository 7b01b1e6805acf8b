"""The test backends, compiled, and repositories that serve them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.helpers.compiled_backends import CompiledRepository, Libraries
from tests.helpers.core_host import STAGE


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled_backends"
    folder.mkdir(exist_ok=True)
    return Libraries(folder)


@pytest.fixture
def inside(tmp_path: Path, libraries: Libraries) -> CompiledRepository:
    """A repository whose backends run in the host's process."""
    STAGE.clear()
    return CompiledRepository(tmp_path, libraries)


@pytest.fixture
def isolated(inside: CompiledRepository) -> CompiledRepository:
    """A repository whose instances run in processes of their own."""
    inside.backend_config = {"": {"isolation": "process"}}
    return inside


@pytest.fixture(params=["inside", "isolated"])
def backends(request: pytest.FixtureRequest) -> CompiledRepository:
    """Each test runs twice: with the libraries in the host's process, and with each instance in one of its own."""
    repository: CompiledRepository = request.getfixturevalue(request.param)
    return repository
