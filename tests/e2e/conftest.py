"""Servers for the end-to-end tests: the mock model, and the bundled demo model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.helpers.server_process import ROOT, ServerProcess, running_server, start_server, write_mock_model


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for the session: `mock` (few KV blocks, so that requests are preempted) and `slow` (20 ms a step)."""
    repository = tmp_path_factory.mktemp("repository")
    write_mock_model(repository, "mock", block_size=8, num_kv_blocks=160, max_num_batched_tokens=64)
    write_mock_model(repository, "slow", mock_step_ms=20)
    with running_server("--model-repository", str(repository)) as running:
        yield running


@pytest.fixture(scope="session")
def demo_server() -> Iterator[ServerProcess]:
    """The bundled demo model, as `make serve` serves it."""
    with running_server("--model-repository", str(ROOT / "model_repository")) as running:
        yield running


@pytest.fixture
def make_server() -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers that the test itself ends, or that are killed after it."""
    started: list[ServerProcess] = []

    def start(*arguments: str) -> ServerProcess:
        started.append(start_server(*arguments))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()
        if running.process.stdout is not None:
            running.process.stdout.close()
