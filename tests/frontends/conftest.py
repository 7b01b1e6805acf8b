"""The host of most protocol tests, and clients to it. A module may set HOST_OPTIONS, or make its own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.helpers.kserve_runner import Running


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """HOST_OPTIONS of the module: arguments of `Running`."""
    with Running(tmp_path_factory.mktemp("host"), **getattr(request.module, "HOST_OPTIONS", {})) as running:
        yield running


@pytest.fixture
def http(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{running.http}", timeout=20) as client:
        yield client


@pytest.fixture(scope="module", params=["http", "grpc"])
def client(running: Running, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Triton's own client, over each protocol."""
    if request.param == "http":
        with triton_http.InferenceServerClient(running.http) as client:
            yield client
    else:
        with triton_grpc.InferenceServerClient(running.grpc) as client:
            yield client


@pytest.fixture
def untouched_logging() -> Iterator[None]:
    """Restores the handlers and levels that `ServerLog.install` changes."""
    root, package = logging.root, logging.getLogger("llmbackend")
    handlers, root_level, package_level = root.handlers[:], root.level, package.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            with contextlib.suppress(OSError):  # the log of a test can not be written
                handler.close()
    root.handlers[:] = handlers
    root.setLevel(root_level)
    package.setLevel(package_level)
