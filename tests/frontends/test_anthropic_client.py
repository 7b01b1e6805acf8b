"""The Messages API through the real `anthropic` client, over the real host and a mock model that says what it is told
to: whole and streamed, tools, thinking, stop reasons, errors."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from llmbackend.core.inference_server import InferenceServer
from llmbackend.frontends.anthropic.answers import WholeMessage
from llmbackend.frontends.generation.inferences import MANY_TOKENS
from llmbackend.frontends.generation.sealed_reasoning import FIXED_KEY
from llmbackend.frontends.generation.tensors import Delta
from tests.helpers.openai_live_server import serve_openai
from tests.helpers.scripted_text import MODEL, SAY, host_of_scripts

WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PARIS, ROME = '{"city": "Paris é"}', '{"city":"Rome"}'


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'


THINKS = f"<think>Paris first.</think>\n\n{call(PARIS)}\n{call(ROME)}"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    with host_of_scripts(tmp_path_factory.mktemp("repository")) as host:
        yield host


@pytest.fixture(scope="module")
def base(host: InferenceServer) -> Iterator[str]:
    with serve_openai(host) as base:
        yield base


@pytest.fixture(scope="module")
def client(base: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0) as client:
        ask(client, "", tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=1)  # starts threads for grammars
        yield client


def fields(script: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": SAY + script}]
    return {"model": MODEL, "messages": messages, "max_tokens": 300, "extra_body": {"temperature": 0}, **more}


def ask(client: anthropic.Anthropic, script: str, **more: Any) -> anthropic.types.Message:
    message = client.messages.create(**fields(script, **more))
    assert isinstance(message, anthropic.types.Message)
    return message


def streamed(client: anthropic.Anthropic, script: str, **more: Any) -> anthropic.types.Message:
    with client.messages.stream(**fields(script, **more)) as stream:
        return stream.get_final_message()


def said(message: anthropic.types.Message) -> dict[str, Any]:
    """Without what belongs to one request."""
    shown: dict[str, Any] = json.loads(message.to_json())
    for block in shown["content"]:
        if block["type"] == "tool_use":
            block["id"] = ""
    return {name: value for name, value in shown.items() if name != "id" and value is not None}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("Hello é ∑.", {}),
    "nothing": ("", {}),
    "layout": ("\n \n", {}),
    "thinking": ("<think>Well, é.</think>\n\nYes.", {}),
    "thinking that is not shown": ("<think>Well.</think>Yes.", {"thinking": {"type": "disabled"}}),
    "thinking as its signature": ("<think>Well.</think>Yes.", {"thinking": {"type": "adaptive", "display": "omitted"}}),
    "calls": (f"I see. {call(PARIS)}\n{call(ROME)}", {"tools": [WEATHER]}),
    "thinking and calls": (THINKS, {"tools": [WEATHER]}),
    "one call": (THINKS, {"tools": [WEATHER], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    "calls cut off": (call(PARIS), {"tools": [WEATHER], "max_tokens": 70}),
    "thinking cut off": ("<think>Well, well.", {"max_tokens": 12}),
    "text cut off": ("Hello", {"max_tokens": 3}),
    "the prompt alone": ("Hello", {"max_tokens": 0}),
    "a stop sequence": ("Hello END of it", {"stop_sequences": ["never", "END"]}),
}


@pytest.mark.parametrize(("length", "is_long"), [(20, False), (MANY_TOKENS, True)])
def test_only_long_messages_are_read_in_a_thread(
    client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch, length: int, is_long: bool
) -> None:
    threads: list[str] = []
    add = WholeMessage.add

    def watched(message: WholeMessage, delta: Delta) -> None:
        threads.append(threading.current_thread().name)
        add(message, delta)

    monkeypatch.setattr(WholeMessage, "add", watched)
    message = ask(client, "x" * length, max_tokens=2 * MANY_TOKENS)
    assert message.content[0].type == "text" and message.content[0].text == "x" * length
    assert [name.startswith("large-requests") for name in threads] == [is_long]


@pytest.mark.parametrize(("script", "more"), CASES.values(), ids=CASES)
def test_a_stream_is_the_whole_message(client: anthropic.Anthropic, script: str, more: dict[str, Any]) -> None:
    whole = ask(client, script, **more)
    again = streamed(client, script, **more)
    assert said(again) == {**said(whole), "usage": said(again)["usage"]}
    assert whole.usage.output_tokens == again.usage.output_tokens
    inputs = [(usage.input_tokens + (usage.cache_read_input_tokens or 0)) for usage in (whole.usage, again.usage)]
    assert inputs[0] == inputs[1] > 0


def blocks(message: anthropic.types.Message) -> list[Any]:
    return [json.loads(block.to_json()) for block in message.content]


def test_text(client: anthropic.Anthropic) -> None:
    message = ask(client, "Hello é ∑.")
    assert blocks(message) == [{"type": "text", "text": "Hello é ∑."}]
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    assert message.id.startswith("msg_") and message.model == MODEL and message._request_id is not None


def test_thinking_and_calls(client: anthropic.Anthropic) -> None:
    message = ask(client, THINKS, tools=[WEATHER])
    thinking, first, second = blocks(message)
    assert thinking == {"type": "thinking", "thinking": "Paris first.", "signature": FIXED_KEY.seal("Paris first.")}
    assert [first["input"], second["input"]] == [{"city": "Paris é"}, {"city": "Rome"}]
    assert first["id"].startswith("toolu_") and first["id"] != second["id"]
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details is not None
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens


def test_thinking_is_not_shown_where_it_was_not_wanted(client: anthropic.Anthropic) -> None:
    assert blocks(ask(client, "<think>Well.</think>Yes.", thinking={"type": "disabled"})) == [
        {"type": "text", "text": "Yes."}
    ]
    thinking, text = blocks(
        ask(client, "<think>Well.</think>Yes.", thinking={"type": "adaptive", "display": "omitted"})
    )
    assert (
        thinking == {"type": "thinking", "thinking": "", "signature": FIXED_KEY.seal("Well.")}
        and text["text"] == "Yes."
    )


def test_stop_reasons(client: anthropic.Anthropic) -> None:
    assert ask(client, "Hello", max_tokens=3).stop_reason == "max_tokens"
    stopped = ask(client, "Hello END of it", stop_sequences=["never", "END"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
    assert blocks(stopped)[0]["text"] == "Hello "
    cut = ask(client, "x" * 3000, max_tokens=20_000)
    assert cut.stop_reason == "model_context_window_exceeded" and cut.usage.output_tokens < 3000
    assert ask(client, call(PARIS), tools=[WEATHER], max_tokens=70).stop_reason == "max_tokens"


def test_a_schema_holds_the_answer(client: anthropic.Anthropic) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema |= {"additionalProperties": False}
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    message = ask(client, '{"n": 7}', output_config=config)
    assert json.loads(blocks(message)[0]["text"]) == {"n": 7}


def test_tool_choice(client: anthropic.Anthropic) -> None:
    tools = [WEATHER, {**WEATHER, "name": "other"}]
    forced = ask(client, call(PARIS), tools=tools, tool_choice={"type": "tool", "name": "get_weather"})
    assert [block["name"] for block in blocks(forced)] == ["get_weather"]
    free = ask(client, call(PARIS), tools=tools, tool_choice={"type": "none"})
    assert blocks(free)[0]["type"] == "text" and free.stop_reason == "end_turn"


def test_a_conversation_goes_on_with_what_was_answered(client: anthropic.Anthropic) -> None:
    first = ask(client, THINKS, tools=[WEATHER])
    calls = [block for block in first.content if isinstance(block, anthropic.types.ToolUseBlock)]
    results: list[Any] = [{"type": "tool_result", "tool_use_id": block.id, "content": "rain"} for block in calls]
    results[1] |= {"is_error": True, "content": [{"type": "text", "text": "rain"}]}
    results.append({"type": "text", "text": f"{SAY}It rains."})
    question: list[Any] = fields(THINKS)["messages"]
    answer = first.to_param()
    messages: list[Any] = [*question, answer, {"role": "user", "content": results}]
    message = client.messages.create(**fields("", tools=[WEATHER], messages=messages))
    assert blocks(message) == [{"type": "text", "text": "It rains."}]


def test_an_answer_is_prefilled(client: anthropic.Anthropic, base: str) -> None:
    """It goes on behind the last message's text, which the model reads as its own."""
    messages = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "The answer is ("}]
    message = client.messages.create(**fields("", messages=messages, max_tokens=20))
    body = {"model": MODEL, "prompt": "user: Go on.\nassistant: The answer is (", "max_tokens": 20, "temperature": 0}
    (choice,) = httpx.post(f"{base}/v1/completions", json=body, timeout=20).json()["choices"]
    assert blocks(message) == [{"type": "text", "text": choice["text"]}] and choice["text"]


def test_the_order_of_events(client: anthropic.Anthropic) -> None:
    usage = ask(client, THINKS, tools=[WEATHER]).usage
    with client.messages.create(**fields(THINKS, tools=[WEATHER]), stream=True) as stream:
        events = list(stream)
    for event in events:
        type(event).model_validate(event.to_dict())
    counts = [events[0].message.usage, events[-2].usage]
    assert len({count.input_tokens + count.cache_read_input_tokens for count in (usage, *counts)}) == 1
    assert usage.output_tokens == events[-2].usage.output_tokens
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    open_index, next_index = None, 0
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert open_index is None and event.index == next_index
            open_index, next_index = event.index, next_index + 1
        elif event.type == "content_block_delta":
            assert event.index == open_index
        else:
            assert event.type == "content_block_stop" and event.index == open_index
            open_index = None
    assert open_index is None and next_index == 3


def test_the_tool_runner(client: anthropic.Anthropic) -> None:
    asked: list[str] = []

    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return f"{SAY}It rains in {city}."

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=300,
        tools=[anthropic.beta_tool(get_weather)],
        messages=[{"role": "user", "content": SAY + call(ROME)}],
    )
    *_, last = runner
    (block,) = last.content
    assert asked == ["Rome"] and block.type == "text" and block.text.startswith("It rains in Rome.")


def test_the_async_client(base: str) -> None:

    async def ask_twice() -> tuple[Any, Any]:
        async with anthropic.AsyncAnthropic(base_url=base, api_key="none", max_retries=0) as client:
            whole = await client.messages.create(**fields("Hello"))
            async with client.messages.stream(**fields("Hello")) as stream:
                return whole, [text async for text in stream.text_stream]

    whole, texts = asyncio.run(ask_twice())
    assert whole.content[0].text == "".join(texts) == "Hello"


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    asked = fields("Hello", tools=[WEATHER], system="Be brief.")
    asked.pop("max_tokens")
    asked.pop("extra_body")
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = ask(client, "Hello", tools=[WEATHER], system="Be brief.").usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0) > 0


def test_the_models(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert model.id == MODEL == client.models.retrieve(MODEL).id
    assert model.max_input_tokens == 4096 and model.type == "model" and model.lifecycle == "active"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("none")


ERRORS: list[tuple[dict[str, Any], type[anthropic.APIStatusError], str, str]] = [
    ({"model": "none"}, anthropic.NotFoundError, "not_found_error", "none"),
    ({"max_tokens": -1}, anthropic.BadRequestError, "invalid_request_error", "'max_tokens' is -1"),
    ({"messages": []}, anthropic.BadRequestError, "invalid_request_error", "'messages' is"),
    ({"stop_sequences": [""]}, anthropic.BadRequestError, "invalid_request_error", "stop_sequences[0]"),
    ({"container": "c"}, anthropic.BadRequestError, "invalid_request_error", "'container' is not supported"),
    ({"extra_body": {"nonsense": 1}}, anthropic.BadRequestError, "invalid_request_error", "unknown field 'nonsense'"),
    (
        {"messages": [{"role": "user", "content": "a " * 5000}]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "prompt is too long: at least 4097 tokens > 4096 maximum",
    ),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}},
        anthropic.BadRequestError,
        "invalid_request_error",
        "output_config.format.schema",
    ),
    (
        {"tools": [{**WEATHER, "strict": True, "input_schema": {"type": "nothing"}}]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "tools[0].input_schema",
    ),
]


@pytest.mark.parametrize(("more", "kind", "type_", "text"), ERRORS)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_exceptions(
    client: anthropic.Anthropic,
    more: dict[str, Any],
    kind: type[anthropic.APIStatusError],
    type_: str,
    text: str,
    stream: bool,
) -> None:
    with pytest.raises(kind) as raised:
        client.messages.create(**fields("Hello", **more), stream=stream)
    body: Any = raised.value.body
    assert body["type"] == "error" and body["error"]["type"] == type_ and text in body["error"]["message"]
    assert body["request_id"] == raised.value.response.headers["request-id"]


def test_betas_pass_fields_over(base: str, caplog: pytest.LogCaptureFixture) -> None:
    asked = {**fields("Hello"), "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    asked |= asked.pop("extra_body") | {"brand_new": True, "output_config": {"effort": "high", "task_budget": {}}}
    caplog.set_level("DEBUG", logger="llmbackend.frontends.anthropic")
    with httpx.Client(base_url=base, params={"beta": "true"}) as http:
        assert http.post("/v1/messages", json=asked).status_code == 400
        answered = http.post("/v1/messages", json=asked, headers={"anthropic-beta": "context-management-2025-06-27"})
        assert answered.status_code == 200, answered.text
    (record,) = caplog.records
    assert all(name in record.getMessage() for name in ("context_management", "brand_new", "output_config.task_budget"))


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/v1/messages", {"anthropic-version": "1999-01-01"}, 400),
        ("GET", "/v1/messages", {}, 405),
        ("POST", "/v1/messages/batches", {}, 404),
        ("POST", "/v1/messages/nothing", {}, 404),
        ("GET", "/v1/models", {"anthropic-version": "1999-01-01"}, 400),
        ("GET", "/v1/models?limit=0", {"anthropic-version": "2023-06-01"}, 400),
    ],
)
def test_other_requests_are_refused_in_shape(
    base: str, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    with httpx.Client(base_url=base) as http:
        answer = http.request(method, path, headers={"content-type": "application/json", **headers})
    assert answer.status_code == status and answer.json()["type"] == "error", answer.text
    assert answer.headers["request-id"] == answer.json()["request_id"]


def test_models_of_other_clients_stay_as_they_are(base: str) -> None:
    with httpx.Client(base_url=base) as http:
        assert http.get("/v1/models").json()["object"] == "list"
