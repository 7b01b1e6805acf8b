"""Engines that end because nobody uses them, and come back with the next request."""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.server_process import ServerProcess, post, running_server, start_server, stop_server
from tests.helpers.waiting import eventually

CHECKPOINT = Path(__file__).parents[2] / "model_repository" / "demo" / "1"


def instance(server: ServerProcess) -> dict[str, Any]:
    """As a viewer of the server's feed gets it first."""
    with urllib.request.urlopen(f"http://{server.http}/v2/engine/events", timeout=30) as feed:
        data = next(line for line in feed if line.startswith(b"data: "))
    [found] = json.loads(data[6:])["instances"]
    return dict(found)


def ask(server: ServerProcess, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    status, answer = post(server, "/v1/completions", body)
    assert status == 200, answer
    return str(json.loads(answer)["choices"][0]["text"])


@pytest.mark.parametrize("model", ["mock", str(CHECKPOINT)])
def test_an_unused_engine_ends_and_the_next_request_brings_it_back(model: str) -> None:
    with running_server(
        "--model", model, "--served-model-name", "m", "--idle-unload-s", "1", "--device", "cpu"
    ) as server:
        before, process = ask(server, "Once"), instance(server)["pid"]
        num_prompt_tokens = server.metric("vllm:prompt_tokens_total", "m")
        eventually(lambda: instance(server)["state"] == "asleep", 20)
        assert not Path(f"/proc/{process}").exists()
        assert server.get("/v2/health/ready") == "" and server.get("/v2/models/m/ready") == ""
        begun_s = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda _: ask(server, "Once"), range(8))) == {before}
        print(f"{model}: back in {time.monotonic() - begun_s:.2f} s")
        now = instance(server)
        assert (now["state"], now["num_restarts"]) == ("ready", 0) and now["pid"] != process
        eventually(lambda: instance(server)["state"] == "asleep", 20)
        assert ask(server, "Once") == before
        eventually(lambda: server.metric("vllm:prompt_tokens_total", "m") == 10 * num_prompt_tokens)


def test_a_server_stops_while_its_engine_is_asleep() -> None:
    server = start_server("mock", "--idle-unload-s", "0.2")
    eventually(lambda: instance(server)["state"] == "asleep", 20)
    assert stop_server(server) == 0
