"""Checks of the fields of a message request; most also apply to token counting.

Used by the table. Independent of which fields exist. Invariant: a check observes a difference between two values.
"""

from __future__ import annotations

import json
from typing import Any, Final

from ..asking import BYTES, DEMO, REASONER, said
from ..sampling import as_greedy, changes_text
from ..table import Row, promise
from .asking import Messages

WEATHER: Final[dict[str, Any]] = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
_CLOCK = WEATHER | {"name": "get_time", "description": "Get the time in a city."}
_QUESTION: Final[dict[str, Any]] = {"messages": said("What is the weather in Paris?"), "max_tokens": 60}
_HELLO: Final[dict[str, Any]] = {"messages": said("Hello!"), "max_tokens": 60, "tools": [WEATHER, _CLOCK]}
_SCHEMA: Final = {"enum": ["yes", "no"]}
_F: Final = {"name": "f", "input_schema": {"const": {}}}
_THINKING: Final[dict[str, Any]] = {"model": REASONER, "max_tokens": 300, "tools": [_F], "tool_choice": {"type": "any"}}
"""The mock model ends an answer early, unless it must call."""


@promise("answers name their model; an unknown one is a 404")
def _model(api: Messages) -> None:
    assert (api.ask().json["model"], api.ask(model=BYTES).json["model"]) == (DEMO, BYTES)
    assert api.client.post("/v1/messages", json=api.base | {"model": "no such model"}).status_code == 404


@promise("another conversation gets another answer")
def _messages(api: Messages) -> None:
    assert api.ask().text != api.ask(messages=said("What is a seed?")).text
    parts = [{"type": "text", "text": "What is a KV cache?"}]
    assert api.ask(messages=[{"role": "user", "content": parts}]).text == api.ask().text


@promise("at most this many tokens are generated")
def _max_tokens(api: Messages) -> None:
    for most in (1, 5):
        answer = api.ask(max_tokens=most)
        assert (answer.usage["output_tokens"], answer.json["stop_reason"]) == (most, "max_tokens")


@promise("the prompt begins with it; text or blocks")
def _system(api: Messages) -> None:
    told = api.ask(system="Answer in one word.")
    assert told.prompt_tokens > api.ask().prompt_tokens
    assert api.ask(system=[{"type": "text", "text": "Answer in one word."}]).text == told.text


@promise("the text ends before one of them, and the answer says which")
def _stop_sequences(api: Messages) -> None:
    text = api.ask().text
    stopped = api.ask(stop_sequences=["no such text", text[5:8]])
    assert stopped.text == text[: text.index(text[5:8])]
    assert (stopped.json["stop_reason"], stopped.json["stop_sequence"]) == ("stop_sequence", text[5:8])


@promise("events instead of one answer, with the same blocks")
def _stream(api: Messages) -> None:
    whole, events = api.ask(stream=False), [event for event in api.events() if event["type"] != "ping"]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(texts) == whole.text and len(texts) > 1
    (last,) = (event for event in events if event["type"] == "message_delta")
    assert last["delta"]["stop_reason"] == whole.json["stop_reason"]


@promise("the model may call them, and the answer has its calls")
def _tools(api: Messages) -> None:
    assert api.ask(**_QUESTION).calls == []
    answer = api.ask(**_QUESTION, tools=[WEATHER])
    assert (answer.calls, answer.json["stop_reason"]) == (["get_weather"], "tool_use")


@promise("none: no call; any: only calls; a tool: a call of it; disable_parallel_tool_use: at most one")
def _tool_choice(api: Messages) -> None:
    for kind in ("auto", "none"):
        assert api.ask(**_HELLO, tool_choice={"type": kind}).calls == []
    assert api.ask(**_HELLO, tool_choice={"type": "any"}).calls
    assert api.ask(**_HELLO, tool_choice={"type": "tool", "name": "get_time"}).calls == ["get_time"]
    short: dict[str, Any] = _THINKING | {"thinking": {"type": "enabled", "budget_tokens": 3}}
    one = api.ask(**short | {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}})
    assert one.calls == ["f"] and one.json["stop_reason"] == "tool_use"


@promise("thinking in a block with its signature; its budget; disabled: none")
def _thinking(api: Messages) -> None:
    for budget in (3, 5):
        thought = api.ask(**_THINKING, thinking={"type": "enabled", "budget_tokens": budget})
        (block,) = thought.of("thinking")
        assert len(block["thinking"]) == budget and block["signature"]
    hidden = api.ask(**_THINKING, thinking={"type": "enabled", "budget_tokens": 3, "display": "omitted"})
    assert hidden.of("thinking")[0]["thinking"] == ""
    assert not api.ask(**_THINKING, thinking={"type": "disabled"}).of("thinking")


@promise("format: the answer is JSON of the schema; effort: changes the prompt if the chat template reads it")
def _output_config(api: Messages) -> None:
    form = {"type": "json_schema", "schema": _SCHEMA}
    assert json.loads(api.ask(output_config={"format": form}).text) in ("yes", "no")
    counts = [api.ask(model=REASONER, output_config={"effort": effort}).prompt_tokens for effort in ("low", "medium")]
    assert counts[1] - counts[0] == len("medium") - len("low")


@promise("no effect: every prefix is cached; the usage says how much of the prompt was cached")
def _cache_control(api: Messages) -> None:
    long = "One prefix of messages that is long enough for some blocks of the cache. " * 8
    control = {"type": "ephemeral"}
    first = api.ask(messages=said(long), cache_control=control)
    second = api.ask(messages=said(long), cache_control=control)
    assert (first.usage["cache_read_input_tokens"] or 0) == 0 < second.usage["cache_read_input_tokens"]
    assert first.prompt_tokens == second.prompt_tokens and first.text == second.text


@promise("variables of the chat template")
def _chat_template_kwargs(api: Messages) -> None:
    more = api.ask(model=REASONER, chat_template_kwargs={"documents": [{"text": "three"}]}).prompt_tokens
    assert more == api.ask(model=REASONER).prompt_tokens + len("three")


@promise("as output_config.format, in the older form")
def _output_format(api: Messages) -> None:
    form = {"type": "json_schema", "schema": _SCHEMA}
    assert json.loads(api.ask(output_format=form).text) in ("yes", "no")
    assert api.refusal(output_format=form, output_config={"format": form})


@promise("the same seed gives the same text, another seed another text")
def _seed(api: Messages) -> None:
    texts = [api.ask(temperature=2, seed=seed).text for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


ROWS: Final[dict[str, Row]] = {
    "output_format": _output_format,
    "seed": _seed,
    "model": _model,
    "messages": _messages,
    "max_tokens": _max_tokens,
    "system": _system,
    "stop_sequences": _stop_sequences,
    "stream": _stream,
    "tools": _tools,
    "tool_choice": _tool_choice,
    "thinking": _thinking,
    "output_config": _output_config,
    "cache_control": _cache_control,
    "temperature": changes_text("temperature", 0, 2, seed=7),
    "top_p": as_greedy("top_p", 0.001),
    "top_k": as_greedy("top_k", 1),
    "chat_template_kwargs": _chat_template_kwargs,
}


@promise("the count equals that in a message's usage")
def _counted_messages(api: Messages) -> None:
    count = api.count()
    assert count == Messages(api.client).ask(max_tokens=1).prompt_tokens < api.count(messages=said("Why? " * 20))


@promise("its tokens are counted")
def _counted_system(api: Messages) -> None:
    assert api.count(system="Answer in one word.") > api.count()


@promise("their tokens are counted")
def _counted_tools(api: Messages) -> None:
    assert api.count(tools=[WEATHER]) > api.count()


@promise("the model's tokenizer counts")
def _counted_model(api: Messages) -> None:
    assert api.count(model=BYTES) > api.count()


@promise("none: tools are omitted, as from a message's prompt")
def _counted_tool_choice(api: Messages) -> None:
    assert api.count(tools=[WEATHER], tool_choice={"type": "auto"}) == api.count(tools=[WEATHER])


@promise("an effort changes the prompt if the chat template reads it")
def _counted_output_config(api: Messages) -> None:
    counts = [api.count(model=REASONER, output_config={"effort": effort}) for effort in ("low", "medium")]
    assert counts[1] - counts[0] == len("medium") - len("low")


@promise("accepted as in a message; does not change this model's prompt")
def _counted_thinking(api: Messages) -> None:
    assert api.count(model=REASONER, thinking={"type": "enabled", "budget_tokens": 1024}) == api.count(model=REASONER)
    assert "thinking" in api.refusal(thinking={"type": "no such"})["message"]


@promise("accepted as in a message; does not change the count")
def _counted_cache_control(api: Messages) -> None:
    assert api.count(cache_control={"type": "ephemeral"}) == api.count()
    assert "cache_control" in api.refusal(cache_control={"type": "no such"})["message"]


@promise("accepted as in a message; does not change the prompt")
def _counted_output_format(api: Messages) -> None:
    assert api.count(output_format={"type": "json_schema", "schema": _SCHEMA}) == api.count()
    assert "output_format" in api.refusal(output_format={"type": "no such"})["message"]


@promise("variables of the chat template")
def _counted_chat_template_kwargs(api: Messages) -> None:
    more = api.count(model=REASONER, chat_template_kwargs={"documents": [{"text": "three"}]})
    assert more == api.count(model=REASONER) + len("three")


COUNT_ROWS: Final[dict[str, Row]] = {
    "output_format": _counted_output_format,
    "chat_template_kwargs": _counted_chat_template_kwargs,
    "model": _counted_model,
    "messages": _counted_messages,
    "system": _counted_system,
    "tools": _counted_tools,
    "tool_choice": _counted_tool_choice,
    "output_config": _counted_output_config,
    "thinking": _counted_thinking,
    "cache_control": _counted_cache_control,
}
