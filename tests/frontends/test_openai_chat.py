"""Chat completions through the real `openai` client, over a real socket, against the in-memory host."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import orjson
import pytest

from llmbackend.frontends.protocol_options import ProtocolOptions, RequestDefaults
from tests.helpers.fake_llm_server import MODEL, FakeLlmServer
from tests.helpers.openai_live_server import serve_openai

USER_HI: list[Any] = [{"role": "user", "content": "hi ✓"}]


@pytest.fixture(scope="module")
def server() -> FakeLlmServer:
    return FakeLlmServer()


@pytest.fixture(scope="module")
def url(server: FakeLlmServer) -> Iterator[str]:
    with serve_openai(server) as base:
        yield base


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**({"model": MODEL, "messages": USER_HI} | fields))


def test_whole_response(client: openai.OpenAI) -> None:
    answer = chat(client)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    choice = answer.choices[0]
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "You said: hi ✓")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 14, 18)


def test_stream_order_and_constant_identity(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    first, *deltas, finish, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert [chunk.choices[0].delta.content for chunk in deltas] == list("You said: hi ✓")
    assert all(chunk.choices[0].finish_reason is None and chunk.usage is None for chunk in (first, *deltas))
    assert (finish.choices[0].delta.content, finish.choices[0].finish_reason) == (None, "stop")
    assert (usage.choices, usage.usage.prompt_tokens, usage.usage.completion_tokens) == ([], 4, 14)


def test_stream_without_usage_ends_after_the_finish_chunk(url: str) -> None:
    body = {"model": MODEL, "messages": USER_HI, "stream": True}
    response = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert all(event.startswith("data: ") for event in events[:-1])
    assert events[-2:] == ["data: [DONE]", ""]
    assert "usage" not in response.text


@pytest.mark.parametrize("top", [0, 1, 3])
def test_stream_equals_whole_with_logprobs_and_usage(client: openai.OpenAI, top: int) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": top, "max_tokens": 7}
    whole = chat(client, **options)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **options))
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert choices[-1].finish_reason == whole.choices[0].finish_reason == "length"
    positions = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert positions == whole.choices[0].logprobs.content
    assert chunks[-1].usage == whole.usage


def test_logprobs_list_the_chosen_token_and_the_most_likely_ones(client: openai.OpenAI) -> None:
    message: list[Any] = [{"role": "user", "content": "ü"}]
    positions = chat(client, messages=message, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    last = positions[-1]
    assert (last.token, last.logprob, last.bytes) == ("ü", -1.0, [0xC3, 0xBC])
    assert [(entry.token, entry.logprob) for entry in last.top_logprobs] == [("A", -0.5), ("ü", -1.0), ("C", -1.5)]
    only_best = chat(client, messages=message, logprobs=True, top_logprobs=1).choices[0].logprobs.content[-1]
    assert [entry.token for entry in only_best.top_logprobs] == ["A"]


def test_stop_strings(client: openai.OpenAI) -> None:
    assert chat(client, stop="d:").choices[0].message.content == "You sai"
    assert chat(client, stop=["nothing", "said"]).choices[0].message.content == "You "


def test_every_sampling_field_reaches_the_model(client: openai.OpenAI, server: FakeLlmServer) -> None:
    extras: dict[str, Any] = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True}
    extras |= {"stop_token_ids": [7], "include_stop_str_in_output": True, "skip_special_tokens": False}
    own: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "seed": 11, "stop": "END", "logit_bias": {"5": -100}}
    own |= {"presence_penalty": 0.5, "frequency_penalty": -0.5}
    chat(client, max_completion_tokens=9, extra_body=extras, **own)
    expected = extras | own | {"max_tokens": 9, "stop": ["END"]}
    assert server.inferences[-1]["sampling"] == expected


def test_max_tokens_is_the_rest_of_the_context_by_default(client: openai.OpenAI, server: FakeLlmServer) -> None:
    chat(client)
    assert server.inferences[-1]["sampling"] == {"max_tokens": None}


def test_fields_that_ask_for_what_happens_anyway_are_accepted(client: openai.OpenAI, server: FakeLlmServer) -> None:
    chat(
        client,
        n=1,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        tool_choice="none",
        extra_body={"logit_bias": None, "tools": None},
    )
    assert server.inferences[-1]["sampling"] == {"max_tokens": None}


def test_messages_reach_the_template_in_its_form(client: openai.OpenAI, server: FakeLlmServer) -> None:
    one = {"type": "text", "text": "one", "prompt_cache_breakpoint": {"mode": "explicit"}}
    two = {"type": "text", "text": "two", "prompt_cache_breakpoint": None}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [one, two], "name": "eve"},
        {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "assistant", "content": None, "refusal": "no", "audio": None, "annotations": [], "tool_calls": None},
        {"role": "user", "content": "bye"},
    ]
    chat(client, messages=messages)
    assert server.inferences[-1]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo", "name": "eve"},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call], "content": ""},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "bye"},
    ]


def test_options_of_the_chat_template(client: openai.OpenAI, server: FakeLlmServer) -> None:
    options = {"add_generation_prompt": True, "chat_template_kwargs": {"enable_thinking": False}}
    chat(client, extra_body=options)
    assert server.inferences[-1]["messages"] == {"messages": USER_HI, **options}


def test_an_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    message = chat(client).choices[0].message
    again = chat(client, messages=[*USER_HI, message.model_dump(), {"role": "user", "content": "more"}])
    assert again.choices[0].message.content == "You said: more"


def test_continuous_usage(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(client, stream=True, stream_options=options, max_tokens=3))
    assert [chunk.usage.completion_tokens for chunk in chunks] == [0, 1, 2, 3, 3, 3]


def test_async_client_with_32_concurrent_streams(url: str) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        messages: Any = [{"role": "user", "content": f"number {number}"}]
        stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(32)))

    assert asyncio.run(all_of_them()) == [f"You said: number {number}" for number in range(32)]


def test_disconnect_cancels_a_stream(client: openai.OpenAI, server: FakeLlmServer) -> None:
    stream = chat(client, messages=[{"role": "user", "content": "forever"}], stream=True)
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    stream.close()
    assert server.handles[-1].cancelled.wait(10)
    assert server.handles[-1].over.wait(10)


def test_disconnect_cancels_a_whole_response(url: str, server: FakeLlmServer) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "forever"}]}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=httpx.Timeout(5, read=0.2))
    assert server.handles[-1].cancelled.wait(10)


def test_disconnect_before_the_first_token_cancels(url: str, server: FakeLlmServer) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "silent"}], "stream": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=httpx.Timeout(5, read=0.2))
    assert server.handles[-1].cancelled.wait(10)


def test_a_silent_stream_pings(server: FakeLlmServer) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "silent"}], "stream": True}
    with (
        serve_openai(server, options=ProtocolOptions(request_defaults=RequestDefaults(sse_keep_alive_s=0.01))) as base,
        httpx.stream("POST", f"{base}/v1/chat/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        assert '"role":"assistant"' in next(lines)
        assert [next(lines) for _ in range(4)] == ["", ": ping", "", ": ping"]
    assert server.handles[-1].over.wait(10)


def test_error_in_mid_stream_is_the_last_event(url: str, client: openai.OpenAI, server: FakeLlmServer) -> None:
    messages: list[Any] = [{"role": "user", "content": "fail late"}]
    with pytest.raises(openai.APIError, match="the engine died"):
        list(chat(client, messages=messages, stream=True))
    response = httpx.post(f"{url}/v1/chat/completions", json={"model": MODEL, "messages": messages, "stream": True})
    assert response.status_code == 200
    last = response.text.removesuffix("\n\n").split("\n\n")[-1]
    assert orjson.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    assert "[DONE]" not in response.text
