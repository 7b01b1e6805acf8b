"""The models that clients may name, and that nothing else waits while the host's index is read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import openai
import pytest

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import ModelIndex
from llmbackend.frontends.generation.models import ModelCatalog
from llmbackend.frontends.http.errors import OpenAIError
from llmbackend.frontends.inference_gate import InferenceGate
from tests.helpers.fake_llm_server import MODEL, FakeLlmServer
from tests.helpers.openai_live_server import openai_client

COMPLETIONS = "org/completions-only"


class HangingIndex(FakeLlmServer):
    """A host with a backend that does not say whether it is ready, until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.go = threading.Event()

    def repository_index(self, ready_only: bool = False) -> list[ModelIndex]:
        self.asked.set()
        assert self.go.wait(20)
        return super().repository_index(ready_only)


@pytest.fixture
def hanging() -> Iterator[tuple[HangingIndex, openai.OpenAI]]:
    server = HangingIndex()
    with openai_client(server) as client:
        yield server, client
        server.go.set()


def say(client: openai.OpenAI, **fields: Any) -> Any:
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]} | fields
    return client.chat.completions.create(**body)


def test_a_backend_that_hangs_does_not_delay_requests_to_other_models(hanging: Any) -> None:
    server, client = hanging
    with ThreadPoolExecutor(1) as pool:
        listed = pool.submit(client.models.list)
        assert server.asked.wait(10)
        assert say(client).choices[0].message.content == "You said: hi"
        assert not listed.done()
        server.go.set()
        assert [model.id for model in listed.result().data] == [MODEL, COMPLETIONS]


@pytest.mark.parametrize("model", ["nobody", ""])
def test_nor_does_a_request_whose_model_is_looked_for(hanging: Any, model: str) -> None:
    server, client = hanging
    with ThreadPoolExecutor(1) as pool:
        looked_for = pool.submit(say, client, model=model)
        assert server.asked.wait(10)
        assert say(client).choices[0].message.content == "You said: hi"
        server.go.set()
        assert isinstance(looked_for.exception(), openai.NotFoundError if model else openai.BadRequestError)


class WithAdapters(FakeLlmServer):
    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    def repository_index(self, ready_only: bool = False) -> list[ModelIndex]:
        self.num_asked += 1
        return super().repository_index(ready_only)

    def model_parameters(self, name: str, version: int = -1) -> dict[str, str]:
        return {"lora_models": "doll,sheep", "lora_names": "doll,sheep,cow"} if name == MODEL else {}


NewCatalog = Callable[..., ModelCatalog]


@pytest.fixture
def catalog() -> Iterator[NewCatalog]:
    """A new catalog of a server, with names of models and adapters by a separator if one is given."""
    with contextlib.ExitStack() as closed:

        def create(server: FakeLlmServer, separator: str = "") -> ModelCatalog:
            gate = InferenceGate(cast(InferenceServer, server))
            closed.callback(gate.close)
            return ModelCatalog(gate, separator)

        yield create


async def test_names_of_adapters(catalog: NewCatalog) -> None:
    listed = (await catalog(WithAdapters(), "_lora_").list())["data"]
    parents = {model["id"]: model["parent"] for model in listed}
    own = {MODEL: None, COMPLETIONS: None}
    assert parents == own | dict.fromkeys((f"{MODEL}_lora_cow", "doll", "sheep"), MODEL)
    assert [await catalog(WithAdapters(), "_lora_").get(name) for name in parents] == [
        model | {"created": pytest.approx(model["created"], abs=60)} for model in listed
    ]


async def test_the_index_is_read_once_for_the_adapters_of_a_model(catalog: NewCatalog) -> None:
    server = WithAdapters()
    models = catalog(server, "_lora_")
    assert (await models.require(f"{MODEL}_lora_cow", "messages")).lora_name == "cow"
    assert server.num_asked == 0
    new = catalog(server)
    for name in ("doll", "sheep", "doll"):
        target = await new.require(name, "messages")
        assert (target.name, target.lora_name) == (MODEL, name)
    assert server.num_asked == 1
    with pytest.raises(OpenAIError, match="Unknown LoRA: pig; for model: fake"):
        await models.require(f"{MODEL}_lora_pig", "messages")


class WithSameAdapter(FakeLlmServer):
    def model_parameters(self, name: str, version: int = -1) -> dict[str, str]:
        return {"lora_models": "doll", "lora_names": "doll"}


async def test_an_adapter_of_two_models_belongs_to_the_first_whichever_was_asked_before(catalog: NewCatalog) -> None:
    models = catalog(WithSameAdapter())
    await models.require(COMPLETIONS, "text_input")
    assert (await models.require("doll", "text_input")).name == MODEL


class Stalled(FakeLlmServer):
    """A host with a model whose engine makes no progress."""

    def repository_index(self, ready_only: bool = False) -> list[ModelIndex]:
        reason = "the engine makes no progress"
        rows = [
            replace(row, state="UNAVAILABLE", reason=reason) if row.name == MODEL else row
            for row in super().repository_index()
        ]
        return [row for row in rows if not ready_only or row.state == "READY"]


async def test_a_model_whose_engine_is_down_is_listed(catalog: NewCatalog) -> None:
    assert MODEL in [model["id"] for model in (await catalog(Stalled()).list())["data"]]
