"""The host of most protocol tests, and both of Triton's clients to it; a module that needs another makes its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from kserve_runner import Running


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("host"))
    yield running
    running.stop()


@pytest.fixture(scope="module", params=["http", "grpc"])
def client(running: Running, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Triton's own client, over each protocol."""
    if request.param == "http":
        with triton_http.InferenceServerClient(running.http) as client:
            yield client
    else:
        with triton_grpc.InferenceServerClient(running.grpc) as client:
            yield client
