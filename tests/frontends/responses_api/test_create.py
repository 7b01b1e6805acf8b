"""Responses through the real `openai` client, over the real host and a model that says what it is told to: whole,
streamed and parsed, with calls and reasoning."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import orjson
import pytest
from openai.types.responses import Response
from pydantic import BaseModel, TypeAdapter

from llmbackend.core.inference_server import InferenceServer
from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.access.settings import AccessSettings
from llmbackend.frontends.generation.inferences import MANY_TOKENS
from llmbackend.frontends.generation.tensors import Delta
from llmbackend.frontends.journals.documents import Capacity, Document, Put, StoreError, Write
from llmbackend.frontends.journals.response_store import ResponseStore
from llmbackend.frontends.journals.sqlite_storage import SqliteStorage
from llmbackend.frontends.journals.store_settings import IN_MEMORY, StoreSettings
from llmbackend.frontends.openai.responses_api.output_items import OutputItem
from llmbackend.frontends.openai.responses_api.response_state import Change, ResponseState
from llmbackend.frontends.openai.responses_api.schema import ResponseObject
from llmbackend.frontends.openapi import PlainJsonSchema
from tests.helpers.fake_llm_server import MODEL as FAKE_MODEL
from tests.helpers.fake_llm_server import FakeLlmServer
from tests.helpers.openai_live_server import openai_client, serve_openai
from tests.helpers.scripted_text import MODEL, SAY
from tests.helpers.waiting import eventually

from .event_reader import EventReader, events_of

RESPONSE: TypeAdapter[Any] = TypeAdapter(Response)
DOCUMENTED = TypeAdapter(ResponseObject).json_schema(schema_generator=PlainJsonSchema, mode="serialization")
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": False,
}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Changes files."}
PARIS, ROME = '{"city": "Paris é"}', '{"city":"Rome"}'


def call(arguments: str, name: str = "get_weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def both(client: openai.OpenAI, script: str, **fields: Any) -> tuple[dict[str, Any], list[str]]:
    """The whole response and the kinds of the stream's events; the stream is found to be a right one, and equal."""
    body = {"model": MODEL, "input": SAY + script, "temperature": 0, "store": False, **fields}
    whole: dict[str, Any] = ask(client, body).json()
    RESPONSE.validate_python(whole, strict=True)
    jsonschema.validate(whole, DOCUMENTED)
    reader = EventReader()
    streamed = reader.read_all(events_of(ask(client, body | {"stream": True}).content))
    for response in (streamed, whole):
        text = json.dumps(response["output"]).replace(response["id"].removeprefix("resp_"), "ID")
        response["output"] = json.loads(text)
        response["usage"].pop("input_tokens_details")  # the second one finds the first one's prompt in the cache
        del response["id"], response["created_at"]
        assert (response.pop("completed_at") is None) == (response["status"] != "completed")
        for item in response["output"]:
            item.pop("call_id", None)
    assert streamed == whole
    return whole, reader.kinds


def ask(client: openai.OpenAI, body: dict[str, Any]) -> httpx.Response:
    answer = httpx.post(f"{client.base_url}responses", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_text(client: openai.OpenAI) -> None:
    whole, _ = both(client, "Hello é🌦", metadata={"a": "b"})
    assert [(one["type"], one["content"][0]["text"]) for one in whole["output"]] == [("message", "Hello é🌦")]
    assert (whole["status"], whole["metadata"], whole["error"]) == ("completed", {"a": "b"}, None)
    assert whole["usage"]["output_tokens"] == len("Hello é🌦".encode()) + 1


def test_reasoning_text_and_parallel_calls(client: openai.OpenAI) -> None:
    script = f"<think>Well.</think>Let me see. {call(PARIS)}\n{call(ROME)}"
    whole, kinds = both(client, script, tools=[WEATHER], include=["reasoning.encrypted_content"])
    reasoning, message, *calls = whole["output"]
    assert reasoning["content"][0]["text"] == "Well." and len(reasoning["encrypted_content"]) > 40
    assert message["content"][0]["text"] == "Let me see. "
    assert [(one["name"], one["arguments"], one["status"]) for one in calls] == [
        ("get_weather", PARIS, "completed"),
        ("get_weather", ROME, "completed"),
    ]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len("<think>Well.</think>")
    assert kinds.count("response.function_call_arguments.done") == 2


def test_one_call_where_no_more_are_wanted(client: openai.OpenAI) -> None:
    for fields in ({"parallel_tool_calls": False}, {"max_tool_calls": 1}):
        whole, _ = both(client, f"{call(PARIS)}\n{call(ROME)}", tools=[WEATHER], **fields)
        assert [one["arguments"] for one in whole["output"]] == [PARIS]


def test_the_input_of_a_custom_tool(client: openai.OpenAI) -> None:
    patch = '*** Begin Patch\n+x = "é🌦"\t\\n\n*** End Patch\n'
    whole, kinds = both(client, call(json.dumps({"input": patch}), "apply_patch"), tools=[WEATHER, PATCH])
    (item,) = whole["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", patch)
    assert kinds.count("response.custom_tool_call_input.delta") > 20


def test_what_is_longer_than_it_may_be(client: openai.OpenAI) -> None:
    whole, kinds = both(client, "Hello", max_output_tokens=3)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert kinds[-1] == "response.incomplete"
    whole, _ = both(client, call(PARIS), tools=[WEATHER], max_output_tokens=60)
    assert whole["output"][0]["status"] == "incomplete"


def test_log_probabilities(client: openai.OpenAI) -> None:
    include: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    for fields in ({}, {"tools": [WEATHER]}):
        whole, _ = both(client, "<think>A</think>Hi", **include, **fields)
        (part,) = whole["output"][-1]["content"]
        assert [one["token"] for one in part["logprobs"]][:2] == ["H", "i"]
        assert len(part["logprobs"][0]["top_logprobs"]) == 2


class City(BaseModel):
    name: str
    inhabitants: int


def test_the_client_parses(client: openai.OpenAI) -> None:
    script = SAY + '{"name":"Zürich","inhabitants":7}'
    parsed = client.responses.parse(model=MODEL, input=script, text_format=City, store=False)
    assert parsed.output_parsed == City(name="Zürich", inhabitants=7)
    with client.responses.stream(model=MODEL, input=script, text_format=City, store=False) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_parsed == parsed.output_parsed
    assert "".join(deltas) == final.output_text == script.removeprefix(SAY)


def test_a_loop_of_tools_with_the_items_sent_back(client: openai.OpenAI) -> None:
    tools: list[Any] = [WEATHER]
    include: list[Any] = ["reasoning.encrypted_content"]
    question: list[Any] = [{"role": "user", "content": f"{SAY}<think>Hm.</think>{call(PARIS)}"}]
    first = client.responses.create(model=MODEL, input=question, tools=tools, store=False, include=include)
    asked = next(one for one in first.output if one.type == "function_call")
    outputs: list[Any] = [{"type": "function_call_output", "call_id": asked.call_id, "output": f"{SAY}sunny"}]
    sent_back: list[Any] = [*question, *(one.to_dict() for one in first.output), *outputs]
    second = client.responses.create(model=MODEL, input=sent_back, tools=tools, store=False)
    assert second.output_text == f"sunny{asked.call_id}", "the template shows the id of the call"


def test_a_stored_response_is_gone_on_from(client: openai.OpenAI) -> None:
    tools: list[Any] = [WEATHER]
    first = client.responses.create(model=MODEL, input=f"{SAY}{call(PARIS)}", tools=tools)
    asked: Any = first.output[0]
    with client.responses.stream(
        model=MODEL,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": asked.call_id, "output": f"{SAY}sunny"}],
    ) as stream:
        second = stream.get_final_response()
    assert second.output_text == f"sunny{asked.call_id}" and second.previous_response_id == first.id
    referring: list[Any] = [
        {"type": "item_reference", "id": asked.id},
        {"type": "function_call_output", "call_id": asked.call_id, "output": f"{SAY}cloudy"},
    ]
    third = client.responses.create(model=MODEL, previous_response_id=second.id, input=f"{SAY}fine")
    assert third.output_text == "fine"
    fourth = client.responses.create(model=MODEL, input=referring, tools=tools)
    assert fourth.output_text == f"cloudy{asked.call_id}"


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}])
def test_a_continued_response_is_kept_as_long_as_the_last_one(
    scripted_host: InferenceServer, fields: dict[str, Any]
) -> None:
    storage = SqliteStorage(None, Capacity(1 << 20, 100))

    def found(id: str) -> Document:
        document = storage.get(id, 0.0)
        assert document is not None
        return document

    with openai_client(scripted_host, store=ResponseStore(storage, 60)) as client:
        first = client.responses.create(model=MODEL, input=f"{SAY}One.")
        middle = client.responses.create(model=MODEL, input=f"{SAY}Two.", previous_response_id=first.id)
        for id in (first.id, middle.id):
            storage.commit([Put(replace(found(id), expires_s=time.time() + 30))], 0.0)
        body = {"model": MODEL, "input": f"{SAY}Three.", "previous_response_id": middle.id} | fields
        last_id = re.findall(r"resp_\w{32}", ask(client, body).text.replace(middle.id, ""))[0]
        eventually(lambda: not found(last_id).is_live)
        last = found(last_id)
        assert found(first.id).expires_s == found(middle.id).expires_s == last.expires_s > time.time() + 30
        assert orjson.loads(last.output) == orjson.loads(last.body)["output"] != []


def test_what_is_not_stored_is_not_found(client: openai.OpenAI) -> None:
    hidden = client.responses.create(model=MODEL, input=f"{SAY}a", store=False)
    for id in (hidden.id, "resp_" + 32 * "0"):
        with pytest.raises(openai.BadRequestError) as raised:
            client.responses.create(model=MODEL, input=f"{SAY}a", previous_response_id=id)
        assert raised.value.code == "previous_response_not_found" and id in raised.value.message
    reference: list[Any] = [{"type": "item_reference", "id": hidden.output[0].id}]
    with pytest.raises(openai.NotFoundError) as not_found:
        client.responses.create(model=MODEL, input=reference)
    assert not_found.value.param == "input[0].id"


def test_errors_name_the_clients_fields(client: openai.OpenAI) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"input": "a" * 5000}, "input"),
        ({"input": "a", "max_output_tokens": 5000}, "max_output_tokens"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 7}}}},
            "text.format",
        ),
        ({"input": "a", "unheard_of": 1}, "unheard_of"),
        ({}, "input"),
    ]
    for fields, param in wrong:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as raised:
                client.post("/responses", body={"model": MODEL, "stream": stream, **fields}, cast_to=httpx.Response)
            assert (raised.value.param or "").startswith(param), raised.value


def test_a_conversation_goes_on_from_response_to_response(client: openai.OpenAI) -> None:
    id = client.conversations.create(items=[{"role": "user", "content": "Earlier."}]).id
    first = client.responses.create(model=MODEL, input=SAY + "One.", conversation=id, temperature=0)
    assert first.conversation is not None and first.conversation.id == id
    stream = client.responses.create(
        model=MODEL, input=SAY + "Two.", conversation={"id": id}, temperature=0, store=False, stream=True
    )
    assert [event.type for event in stream][-1] == "response.completed"
    listed: list[Any] = list(client.conversations.items.list(id, order="asc"))
    texts = [item.content[0].text for item in listed]
    assert texts == ["Earlier.", SAY + "One.", "One.", SAY + "Two.", "Two."]
    assert [item.role for item in listed] == ["user", "user", "assistant", "user", "assistant"]
    assert len({item.id for item in listed}) == 5 and listed[2].id == first.output[0].id
    referring: list[Any] = [{"type": "item_reference", "id": listed[2].id}, {"role": "user", "content": SAY + "Three."}]
    longer = client.responses.create(model=MODEL, input=referring, conversation=id)
    assert first.usage and longer.usage and longer.usage.input_tokens > first.usage.input_tokens


def test_a_conversation_that_is_not_there(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model=MODEL, input="Hi!", conversation="conv_1")
    assert caught.value.param == "conversation"


@pytest.fixture(scope="module")
def failing() -> Iterator[openai.OpenAI]:
    with openai_client(FakeLlmServer(), store=IN_MEMORY.open()) as client:
        yield client


def test_a_failure_behind_the_first_token_is_told_in_the_stream(failing: openai.OpenAI) -> None:
    body = {"model": FAKE_MODEL, "input": "fail late", "stream": True}
    response = EventReader().read_all(events_of(ask(failing, body).content))
    assert (response["status"], response["error"]) == ("failed", {"code": "server_error", "message": "the engine died"})
    assert [(item["status"], item["content"][0]["text"]) for item in response["output"]] == [("incomplete", "You")]


def test_a_failure_before_the_first_token_is_an_http_error(failing: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as too_long:
            failing.responses.create(model=FAKE_MODEL, input="too long", stream=stream)
        assert "99999 tokens" in too_long.value.message
        with pytest.raises(openai.InternalServerError) as overloaded:
            failing.responses.create(model=FAKE_MODEL, input="overloaded", stream=stream)
        assert overloaded.value.status_code == 503
    with pytest.raises(openai.NotFoundError):
        failing.responses.create(model="nothing", input="a")


def test_a_model_that_tells_counts_with_each_response(failing: openai.OpenAI) -> None:
    body = {"model": FAKE_MODEL, "input": "hi"}
    response = EventReader().read_all(events_of(ask(failing, body | {"stream": True}).content))
    for usage in (response["usage"], ask(failing, body).json()["usage"]):
        assert (usage["input_tokens"], usage["output_tokens"]) == (2, len("You said: hi"))


class FullStorage(SqliteStorage):
    """A disk without room."""

    def commit(self, writes: Sequence[Write], now_s: float) -> tuple[str, ...]:
        if writes:
            raise StoreError("the disk is full")
        return ()


def test_a_response_that_can_not_be_stored_fails(scripted_host: InferenceServer) -> None:
    store = ResponseStore(FullStorage(None, Capacity(1 << 20, 100)), 60)
    with openai_client(scripted_host, store=store) as client:
        body = {"model": MODEL, "input": f"{SAY}Hi"}
        response = EventReader().read_all(events_of(ask(client, body | {"stream": True}).content))
        assert response["status"] == "failed" and "response store" in response["error"]["message"]
        with pytest.raises(openai.InternalServerError, match="response store"):
            client.responses.create(model=MODEL, input=f"{SAY}Hi")
        assert client.responses.create(model=MODEL, input=f"{SAY}Hi", store=False).output_text == "Hi"


class StorageWithoutResponses(SqliteStorage):
    """A disk that is full whenever a response comes."""

    def commit(self, writes: Sequence[Write], now_s: float) -> Collection[str]:
        if any(isinstance(write, Put) and write.document.kind == "response" for write in writes):
            raise StoreError("the disk is full")
        return super().commit(writes, now_s)


def test_a_response_that_can_not_be_stored_is_not_in_its_conversation(scripted_host: InferenceServer) -> None:
    store = ResponseStore(StorageWithoutResponses(None, Capacity(1 << 20, 100)), 60)
    with openai_client(scripted_host, store=store) as client:
        id = client.conversations.create().id
        with pytest.raises(openai.InternalServerError, match="response store"):
            client.responses.create(model=MODEL, input=f"{SAY}Hi", conversation=id)
        assert not client.conversations.items.list(id).data
        client.responses.create(model=MODEL, input=f"{SAY}Hi", conversation=id, store=False)
        assert len(client.conversations.items.list(id).data) == 2


def test_input_tokens_are_those_of_the_response(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=SAY + "One.", temperature=0)
    for fields in (
        {"input": SAY + "Hello"},
        {"input": SAY + "Hello", "instructions": "Be brief.", "tools": [WEATHER], "tool_choice": "auto"},
        {"input": SAY + "Hello", "previous_response_id": first.id},
    ):
        body: dict[str, Any] = {"model": MODEL, **fields}
        counted = httpx.post(f"{client.base_url}responses/input_tokens", json=body).json()
        made = httpx.post(f"{client.base_url}responses", json=body | {"max_output_tokens": 1}, timeout=30).json()
        assert counted == {"object": "response.input_tokens", "input_tokens": made["usage"]["input_tokens"]}
    assert client.responses.input_tokens.count(model=MODEL, input=SAY + "Hello").input_tokens > 5
    sizes = [
        client.responses.input_tokens.count(model=MODEL, input="x" * 100_000, truncation=truncation).input_tokens
        for truncation in ("auto", "disabled")
    ]
    assert sizes[0] == sizes[1] > 100_000
    for wrong in ({"stream": True}, {"store": False}, {"personality": "friendly"}):
        answer = httpx.post(f"{client.base_url}responses/input_tokens", json={"model": MODEL, "input": "x"} | wrong)
        assert answer.status_code == 400 and answer.json()["error"]["param"] in wrong


@pytest.mark.parametrize(("length", "is_long"), [(20, False), (MANY_TOKENS, True)])
def test_only_long_answers_are_read_in_a_thread(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, length: int, is_long: bool
) -> None:
    threads: list[str] = []
    add = ResponseState.add

    def watched(state: ResponseState, delta: Delta) -> list[Change]:
        threads.append(threading.current_thread().name)
        return add(state, delta)

    monkeypatch.setattr(ResponseState, "add", watched)
    made = client.responses.create(model=MODEL, input=SAY + "x" * length, temperature=0, store=False)
    assert made.output_text == "x" * length
    assert [name.startswith("large-requests") for name in threads] == [is_long]


@pytest.mark.parametrize("how", ["stream", "background", "store"])
@pytest.mark.parametrize(("length", "is_long"), [(20, False), (MANY_TOKENS + 1, True)])
def test_the_end_of_a_long_answer_with_logprobs_is_encoded_in_a_thread(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, how: str, length: int, is_long: bool
) -> None:
    threads: list[str] = []
    as_json = OutputItem.as_json

    def watched(item: OutputItem) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return as_json(item)

    monkeypatch.setattr(OutputItem, "as_json", watched)
    body = {"model": MODEL, "input": SAY + "x" * length, "temperature": 0, how: True, "stream": how != "store"}
    text = ask(client, body | {"include": ["message.output_text.logprobs"]}).text
    assert text.count('"logprob":') >= length
    is_in_thread = [name.startswith("large-requests") for name in threads]
    assert is_in_thread == [is_long or how == "background"] * (1 if how == "store" else 2)


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_and_answer_come_as_text_and_tokens(client: openai.OpenAI, stream: bool) -> None:
    """Reasoning, calls and their markers included: what the model was told and wrote."""
    script = f"<think>Why?</think>Hello{call(ROME)}"
    body = {"model": MODEL, "input": SAY + script, "tools": [WEATHER], "enable_response_messages": True}
    answer: Any = client.responses.create(extra_body=body, stream=stream)
    response = list(answer)[-1].response if stream else answer
    ((prompt,), (written,)) = response.input_messages, response.output_messages
    assert written["type"] == prompt["type"] == "raw_message_tokens"
    assert written["message"] == script
    assert prompt["message"].endswith(f"user: {SAY}{script}\n\x1c")
    assert len(prompt["tokens"]) == response.usage.input_tokens
    assert len(written["tokens"]) == response.usage.output_tokens
    assert client.responses.retrieve(response.id).to_dict()["output_messages"] == [written]
    without = client.responses.create(model=MODEL, input=SAY + "Hi")
    assert "input_messages" not in without.to_dict()


def test_a_stored_response_belongs_to_its_key_whatever_keys_the_server_has(
    scripted_host: InferenceServer, tmp_path: Path
) -> None:
    @contextlib.contextmanager
    def served(*keys: str) -> Iterator[str]:
        store = StoreSettings(url=f"sqlite:{tmp_path / 'store'}").open()
        with serve_openai(scripted_host, store, AccessControl(AccessSettings(api_keys=keys))) as base:
            yield f"{base}/v1/responses"
        asyncio.run(store.close())

    def of(key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    storage = StoreSettings(url=f"sqlite:{tmp_path / 'store'}").open_storage()
    storage.commit([Put(Document("api-key-1", "response", "resp_old", b"{}", 0.0, 1e12))], 1.0)  # of an older release
    storage.close()
    with served("sk-a", "sk-b") as url:
        assert httpx.get(f"{url}/resp_old", headers=of("sk-a")).status_code == 404
        id = httpx.post(url, json={"model": MODEL, "input": f"{SAY}secret"}, headers=of("sk-a")).json()["id"]
        assert httpx.get(f"{url}/{id}", headers=of("sk-b")).status_code == 404
    with served("sk-b") as url:  # which has the place of the other one now
        assert httpx.get(f"{url}/{id}", headers=of("sk-b")).status_code == 404
    with served("sk-b", "sk-a") as url:
        assert httpx.get(f"{url}/{id}", headers=of("sk-a")).json()["id"] == id
