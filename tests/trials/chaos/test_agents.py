"""Answers of agents are judged by every part of every choice, and by what their requests asked for."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from trials.chaos.agents.requests import TOOLS, make_agent_specs
from trials.chaos.agents.validity import validity
from trials.chaos.clients.agent_api import ChatIdentity, events
from trials.chaos.judge import judge, judge_prefix
from trials.chaos.outcome import Collector, Outcome, StreamFailed
from trials.chaos.specs import StreamSpec

WHOLE = Outcome(parts=(("0 content", "abc"), ("0 finish_reason", "stop"), ("1 content", "xyz"), ("usage", "{}")))


def with_part(name: str, text: str) -> Outcome:
    return replace(WHOLE, parts=tuple(sorted((dict(WHOLE.parts) | {name: text}).items())))


def spec(**body: Any) -> StreamSpec:
    return StreamSpec(0, "agent", "agents", "", json.dumps(body), True, None)


def chunk(index: int, **delta: Any) -> dict[str, Any]:
    return {"id": "a", "created": 1, "model": "m", "choices": [{"index": index, "delta": delta, "finish_reason": None}]}


@pytest.mark.parametrize("name, text", [("0 content", "abd"), ("1 content", "xy"), ("0 finish_reason", "length")])
def test_each_part_counts(name: str, text: str) -> None:
    assert judge(WHOLE, with_part(name, text)).total > 0
    assert judge(WHOLE, WHOLE).is_clean


def test_comments_of_a_stream_that_waits_are_passed_over() -> None:
    async def read() -> list[Any]:
        answer = httpx.Response(200, content=b': ping\n\ndata: {"id": "a"}\n\n: ping\n\ndata: [DONE]\n\n')
        return [event async for event in events(answer)]

    assert asyncio.run(read()) == [{"id": "a"}]


def test_a_part_that_nobody_asked_for_counts() -> None:
    assert judge(WHOLE, with_part("0 reasoning", "hm")).repeated > 0


def test_a_stream_that_was_left_begins_like_the_undisturbed_one() -> None:
    assert judge_prefix(WHOLE, Outcome(parts=(("0 content", "ab"), ("1 content", "x")))).is_clean
    assert judge_prefix(WHOLE, Outcome(parts=(("0 content", "b"),))).total == 1
    assert judge_prefix(WHOLE, Outcome(parts=(("2 content", "a"),))).total == 1


def test_parts_are_put_together_however_they_are_cut() -> None:
    seen, whole = Collector(), Collector()
    stream, document = ChatIdentity(), ChatIdentity()
    call = {"index": 0, "id": "call_1", "function": {"name": "f", "arguments": '{"a"'}}
    for one in (chunk(1, content="x"), chunk(0, content="a"), chunk(1, content="y"), chunk(0, tool_calls=[call])):
        seen.add(stream.piece(one))
    seen.add(stream.piece(chunk(0, tool_calls=[{"index": 0, "function": {"arguments": ":1}"}}])))
    message = {"content": "a", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a":1}'}}]}
    choices = [{"index": 0, "message": message}, {"index": 1, "message": {"content": "xy"}}]
    whole.add(document.piece({"id": "b", "created": 2, "model": "m", "choices": choices}))
    assert seen.outcome() == whole.outcome()


@pytest.mark.parametrize("change", [{"id": "b"}, {"created": 2}, {"model": "n"}])
def test_an_identity_that_changes_is_an_error(change: dict[str, Any]) -> None:
    identity = ChatIdentity()
    identity.piece(chunk(0, content="a"))
    with pytest.raises(StreamFailed, match=next(iter(change))):
        identity.piece(chunk(0, content="b") | change)


def test_the_id_of_a_call_must_stay() -> None:
    identity = ChatIdentity()
    identity.piece(chunk(0, tool_calls=[{"index": 0, "id": "call_1", "function": {"name": "f"}}]))
    with pytest.raises(StreamFailed, match=r"id of call 0\.0"):
        identity.piece(chunk(0, tool_calls=[{"index": 0, "id": "call_2", "function": {"arguments": "{}"}}]))


def answered(**parts: str) -> Outcome:
    named = {"usage": "{}"} | {f"0 {name}": text for name, text in parts.items()}
    return Outcome(parts=tuple(sorted(named.items())))


def test_what_a_schema_asks_for() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked = spec(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert validity(asked, answered(content='{"a": 1}', finish_reason="stop")).valid == 1
    for content in ('{"a": "1"}', '{"a": 1', "{}"):
        assert validity(asked, answered(content=content, finish_reason="stop")).complaint
    assert validity(asked, answered(content='{"a', finish_reason="length")).truncated == 1


def test_what_tools_ask_for() -> None:
    asked = spec(tools=list(TOOLS), tool_choice="required")
    call = {"call 0 name": "get_weather", "call 0 arguments": '{"city": "Rome"}'}
    assert validity(asked, answered(**call, finish_reason="tool_calls")).valid == 1
    assert validity(asked, answered(**call, finish_reason="stop")).complaint
    assert validity(asked, answered(content="no", finish_reason="stop")).complaint
    wrong = call | {"call 0 arguments": '{"town": "Rome"}'}
    assert validity(asked, answered(**wrong, finish_reason="tool_calls")).complaint


def test_a_free_call_that_the_model_breaks_off_is_no_reason_to_end() -> None:
    asked = spec(tools=list(TOOLS))
    whole = {"call 0 name": "get_weather", "call 0 arguments": '{"city": "Rome"}'}
    broken = whole | {"call 0 arguments": '{"city": "Ro'}
    assert validity(asked, answered(**broken, finish_reason="stop")).valid == 1
    assert validity(asked, answered(**whole, finish_reason="stop")).complaint
    assert validity(asked, answered(finish_reason="tool_calls")).complaint


@pytest.mark.parametrize("body", [{"n": 2}, {"logprobs": True}, {"prompt_logprobs": 1}, {"thinking_token_budget": 4}])
def test_what_was_asked_for_beside_must_be_there(body: dict[str, Any]) -> None:
    assert validity(spec(**body), answered(content="a", finish_reason="stop")).complaint


def test_requests_are_the_same_for_a_seed() -> None:
    assert (
        make_agent_specs(1, 60, "a", ("b",)) == make_agent_specs(1, 60, "a", ("b",)) != make_agent_specs(2, 60, "a", ())
    )
    bodies = [one.sampling for one in make_agent_specs(1, 60, "a", ("b",))]
    assert {body["model"] for body in bodies} == {"a", "b"}
    assert {1, 3} == {body.get("n", 1) for body in bodies}
