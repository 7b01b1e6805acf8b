"""LoRA adapters that were loaded at run time survive their engine: its successor has the same weights."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from tests.frontends.test_lora_at_run_time import MODEL, change, load, text_of
from tests.frontends.test_lora_clients import CHECKPOINT, PROMPT, write_adapter
from tests.frontends.test_openai_tools_recovery import children, connected, engines
from tests.helpers.fake_llm_server import FakeLlmServer
from tests.helpers.openai_live_server import serve_openai

pytestmark = pytest.mark.slow

TOKENS = 120


@contextlib.contextmanager
def serving(root: Path) -> Iterator[tuple[InferenceServer, str]]:
    version = root / "models" / MODEL / "1"
    version.mkdir(parents=True)
    model = {"model": str(CHECKPOINT), "enable_lora": True, "num_kv_blocks": 64, "num_threads": 1}
    (version / "model.json").write_text(json.dumps({**model, "transport": "process"}))
    (version / "multi_lora.json").write_text("{}")
    (version.parent / "config.pbtxt").write_text('backend: "llm"\ninstance_group [{ count: 1 kind: KIND_MODEL }]\n')
    server = InferenceServer(ServerOptions(model_repositories=(root / "models",)))
    server.start()
    try:
        with serve_openai(server, lora_folder=str(root)) as base:
            yield server, f"{base}/v1"
    finally:
        assert server.stop(timeout_s=20)


@pytest.fixture(scope="module")
def _client_has_been_used() -> None:
    """Its libraries open a pipe once and for all."""
    with connected(FakeLlmServer()) as client:
        assert [model.id for model in client.models.list()]


@pytest.mark.usefixtures("_client_has_been_used")
def test_a_request_ends_with_the_adapter_it_began_with_also_in_another_engine(tmp_path: Path) -> None:
    for seed, name in enumerate(("cat", "dog")):
        write_adapter(tmp_path / name, seed)
    with serving(tmp_path) as (server, url), openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        load(url, "pet", "cat")
        cat = text_of(client, "pet", TOKENS)
        stream = client.completions.create(model="pet", prompt=PROMPT, temperature=0, max_tokens=TOKENS, stream=True)
        text = next(stream).choices[0].text
        load(url, "pet", "dog", load_inplace=True)
        os.kill(min(engines(children())), signal.SIGKILL)
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == cat, "the rest is another adapter's"
        dog = text_of(client, "pet", TOKENS)
        assert dog != cat
        load(url, "dog", "dog")
        assert text_of(client, "dog", TOKENS) == dog
        assert change(url, "unload", lora_name="pet").status_code == 200
        labels = {"model": MODEL, "version": "1"}
        killed = server.metrics_registry.get_sample_value(
            "llmbackend:engine_restarts_total", {**labels, "cause": "killed"}
        )
        assert killed == 1, "the request was over before its engine died"
