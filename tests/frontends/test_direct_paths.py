"""Inference is served without the routers, whose middleware costs more than a small request; the rest by them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.helpers.kserve_runner import Running
from tests.helpers.mock_llm_host import MODEL, mock_llm_host

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    f"/v2/models/{MODEL}/generate": {"text_input": "a", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": MODEL, "prompt": "a", "max_tokens": 2},
    "/v1/responses": {"model": MODEL, "input": "a", "max_output_tokens": 16},
    "/v1/messages": CHAT,
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("host"), start=mock_llm_host)
    yield running
    running.stop()


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that the routers were asked for."""
    paths: list[str] = []
    call = FastAPI.__call__

    async def noted(app: FastAPI, scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope.get("path", ""))
        await call(app, scope, receive, send)

    monkeypatch.setattr(FastAPI, "__call__", noted)
    return paths


@pytest.mark.parametrize("path", BODIES)
def test_inference_passes_no_router(running: Running, routed: list[str], path: str) -> None:
    answer = httpx.post(f"http://{running.http}{path}", json=BODIES[path], timeout=30)
    assert answer.status_code == 200, answer.text
    refused = httpx.post(f"http://{running.http}{path}", json={**BODIES[path], "max_tokens": "many"}, timeout=30)
    assert refused.status_code == 400 and routed == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 404),
        ("POST", "/v1/unknown", 404),
        ("GET", "/v1/models", 200),
    ],
)
def test_routers_answer_the_rest(running: Running, routed: list[str], method: str, path: str, status: int) -> None:
    answer = httpx.request(method, f"http://{running.http}{path}", json=CHAT if method == "POST" else None, timeout=30)
    assert (answer.status_code, routed) == (status, [path])
