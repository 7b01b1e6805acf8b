"""Labels of OpenAI requests: they change no answer, and the access log has them, within bounds and on one line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from llmbackend.frontends.access.access_control import HttpAccess
from llmbackend.frontends.access.permissions import NO_RESTRICTIONS
from llmbackend.frontends.access.request_identity import AccessMetrics
from llmbackend.frontends.context import FrontendContext
from llmbackend.frontends.openai.router import create_openai_router
from tests.helpers.fake_llm_server import MODEL, FakeLlmServer
from tests.helpers.openai_live_server import with_presence

LABELS: dict[str, Any] = {
    "user": "bob\nGET /v2 200",
    "safety_identifier": "s" * 500,
    "prompt_cache_key": "key",
    "prompt_cache_retention": "24h",
    "session_id": "\u00e9",
    "metadata": {"run": "7", "note": "n" * 512},
}


def answer(**fields: Any) -> Any:
    context = FrontendContext.of(FakeLlmServer())  # type: ignore[arg-type]
    app = Starlette(routes=create_openai_router(context).routes)
    access = HttpAccess(app, None, NO_RESTRICTIONS, AccessMetrics(CollectorRegistry()), log_requests=True)

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(with_presence(access)), base_url="http://test"
        ) as client:
            return await client.post("/v1/completions", json={"model": MODEL, "prompt": "hi", **fields})

    with contextlib.closing(context.gate):
        response = asyncio.run(post())
    assert response.status_code == 200, response.text
    return response.json()


def test_labels_are_logged_and_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="llmbackend.frontends.access")
    plain, labelled = answer(), answer(**LABELS)
    assert plain["choices"] == labelled["choices"] and plain["usage"] == labelled["usage"]
    without, with_labels = [record.message for record in caplog.records if "/v1/completions" in record.message]
    assert without.endswith(" ms")
    line = with_labels.partition(" ms ")[2]
    assert line.startswith(r'user="bob\nGET /v2 200" safety_identifier="sss')
    assert r'prompt_cache_key="key" prompt_cache_retention="24h" session_id="\u00e9" metadata={"run": "7", ' in line
    assert len(line) < 6 * 100 and "\n" not in line and line.isascii()
