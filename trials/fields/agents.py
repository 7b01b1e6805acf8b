"""Checks of the fields that agents need: tools, reasoning, the client's own ids."""

from __future__ import annotations

from typing import Any, Final

from .asking import DEMO, REASONER, Answer, Endpoint, JsonObject, said
from .table import Row, promise

_WEATHER: Final[JsonObject] = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
_CLOCK: Final[JsonObject] = {**_WEATHER, "name": "get_time", "description": "Get the time in a city."}
_QUESTION: Final[JsonObject] = {"messages": said("What is the weather in Paris?"), "max_tokens": 60}
_TOOLS: Final = [{"type": "function", "function": _WEATHER}]


def _called(answer: Answer) -> list[str]:
    return [one["function"]["name"] for one in answer.choices[0]["message"].get("tool_calls", ())]


@promise("the model may call them, and the answer has its calls")
def _tools(api: Endpoint) -> None:
    assert _called(api.ask(**_QUESTION, tools=[])) == []
    answer = api.ask(**_QUESTION, tools=_TOOLS)
    assert (_called(answer), answer.finish_reason) == (["get_weather"], "tool_calls")


@promise("none: no call; required: only calls; a name: a call of that function")
def _tool_choice(api: Endpoint) -> None:
    hello = {"messages": said("Hello!"), "max_tokens": 60, "tools": [*_TOOLS, {"type": "function", "function": _CLOCK}]}
    assert _called(api.ask(**hello, tool_choice="auto")) == _called(api.ask(**hello, tool_choice="none")) == []
    assert _called(api.ask(**hello, tool_choice="required"))
    named = {"type": "function", "function": {"name": "get_time"}}
    assert _called(api.ask(**hello, tool_choice=named)) == ["get_time"]


@promise("false: at most one call")
def _parallel_tool_calls(api: Endpoint) -> None:
    asked: JsonObject = {"model": REASONER, "thinking_token_budget": 2, "tool_choice": "required", "max_tokens": 300}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"const": {}}}}]
    several = api.ask(**asked, tools=tools, parallel_tool_calls=True, ignore_eos=True)
    one = api.ask(**asked, tools=tools, parallel_tool_calls=False)
    assert len(_called(several)) > 1 and len(_called(one)) == 1


@promise("as tools, in the older form, which the answer also has")
def _functions(api: Endpoint) -> None:
    answer = api.ask(**_QUESTION, functions=[_WEATHER])
    assert answer.choices[0]["message"]["function_call"]["name"] == "get_weather"
    assert answer.finish_reason == "function_call" and "function_call" not in api.ask().choices[0]["message"]


@promise("none: no call; a name: a call of that function")
def _function_call(api: Endpoint) -> None:
    assert "function_call" not in api.ask(**_QUESTION, functions=[_WEATHER], function_call="none").choices[0]["message"]
    asked: dict[str, Any] = {"messages": said("Hello!"), "max_tokens": 60, "functions": [_WEATHER, _CLOCK]}
    message = api.ask(**asked, function_call={"name": "get_time"}).choices[0]["message"]
    assert message["function_call"]["name"] == "get_time"


def _prompt_tokens(api: Endpoint, **fields: Any) -> int:
    count: int = api.ask(model=REASONER, **fields).usage["prompt_tokens"]
    return count


@promise("changes the prompt if the chat template reads it; otherwise no effect")
def _reasoning_effort(api: Endpoint) -> None:
    low, medium = (_prompt_tokens(api, reasoning_effort=value) for value in ("low", "medium"))
    assert medium - low == len("medium") - len("low")
    counts = {api.ask(model=DEMO, **fields).usage["prompt_tokens"] for fields in ({}, {"reasoning_effort": "low"})}
    assert len(counts) == 1


@promise("whether the answer includes the reasoning")
def _include_reasoning(api: Endpoint) -> None:
    shown, hidden = (api.ask(model=REASONER, ignore_eos=True, include_reasoning=value) for value in (True, False))
    assert shown.choices[0]["message"]["reasoning"] and "reasoning" not in hidden.choices[0]["message"]
    assert shown.usage["completion_tokens_details"] == hidden.usage["completion_tokens_details"]


@promise("the reasoning ends after this many tokens, with its end marker")
def _thinking_token_budget(api: Endpoint) -> None:
    for budget in (3, 5):
        answer = api.ask(model=REASONER, thinking_token_budget=budget, max_tokens=40, ignore_eos=True)
        details = answer.usage["completion_tokens_details"]
        assert details["reasoning_tokens"] == budget + len("</think>")


@promise("they are in the prompt if the chat template reads them; otherwise they are refused")
def _documents(api: Endpoint) -> None:
    assert _prompt_tokens(api, documents=[{"text": "one"}]) == _prompt_tokens(api) + len("one")
    assert api.refusal(model=DEMO, documents=[{"text": "one"}])["param"] == "documents"


@promise("variables of the chat template")
def _chat_template_kwargs(api: Endpoint) -> None:
    more = _prompt_tokens(api, chat_template_kwargs={"documents": [{"text": "three"}]})
    assert more == _prompt_tokens(api) + len("three")


@promise("part of the response's id")
def _request_id(api: Endpoint) -> None:
    ids = [api.ask(request_id=value).json["id"] for value in ("mine", "yours")]
    prefix = "chatcmpl" if api.is_chat else "cmpl"
    assert ids == [f"{prefix}-mine", f"{prefix}-yours"]


AGENTS: dict[str, Row] = {"request_id": _request_id}
CHAT_AGENTS: dict[str, Row] = {
    "tools": _tools,
    "tool_choice": _tool_choice,
    "parallel_tool_calls": _parallel_tool_calls,
    "functions": _functions,
    "function_call": _function_call,
    "reasoning_effort": _reasoning_effort,
    "include_reasoning": _include_reasoning,
    "thinking_token_budget": _thinking_token_budget,
    "documents": _documents,
    "chat_template_kwargs": _chat_template_kwargs,
}
