"""Checks of the fields that determine an answer's form: structure, tools, reasoning, log probabilities."""

from __future__ import annotations

import json
from typing import Any, Final

from ..asking import REASONER
from ..table import Row, promise
from .asking import Answer, Responses

_WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
_CLOCK = _WEATHER | {"name": "get_time", "description": "Get the time in a city."}
_CUSTOM: Final = {"type": "custom", "name": "patch", "description": "Change a file."}
_DIGITS: Final = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}"}
_QUESTION: Final[dict[str, Any]] = {"input": "What is the weather in Paris?", "max_output_tokens": 60}
_HELLO: Final[dict[str, Any]] = {"input": "Hello!", "max_output_tokens": 60, "tools": [_WEATHER, _CLOCK]}
_SCHEMA: Final = {"enum": ["yes", "no"]}
_THINKING: Final[dict[str, Any]] = {"model": REASONER, "ignore_eos": True, "max_output_tokens": 40}


@promise("the model may call them: functions, and custom tools, whose input may have a grammar")
def _tools(api: Responses) -> None:
    assert api.ask(**_QUESTION, tools=[]).calls == []
    assert api.ask(**_QUESTION, tools=[_WEATHER]).calls == ["get_weather"]
    for tool, valid in ((_CUSTOM, str), (_CUSTOM | {"format": _DIGITS}, int)):
        choice = {"type": "custom", "name": "patch"}
        answer = api.ask(input="Hello!", tools=[tool], tool_choice=choice, max_output_tokens=200)
        (call,) = answer.of("custom_tool_call")
        assert call["name"] == "patch" and valid(call["input"])


@promise("none: no call; required: only calls; a name: that tool; allowed tools: one of those")
def _tool_choice(api: Responses) -> None:
    assert api.ask(**_HELLO, tool_choice="auto").calls == api.ask(**_HELLO, tool_choice="none").calls == []
    assert api.ask(**_HELLO, tool_choice="required").calls
    named = {"type": "function", "name": "get_time"}
    assert api.ask(**_HELLO, tool_choice=named).calls == ["get_time"]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    assert api.ask(**_HELLO, tool_choice=allowed).calls == ["get_time"]


_SEVERAL: Final[dict[str, Any]] = {
    "model": REASONER,
    "tool_choice": "required",
    "max_output_tokens": 300,
    "tools": [{"type": "function", "name": "f", "parameters": {"const": {}}, "strict": False}],
    "input": "What is a KV cache?",
    "thinking_token_budget": 2,
}


@promise("false: at most one call")
def _parallel_tool_calls(api: Responses) -> None:
    several = api.ask(**_SEVERAL, parallel_tool_calls=True, ignore_eos=True).calls
    assert len(several) > 1 and len(api.ask(**_SEVERAL, parallel_tool_calls=False).calls) == 1


@promise("at most this many calls")
def _max_tool_calls(api: Responses) -> None:
    asked: dict[str, Any] = _SEVERAL | {"temperature": 2, "seed": 2}
    assert [len(api.ask(**asked, max_tool_calls=most).calls) for most in (1, 2, 3)] == [1, 2, 3]


@promise("its format: the answer is JSON, following the schema if given")
def _text(api: Responses) -> None:
    plain = api.ask(text={"format": {"type": "text"}})
    assert plain.text == api.ask().text and not plain.text.startswith("{")
    form = {"type": "json_schema", "name": "one", "schema": _SCHEMA, "strict": True}
    assert json.loads(api.ask(text={"format": form}).text) in ("yes", "no")
    assert api.ask(text={"format": {"type": "json_object"}}).text[:1] == "{"


@promise("items of reasoning; an effort changes the prompt if the chat template reads it")
def _reasoning(api: Responses) -> None:
    counts = [
        api.ask(model=REASONER, reasoning={"effort": effort}).usage["input_tokens"] for effort in ("low", "medium")
    ]
    assert counts[1] - counts[0] == len("medium") - len("low")
    assert api.ask(reasoning={"effort": "low"}).text == api.ask().text
    assert api.refusal(reasoning={"summary": "detailed"})["param"] == "reasoning.summary"
    (item,) = api.ask(**_THINKING).of("reasoning")
    assert item["content"][0]["text"] and item["summary"] == []


@promise("log probabilities of the text, and sealed reasoning, only if requested")
def _include(api: Responses) -> None:
    assert _logprobs(api.ask()) == []
    assert _logprobs(api.ask(include=["message.output_text.logprobs"]))
    plain, sealed = (api.ask(**_THINKING, include=more) for more in ([], ["reasoning.encrypted_content"]))
    assert not plain.of("reasoning")[0].get("encrypted_content")
    assert sealed.of("reasoning")[0]["encrypted_content"]


def _logprobs(answer: Answer) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = answer.of("message")[0]["content"][0].get("logprobs") or []
    return entries


@promise("this many most likely tokens for each token")
def _top_logprobs(api: Responses) -> None:
    for top in (1, 3):
        entries = _logprobs(api.ask(include=["message.output_text.logprobs"], top_logprobs=top))
        assert entries and all(len(entry["top_logprobs"]) == top for entry in entries)


@promise("events instead of one answer; the last one has the answer")
def _stream(api: Responses) -> None:
    whole, events = api.ask(stream=False), api.events()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created" and len(events) > 6
    last = events[-1]["response"]
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == whole.text
    assert [item["type"] for item in last["output"]] == [item["type"] for item in whole.items]
    assert last["usage"]["output_tokens"] == whole.usage["output_tokens"]


@promise("include_obfuscation: only false is accepted")
def _stream_options(api: Responses) -> None:
    assert api.events(stream_options={"include_obfuscation": False})[-1]["type"] in (
        "response.completed",
        "response.incomplete",
    )
    error = api.refusal(stream=True, stream_options={"include_obfuscation": True})
    assert error["param"].startswith("stream_options")


@promise("the answer also has the prompt and the output as text and tokens; not with background")
def _response_messages(api: Responses) -> None:
    answer = api.ask(enable_response_messages=True)
    ((prompt,), (written,)) = (answer.json[name] for name in ("input_messages", "output_messages"))
    assert "KV cache" in prompt["message"] and written["message"] == answer.text
    assert len(prompt["tokens"]) == answer.usage["input_tokens"]
    assert len(written["tokens"]) == answer.usage["output_tokens"]
    assert "input_messages" not in api.ask().json
    assert api.refusal(enable_response_messages=True, background=True)["param"] == "enable_response_messages"


ANSWERS: dict[str, Row] = {
    "enable_response_messages": _response_messages,
    "tools": _tools,
    "tool_choice": _tool_choice,
    "parallel_tool_calls": _parallel_tool_calls,
    "max_tool_calls": _max_tool_calls,
    "text": _text,
    "reasoning": _reasoning,
    "include": _include,
    "top_logprobs": _top_logprobs,
    "stream": _stream,
    "stream_options": _stream_options,
}
