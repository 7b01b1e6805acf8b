"""A process of a cluster's launcher that ends, or that cannot be started, is started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from llmbackend.cluster import processes
from llmbackend.cluster.processes import Child
from llmbackend.server.process import READY_DESCRIPTOR
from tests.helpers.waiting import eventually_async

PROGRAM = f"import os, sys; os.write(int(os.environ['{READY_DESCRIPTOR}']), b'ready\\n'); sys.stdin.read()"


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[OSError]:
    """Raised by the next starts of processes."""
    errors: list[OSError] = []
    start = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    return errors


def child() -> Child:
    return Child("the child", [sys.executable, "-c", PROGRAM], lambda: b"", os.environ)


async def test_a_first_start_that_fails_is_reported(failures: list[OSError]) -> None:
    failures.append(BlockingIOError("no process id is free"))
    failing = child()
    assert await failing.start() == b""
    await failing.stop(10)


async def test_a_later_start_that_fails_is_tried_again(
    failures: list[OSError], caplog: pytest.LogCaptureFixture
) -> None:
    running = child()
    assert await running.start() == b"ready\n"
    assert running._process is not None
    first = running._process.pid
    failures += [BlockingIOError("no process id is free")]
    os.kill(first, signal.SIGKILL)
    await eventually_async(lambda: running._process is not None and running._process.pid != first, 30)
    assert "could not be started: no process id is free" in caplog.text
    assert await running.stop(10) == -signal.SIGTERM


async def test_a_stop_does_not_wait_for_the_next_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "restart_pause_s", lambda num_failures: 3600.0)
    running = child()
    assert await running.start() == b"ready\n"
    assert running._process is not None
    os.kill(running._process.pid, signal.SIGKILL)
    await eventually_async(lambda: "restarting it in 3600.0 s" in caplog.text, 30)
    assert await running.stop(60) == -signal.SIGKILL
    assert "did not exit in time" not in caplog.text
