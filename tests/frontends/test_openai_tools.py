"""Tool calls and reasoning through the real `openai` client, over the real host and a mock model that says what it is
told to: whole and streamed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from llmbackend.adapter import limits
from llmbackend.core.inference_server import InferenceServer
from llmbackend.frontends.generation import request
from llmbackend.frontends.generation.inferences import MANY_TOKENS
from llmbackend.frontends.openai import bodies
from tests.helpers.openai_live_server import openai_client
from tests.helpers.scripted_text import MODEL, SAY, host_of_scripts

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
PARIS, ROME = '{"city": "Paris é"}', '{"city":"Rome"}'


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'


TWO_CALLS = f"Let me see. {call(PARIS)}\n{call(ROME)}"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    with host_of_scripts(tmp_path_factory.mktemp("repository")) as host:
        yield host


@pytest.fixture(scope="module")
def client(host: InferenceServer) -> Iterator[openai.OpenAI]:
    with openai_client(host) as client:
        ask(client, "", tools=TOOLS, tool_choice="required", max_tokens=1)  # starts the engine's threads for grammars
        yield client


def ask(client: openai.OpenAI, script: str, **fields: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": SAY + script}]
    return client.chat.completions.create(**{"model": MODEL, "messages": messages, "temperature": 0, **fields})


def joined(chunks: list[Any]) -> dict[str, Any]:
    """A stream's deltas put together, as a message, with its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "function_call": ["", ""]}
    for choice in (chunk.choices[0] for chunk in chunks if chunk.choices):
        delta = choice.delta
        message["content"] += delta.content or ""
        message["reasoning"] += (delta.model_extra or {}).get("reasoning") or ""
        for part in delta.tool_calls or []:
            if part.index not in message["calls"]:
                assert part.type == "function" and part.id and part.function.name and part.function.arguments == ""
                message["calls"][part.index] = [part.id, part.function.name, ""]
            message["calls"][part.index][2] += part.function.arguments
        if delta.function_call:
            message["function_call"][0] += delta.function_call.name or ""
            message["function_call"][1] += delta.function_call.arguments
        message["finish_reason"] = choice.finish_reason
    return message


def as_joined(answer: Any) -> dict[str, Any]:
    """A whole answer in the form of `joined`."""
    choice = answer.choices[0]
    message, legacy = choice.message, choice.message.function_call
    return {
        "content": message.content or "",
        "reasoning": (message.model_extra or {}).get("reasoning") or "",
        "calls": {
            index: [one.id, one.function.name, one.function.arguments]
            for index, one in enumerate(message.tool_calls or [])
        },
        "function_call": [legacy.name, legacy.arguments] if legacy else ["", ""],
        "finish_reason": choice.finish_reason,
    }


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Two answers never have calls of the same ids."""
    return message | {"calls": [one[1:] for one in message["calls"].values()]}


def both(client: openai.OpenAI, script: str, **fields: Any) -> tuple[Any, dict[str, Any]]:
    """The whole answer, and its content in one form; the same request's stream is found equal to it."""
    headers = {"X-Request-Id": "7"}
    whole = ask(client, script, extra_headers=headers, **fields)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = list(ask(client, script, extra_headers=headers, **options, **fields))
    found = as_joined(whole)
    assert without_ids(joined(chunks)) == without_ids(found)
    for usage in (whole.usage, last.usage):
        usage.prompt_tokens_details = None  # the second request finds the first one's prompt in the cache
    assert last.usage == whole.usage
    assert {chunk.id for chunk in chunks} == {whole.id}
    return whole, found


def test_calls_beside_text(client: openai.OpenAI) -> None:
    whole, found = both(client, TWO_CALLS, tools=TOOLS)
    assert (found["content"], found["finish_reason"]) == ("Let me see. ", "tool_calls")
    assert [one[1:] for one in found["calls"].values()] == [["get_weather", PARIS], ["get_weather", ROME]]
    assert len({one[0] for one in found["calls"].values()}) == 2
    assert whole.choices[0].message.tool_calls[0].type == "function"


def test_calls_alone_leave_no_content(client: openai.OpenAI) -> None:
    whole, _ = both(client, call(PARIS), tools=TOOLS)
    assert whole.choices[0].message.content is None


def test_no_call_is_plain_text(client: openai.OpenAI) -> None:
    whole, found = both(client, "Hi <tool_c", tools=TOOLS)
    assert (whole.choices[0].message.tool_calls, found["content"]) == (None, "Hi <tool_c")
    assert found["finish_reason"] == "stop"


def test_special_tokens_that_are_shown_do_not_include_the_one_that_ends_the_answer(client: openai.OpenAI) -> None:
    """Whether or not the answer is parsed."""
    shown: dict[str, Any] = {"skip_special_tokens": False}
    for fields in ({}, {"tools": TOOLS}):
        _, found = both(client, "Hi", extra_body=shown, **fields)
        assert found["content"] == "Hi"
        _, found = both(client, "Hi", extra_body=shown | {"include_stop_str_in_output": True}, **fields)
        assert found["content"] == "Hi<eos>"


def test_without_tools_to_call_nothing_is_parsed(client: openai.OpenAI) -> None:
    choices: list[dict[str, Any]] = [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}]
    for fields in choices:
        _, found = both(client, TWO_CALLS, **fields)
        assert (found["content"], found["finish_reason"]) == (TWO_CALLS, "stop")


def test_half_a_call_at_length_is_shown_as_such(client: openai.OpenAI) -> None:
    length = len(TWO_CALLS[: TWO_CALLS.index("Rome") + 2].encode())
    _, found = both(client, TWO_CALLS, tools=TOOLS, max_tokens=length)
    assert [one[2] for one in found["calls"].values()] == [PARIS, '{"city":"Ro']
    assert found["finish_reason"] == "length"


def test_ids_of_calls_differ_even_if_the_client_sends_its_request_id_again(client: openai.OpenAI) -> None:
    def ids(**fields: Any) -> list[str]:
        answer = ask(client, TWO_CALLS, tools=TOOLS, **fields)
        assert not fields or answer.id == "chatcmpl-a"
        return [one.id for one in answer.choices[0].message.tool_calls]

    header, field = {"extra_headers": {"X-Request-Id": "a"}}, {"extra_body": {"request_id": "a"}}
    drawn = [id for fields in (header, header, field, field, {}, {}) for id in ids(**fields)]
    assert len(set(drawn)) == len(drawn) == 12


def test_choices_have_calls_of_their_own(client: openai.OpenAI) -> None:
    answer = ask(client, TWO_CALLS, tools=TOOLS, n=2)
    chunks = list(ask(client, TWO_CALLS, tools=TOOLS, n=2, stream=True))
    ids = [[one.id for one in choice.message.tool_calls] for choice in answer.choices]
    for index in range(2):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        ids.append([call.id for choice in choices for call in choice.delta.tool_calls or [] if call.id])
        assert choices[-1].finish_reason == "tool_calls"
    assert [len(one) for one in ids] == [2] * 4 and len({id for one in ids for id in one}) == 8


def test_at_most_one_call_without_parallel_ones(client: openai.OpenAI) -> None:
    all_calls, _ = both(client, TWO_CALLS, tools=TOOLS)
    whole, found = both(client, TWO_CALLS, tools=TOOLS, parallel_tool_calls=False)
    assert found["content"] == "Let me see. "
    assert whole.usage.completion_tokens < all_calls.usage.completion_tokens - len(ROME), "it did not end with its call"
    assert ([one[2] for one in found["calls"].values()], found["finish_reason"]) == ([PARIS], "tool_calls")


LARGE = {"type": "object", "properties": {"a": {"enum": [f"{n:063}" for n in range(4096)]}}, "required": ["a"]}


def test_a_schema_that_is_too_large_is_named(client: openai.OpenAI) -> None:
    """Not the input of the model that it comes into, whether a tool or the answer has it."""
    assert request.MAX_SAMPLING_JSON_BYTES == limits.MAX_SAMPLING_JSON_BYTES
    large = {"type": "function", "function": {"name": "large", "parameters": LARGE, "strict": True}}
    answer_form = {"type": "json_schema", "json_schema": {"name": "large", "schema": LARGE}}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("tools[1].function.parameters", {"tools": [*TOOLS, large]}),
        ("tools[1].function.parameters", {"tools": [*TOOLS, large], "tool_choice": "required", "stream": True}),
        ("response_format", {"response_format": answer_form}),
        ("response_format", {"response_format": answer_form, "tools": TOOLS}),
    ]
    for param, fields in requests:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, "", **fields)
        assert caught.value.param == param
        assert f"'{param}' has 27" in str(caught.value) and "at most 262144" in str(caught.value)


def test_a_schema_that_cannot_be_enforced_names_the_tool(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "contains": {"const": 1}}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    with pytest.raises(openai.BadRequestError, match="at /properties/a") as caught:
        ask(client, "x", tools=tools)
    assert caught.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_time"}}, "allowed"], ids=str
)
def test_a_call_that_must_be_made_is_made_after_the_reasoning(client: openai.OpenAI, choice: Any) -> None:
    """The model, which would say something else, is held to calls whose arguments follow the schema."""
    clock = {**WEATHER, "name": "get_time"}
    if choice == "allowed":
        allowed = [{"type": "function", "function": {"name": "get_time"}}]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": allowed}}
    tools = [*TOOLS, {"type": "function", "function": clock}]
    script = "<think>I could " + call(PARIS) + "</think>No!"
    _, found = both(client, script, tools=tools, tool_choice=choice, parallel_tool_calls=False, max_tokens=400)
    assert found["reasoning"] == "I could " + call(PARIS) and found["content"] == ""
    [(_, name, arguments)] = found["calls"].values()
    assert name == "get_time" or choice == "required"
    assert isinstance(json.loads(arguments)["city"], str) and found["finish_reason"] == "tool_calls"


def test_a_call_in_reasoning_without_an_end_is_made(client: openai.OpenAI) -> None:
    script = "<think>The form is <tool_call>. So: " + call(PARIS)
    _, found = both(client, script, tools=TOOLS)
    assert found["reasoning"] == "The form is <tool_call>. So: " and found["content"] == ""
    assert [one[1:] for one in found["calls"].values()] == [["get_weather", PARIS]]
    assert found["finish_reason"] == "tool_calls"


def test_strict_functions_follow_their_schema_when_they_are_called(client: openai.OpenAI) -> None:
    """Others are called with what the model writes, and text stays free."""
    strict = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    script = "Let me see. " + call('{"town": 1}')
    _, free = both(client, script, tools=TOOLS)
    assert [one[2] for one in free["calls"].values()] == ['{"town": 1}']
    _, held = both(client, script, tools=strict, max_tokens=300)
    assert held["content"].startswith("Let me see. ")
    arguments = next(iter(held["calls"].values()))[2]
    assert arguments.lstrip("{ ").startswith('"city"')
    _, plain = both(client, "No call.", tools=strict)
    assert plain["content"] == "No call."


def test_calls_or_an_answer_of_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"const": 5}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    _, answer = both(client, '{"n":5}', tools=TOOLS, response_format=form)
    assert (answer["content"], answer["calls"]) == ('{"n":5}', {})
    _, called = both(client, call(PARIS), tools=TOOLS, response_format=form)
    assert [one[2] for one in called["calls"].values()] == [PARIS]


def test_a_thinking_budget_ends_the_reasoning(client: openai.OpenAI) -> None:
    whole, found = both(client, "<think>one two three", extra_body={"thinking_token_budget": 5}, max_tokens=30)
    assert found["reasoning"] == "one t"
    assert whole.usage.completion_tokens_details.reasoning_tokens == len("<think>one t</think>")
    _, unlimited = both(client, "<think>one two three", extra_body={"thinking_token_budget": -1}, max_tokens=30)
    assert unlimited["reasoning"] == "one two three"


def test_the_older_form_is_answered_in_the_older_form(client: openai.OpenAI) -> None:
    _, found = both(client, call(PARIS), functions=[WEATHER])
    assert (found["function_call"], found["calls"]) == (["get_weather", PARIS], {})
    assert found["finish_reason"] == "function_call"


def test_a_whole_conversation_with_the_clients_stream_helper(client: openai.OpenAI) -> None:
    """An answer and the tool's result are sent back as they are."""
    messages: list[Any] = [{"role": "user", "content": SAY + TWO_CALLS}]
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS, temperature=0) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion().choices[0].message
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert answer.tool_calls is not None
    results = [{"role": "tool", "tool_call_id": one.id, "content": "sunny"} for one in answer.tool_calls]
    again = [*messages, answer, *results, {"role": "user", "content": SAY + "Take a hat."}]
    final = client.chat.completions.create(model=MODEL, messages=again, tools=TOOLS, temperature=0)
    assert final.choices[0].message.content == "Take a hat."


class Weather(BaseModel):
    city: str


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client, about its own `parsed`
def test_answers_parsed_by_the_clients_helpers_are_sent_back_as_they_are(client: openai.OpenAI) -> None:
    """What the helpers have parsed does not reach the template."""
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": SAY + call(PARIS)}], "temperature": 0}
    tools: list[Any] = [openai.pydantic_function_tool(Weather, name="get_weather")]
    called = client.chat.completions.parse(tools=tools, **asked).choices[0].message
    asked["messages"] = [{"role": "user", "content": SAY + PARIS}]
    parsed = client.chat.completions.parse(response_format=Weather, **asked).choices[0].message
    assert called.tool_calls is not None
    assert called.tool_calls[0].function.parsed_arguments == parsed.parsed == Weather(city="Paris é")
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "sunny"}

    def prompt(*answers: Any) -> str:
        messages = [*asked["messages"], answers[0], result, answers[1], {"role": "user", "content": SAY + "A hat."}]
        answer = ask(client, "", messages=messages, tools=TOOLS, extra_body={"return_prompt_text": True})
        assert answer.choices[0].message.content == "A hat."
        return str(answer.prompt_text)

    dumped = [answer.model_dump() for answer in (called, parsed)]
    del dumped[0]["tool_calls"][0]["function"]["parsed_arguments"], dumped[1]["parsed"]
    assert prompt(called, parsed) == prompt(*dumped)


def test_reasoning(client: openai.OpenAI) -> None:
    script = f"<think>\nhm, é\n</think>\n\nYes. {call(PARIS)}"
    whole, found = both(client, script, tools=TOOLS)
    message = whole.choices[0].message
    assert found["reasoning"].strip() == "hm, é" and message.reasoning == message.reasoning_content
    assert (found["content"].strip(), [one[2] for one in found["calls"].values()]) == ("Yes.", [PARIS])
    num_reasoning = whole.usage.completion_tokens_details.reasoning_tokens
    assert num_reasoning == len("<think>\nhm, é\n</think>".encode())
    _, hidden = both(client, script, tools=TOOLS, extra_body={"include_reasoning": False})
    assert without_ids(hidden) == without_ids(found) | {"reasoning": ""}


def test_reasoning_that_the_prompt_has_opened(client: openai.OpenAI) -> None:
    thinking = {"extra_body": {"chat_template_kwargs": {"open_reasoning": True}}}
    whole, found = both(client, "hm</think>Yes.", **thinking)
    assert (found["reasoning"], found["content"]) == ("hm", "Yes.")
    assert whole.usage.completion_tokens_details.reasoning_tokens == len("hm</think>")
    _, found = both(client, "Yes.", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert (found["reasoning"], found["content"]) == ("", "Yes.")


def test_reasoning_at_length_has_no_content(client: openai.OpenAI) -> None:
    whole, found = both(client, "<think>one two three", max_tokens=11)
    assert (found["reasoning"], whole.choices[0].message.content) == ("one ", None)
    assert found["finish_reason"] == "length"


def test_logprobs_and_token_ids_of_a_parsed_stream_are_those_of_the_whole(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "tools": TOOLS,
        "logprobs": True,
        "extra_body": {"return_token_ids": True},
    }
    whole = ask(client, TWO_CALLS, **fields)
    choices = [chunk.choices[0] for chunk in ask(client, TWO_CALLS, stream=True, **fields)]
    positions = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert positions == whole.choices[0].logprobs.content and len(positions) == whole.usage.completion_tokens
    ids = [token for choice in choices for token in choice.model_extra.get("token_ids", [])]
    assert ids == whole.choices[0].token_ids


@pytest.mark.parametrize(("length", "is_long"), [(20, False), (MANY_TOKENS, True)])
def test_only_long_answers_are_read_and_rendered_in_a_thread(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, length: int, is_long: bool
) -> None:
    seen: dict[str, str] = {}

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            seen[name] = threading.current_thread().name
            return real(*arguments)

        monkeypatch.setattr(owner, name, watched)

    watch(bodies.WholeAnswer, "add")
    watch(bodies.WholeAnswer, "_json")
    _, found = both(client, "x" * length, tools=TOOLS, logprobs=True)
    assert found["content"] == "x" * length
    assert [name.startswith("large-requests") for name in (seen["add"], seen["_json"])] == [is_long, is_long]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {**WEATHER, "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": TOOLS * 2}, "tools[1].function.name"),
        ({"tools": TOOLS * 129}, "tools"),
        ({"tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
        ),
        ({"functions": [WEATHER], "tools": TOOLS}, "functions"),
        ({"functions": [WEATHER], "function_call": {"name": "other"}}, "function_call"),
        ({"extra_body": {"thinking_token_budget": -2}}, "thinking_token_budget"),
        ({"extra_body": {"documents": [{"text": "a"}]}}, "documents"),
        ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages[0].mood"),
    ],
)
def test_what_is_wrong_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "x", **fields)
    assert caught.value.param == param and param in caught.value.message


def test_logprobs_have_the_bytes_of_tokens_inside_a_character(client: openai.OpenAI) -> None:
    said = "aé🌦b"
    chat = ask(client, said, logprobs=True, top_logprobs=2)
    positions = chat.choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in positions).decode() == said + "<eos>"
    assert [one.bytes for one in positions[3:7]] == [[byte] for byte in "🌦".encode()]
    assert all(one.top_logprobs[0].bytes == one.bytes for one in positions)
    prompt = f"{SAY}{said}\x1c"
    whole = client.completions.create(model=MODEL, prompt=prompt, temperature=0, logprobs=1)
    assert whole.choices[0].text == said
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.text_offset == [0, 1, 1, 2, 2, 2, 2, 3, 4]
    stream = client.completions.create(model=MODEL, prompt=prompt, temperature=0, logprobs=1, stream=True)
    pieces = [chunk.choices[0].logprobs for chunk in stream if chunk.choices]
    offsets = [offset for piece in pieces if piece is not None for offset in piece.text_offset or ()]
    assert offsets == whole.choices[0].logprobs.text_offset
