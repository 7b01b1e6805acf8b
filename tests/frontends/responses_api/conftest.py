"""A host with a model that says what it is told to, and the Responses API in front of it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from llmbackend.core.inference_server import InferenceServer
from llmbackend.frontends.journals.store_settings import IN_MEMORY
from tests.helpers.openai_live_server import openai_client
from tests.helpers.scripted_text import MODEL, host_of_scripts


@pytest.fixture(scope="module")
def scripted_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    with host_of_scripts(tmp_path_factory.mktemp("repository")) as host:
        yield host


@pytest.fixture(scope="module")
def client(scripted_host: InferenceServer) -> Iterator[openai.OpenAI]:
    with openai_client(scripted_host, store=IN_MEMORY.open()) as client:
        client.responses.create(  # starts the engine's threads for grammars
            model=MODEL, input="SAY:{}", max_output_tokens=1, text={"format": {"type": "json_object"}}, store=False
        )
        yield client
