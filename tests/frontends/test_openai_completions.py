"""Completions and models through the real `openai` client, over a real socket, against the in-memory host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.helpers.fake_llm_server import MODEL, FakeLlmServer
from tests.helpers.openai_live_server import openai_client


@pytest.fixture(scope="module")
def server() -> FakeLlmServer:
    return FakeLlmServer()


@pytest.fixture(scope="module")
def client(server: FakeLlmServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(**({"model": MODEL, "prompt": "hi"} | fields))


def test_whole_response(client: openai.OpenAI) -> None:
    answer = complete(client)
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", MODEL, "cmpl-")
    choice = answer.choices[0]
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "You said: hi", "stop", None)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 12, 14)


def test_sixteen_tokens_by_default(client: openai.OpenAI) -> None:
    choice = complete(client, prompt="a long story").choices[0]
    assert (choice.text, choice.finish_reason) == ("You said: a long", "length")


def test_prompt_of_token_ids(client: openai.OpenAI) -> None:
    assert complete(client, prompt=[104, 105]).choices[0].text == "You said: hi"


def test_several_prompts_become_choices(client: openai.OpenAI) -> None:
    answer = complete(client, prompt=["a", "b", "c"])
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "You said: a"),
        (1, "You said: b"),
        (2, "You said: c"),
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 33)
    assert [choice.text[-1] for choice in complete(client, prompt=[[97], [98]]).choices] == ["a", "b"]


def test_several_prompts_in_a_stream(client: openai.OpenAI) -> None:
    texts, reasons = ["", ""], ["", ""]
    for chunk in complete(client, prompt=["a", "b"], stream=True):
        for choice in chunk.choices:
            assert not reasons[choice.index]
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or ""
    assert (texts, reasons) == (["You said: a", "You said: b"], ["stop", "stop"])


@pytest.mark.parametrize("stream", [False, True])
def test_echo(client: openai.OpenAI, stream: bool) -> None:
    answer = complete(client, prompt=["one ", "two "], echo=True, stream=stream)
    texts = ["", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == ["one You said: one ", "two You said: two "]


@pytest.mark.parametrize("top", [0, 2, 5])
def test_stream_equals_whole_with_logprobs_and_usage(client: openai.OpenAI, top: int) -> None:
    whole = complete(client, logprobs=top)
    *chunks, usage = list(complete(client, logprobs=top, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert usage.usage == whole.usage
    pieces = [chunk.choices[0].logprobs.model_dump() for chunk in chunks if chunk.choices[0].logprobs]
    joined = {key: [item for piece in pieces for item in piece[key]] for key in pieces[0]}
    assert joined == whole.choices[0].logprobs.model_dump()


@pytest.mark.parametrize("interval", [1, 3, 100])
def test_tokens_of_a_chunk(client: openai.OpenAI, interval: int) -> None:
    """The first token comes alone."""
    whole = complete(client, logprobs=1).choices[0]
    chunks = list(complete(client, logprobs=1, stream=True, extra_body={"stream_interval": interval}))
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.text for choice in choices) == whole.text
    sizes = [len(choice.logprobs.tokens) for choice in choices if choice.logprobs]
    assert (sizes[0], sum(sizes)) == (1, len(whole.text)) and set(sizes[1:-1]) <= {interval}
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
    assert tokens == whole.logprobs.tokens


def test_logprobs_form(client: openai.OpenAI) -> None:
    logprobs = complete(client, prompt="z", max_tokens=2, logprobs=1).choices[0].logprobs
    assert logprobs.tokens == ["Y", "o"]
    assert logprobs.token_logprobs == [-1.0, -1.0]
    assert logprobs.top_logprobs == [{"A": -0.5, "Y": -1.0}, {"A": -0.5, "o": -1.0}]
    assert logprobs.text_offset == [0, 1]


def test_disconnect_cancels_all_choices(client: openai.OpenAI, server: FakeLlmServer) -> None:
    stream = complete(client, prompt=["forever", "forever and ever"], stream=True)
    next(stream)
    stream.close()
    assert all(handle.over.wait(10) for handle in server.handles[-2:])


@pytest.mark.parametrize("num_others", [1, 100])
def test_a_refused_prompt_cancels_the_others(client: openai.OpenAI, server: FakeLlmServer, num_others: int) -> None:
    with pytest.raises(openai.InternalServerError):
        complete(client, prompt=[*["forever"] * num_others, "overloaded"])
    assert all(handle.over.wait(10) for handle in server.handles[-num_others:])


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == [MODEL, "org/completions-only"]
    assert all((model.object, model.owned_by) == ("model", "llmbackend") and model.created > 0 for model in models)
    assert client.models.retrieve("org/completions-only") == models[1]
    for name in ("resnet", "nobody", "unloaded"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve(name)
        assert json.loads(caught.value.response.text)["error"]["code"] == "model_not_found"
