"""A host with a model that says what it is told to, and the Responses API in front of it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from llmbackend.frontends.journals.store_settings import IN_MEMORY
from tests.helpers.openai_live_server import serve_openai
from tests.helpers.scripted_text import SCRIPT_TEMPLATE, follow_scripts

MODEL = "scripted"


@pytest.fixture(scope="module")
def scripted_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    version = tmp_path_factory.mktemp("repository") / MODEL / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "llm"\n')
    engine = {"model": "mock", "transport": "inline", "max_model_len": 4096, "chat_template": SCRIPT_TEMPLATE}
    engine |= {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    (version / "model.json").write_text(json.dumps(engine))
    with pytest.MonkeyPatch.context() as monkeypatch:
        follow_scripts(monkeypatch)
        server = InferenceServer(ServerOptions(model_repositories=[version.parent.parent]))
        server.start()
        yield server
        assert server.stop(timeout_s=20)


@pytest.fixture(scope="module")
def client(scripted_host: InferenceServer) -> Iterator[openai.OpenAI]:
    with (
        serve_openai(scripted_host, store=IN_MEMORY.open()) as base,
        openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client,
    ):
        client.responses.create(  # starts the engine's threads for grammars
            model=MODEL, input="SAY:{}", max_output_tokens=1, text={"format": {"type": "json_object"}}, store=False
        )
        yield client
