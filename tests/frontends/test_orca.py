"""The ORCA load header: over real HTTP, from a model that reports its KV cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmbackend.core.backend_api import MetricKind
from llmbackend.frontends.operations.probes import KV_CACHE_FAMILY
from tests.helpers.core_host import version_of
from tests.helpers.kserve_runner import Running
from tests.helpers.mock_llm_host import BLOCK_TOKENS, BLOCKS, MODEL, mock_llm_host

FORMAT, LOAD = "endpoint-load-metrics-format", "endpoint-load-metrics"
TEXT = "TEXT named_metrics.kv_cache_utilization=0.250000, named_metrics.max_token_capacity=1280"
JSON = 'JSON {"named_metrics":{"kv_cache_utilization":0.25,"max_token_capacity":1280}}'
REQUESTS: dict[str, Any] = {
    "generate": {"text_input": "n=1"},
    "generate_stream": {"text_input": "n=2"},
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("host"))
    backend = version_of(running.host, "llm").backend
    family = backend.metric_family(
        MetricKind.GAUGE, KV_CACHE_FAMILY, "Blocks.", ("model", "version", "kv_cache_block_type")
    )
    for model, blocks in (("llm", {"max": 40, "used": 10, "free": 30, "tokens_per": 32}), ("textid", {"max": 40})):
        for kind, value in blocks.items():
            family.set(value, model=model, version="1", kv_cache_block_type=kind)
    yield running
    running.stop()


def load(running: Running, path: str, style: str, model: str = "llm") -> str | None:
    url = f"http://{running.http}/v2/models/{model}/{path}"
    response = httpx.post(url, json=REQUESTS[path], headers={FORMAT: style} if style else {})
    assert response.status_code == 200
    found: str | None = response.headers.get(LOAD)
    return found


@pytest.mark.parametrize("path", REQUESTS)
def test_generate_tells_the_load_of_the_model_in_both_formats(running: Running, path: str) -> None:
    assert load(running, path, "text") == TEXT
    assert load(running, path, "json") == JSON
    json.loads(JSON.removeprefix("JSON "))


def test_only_clients_that_ask_for_a_known_format_get_the_header(running: Running) -> None:
    assert load(running, "generate", "") is None
    assert load(running, "generate", "xml") is None


def test_a_model_that_reports_no_whole_kv_cache_gives_no_header(running: Running) -> None:
    assert load(running, "generate", "text", model="textid") is None


def test_infer_tells_it_too(running: Running, tmp_path: Path) -> None:
    body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["x"]}]}
    url = f"http://{running.http}/v2/models/textid/infer"
    family = version_of(running.host, "textid").backend.metric_family(
        MetricKind.GAUGE, KV_CACHE_FAMILY, "Blocks.", ("model", "version", "kv_cache_block_type")
    )
    for kind, value in {"used": 10, "tokens_per": 32}.items():
        family.set(value, model="textid", version="1", kv_cache_block_type=kind)
    try:
        assert httpx.post(url, json=body, headers={FORMAT: "text"}).headers[LOAD] == TEXT
    finally:
        family.remove(model="textid", version="1", kv_cache_block_type="used")


def test_the_llm_backend_reports_what_the_header_needs(tmp_path: Path) -> None:
    with Running(tmp_path, start=mock_llm_host) as running:
        url = f"http://{running.http}/v2/models/{MODEL}/generate"
        body = {"text_input": "hi", "max_tokens": 3}
        header = httpx.post(url, json=body, headers={FORMAT: "json"}, timeout=20).headers[LOAD]
        named = json.loads(header.removeprefix("JSON "))["named_metrics"]
        assert named["max_token_capacity"] == BLOCKS * BLOCK_TOKENS and 0 <= named["kv_cache_utilization"] < 1
