"""Frontend processes of a host in this process: one that hangs is killed and started again."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from llmbackend.frontends.access.settings import NO_ACCESS_CONTROL
from llmbackend.frontends.limits import FrontendLimits
from llmbackend.frontends.protocol_options import DEFAULT_OPTIONS
from llmbackend.frontends.shared_counts import SharedCounts
from llmbackend.remote.host_endpoint import HostEndpoint
from llmbackend.server import frontend_processes
from llmbackend.server.frontend_processes import FrontendProcesses, FrontendsFailedError
from llmbackend.server.frontend_settings import FrontendSettings, HostFolder
from llmbackend.server.ports import ClaimedPorts, Endpoint
from tests.helpers.mock_llm_host import MODEL, mock_llm_host
from tests.helpers.waiting import eventually_async

pytestmark = pytest.mark.slow
NONE = Endpoint("127.0.0.1", 0, enabled=False)


def settings_of(folder: HostFolder, port: int) -> FrontendSettings:
    return FrontendSettings(
        number=1,
        host=folder,
        http=Endpoint("127.0.0.1", port),
        grpc=Endpoint("127.0.0.1", 0, enabled=False),
        limits=FrontendLimits(),
        access=NO_ACCESS_CONTROL,
        protocols=DEFAULT_OPTIONS,
        http_max_input_size_bytes=1 << 20,
        openai_max_input_size_bytes=1 << 20,
    )


async def test_a_frontend_that_cannot_be_started_fails_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process(*_: Any, **__: Any) -> None:
        raise BlockingIOError("no process id is free")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    processes = FrontendProcesses([settings_of(HostFolder(tmp_path), 0)])
    processes.start()
    with pytest.raises(FrontendsFailedError, match="could not be started: no process id is free"):
        await processes.serve()
    await processes.stop(0)


async def test_frontends_outlive_a_pause_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend_processes, "_MODULE", "tests.helpers.beating_frontend")
    processes = FrontendProcesses([settings_of(HostFolder(tmp_path), 0)], silence_s=1)
    processes.start()
    await processes.serve()
    before = processes.pids
    time.sleep(2)  # the event loop stands still, as when the process is stopped
    await asyncio.sleep(0.5)
    assert processes.pids == before
    os.kill(before[0], signal.SIGSTOP)
    await eventually_async(lambda: processes.pids and processes.pids != before)
    await processes.stop(1)


def test_a_frontend_that_hangs_is_killed_and_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = HostFolder(tmp_path)
    folder.metrics.mkdir()
    counts = SharedCounts.create(folder.counts, 2)
    server = mock_llm_host(tmp_path)
    endpoint = HostEndpoint(server, folder.requests)
    endpoint.start()
    claims = ClaimedPorts.claim(http=Endpoint("127.0.0.1", 0), metrics=NONE, grpc=NONE, for_processes=True)
    assert claims.http is not None
    port = claims.http.getsockname()[1]

    async def run() -> None:
        processes = FrontendProcesses([settings_of(folder, port)], counts.forget, silence_s=8)
        processes.start()
        await processes.serve()
        (hanging,) = processes.pids
        assert await asyncio.to_thread(generate, port) == 200
        os.kill(hanging, signal.SIGSTOP)
        async with asyncio.timeout(90):
            while hanging in processes.pids:
                await asyncio.sleep(0.1)
        assert await asyncio.to_thread(generate, port) == 200
        await processes.stop(1)
        assert not processes.pids

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert any("frontend 1" in text and "hangs; killing it" in text for text in caplog.messages)
    endpoint.close()
    assert server.stop(10)
    claims.close()
    counts.close()


def generate(port: int) -> int:
    """The status of an answer, which a frontend that starts again gives later."""
    body = json.dumps({"text_input": "one", "parameters": {"max_tokens": 2}}).encode()
    for _ in range(300):
        try:
            asked = urllib.request.Request(f"http://127.0.0.1:{port}/v2/models/{MODEL}/generate", body)
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return int(answer.status)
        except OSError:
            time.sleep(0.1)
    raise AssertionError("no frontend answers")
