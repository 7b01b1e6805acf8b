"""Responses and messages are read event by event: what must not change, and what an answer must have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trials.chaos.agents.api_requests import API_PROTOCOLS, make_api_specs
from trials.chaos.agents.api_validity import api_validity
from trials.chaos.clients import messages_api, responses_api
from trials.chaos.outcome import Collector, Outcome, Piece, StreamFailed
from trials.chaos.specs import StreamSpec

TEXT: dict[str, Any] = {"type": "output_text", "text": "abc", "annotations": [], "logprobs": []}
ITEM: dict[str, Any] = {"type": "message", "id": "msg_1", "role": "assistant", "content": [TEXT]}
RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "created_at": 1,
    "model": "m",
    "status": "completed",
    "output": [ITEM],
    "incomplete_details": None,
    "usage": {"input_tokens": 4, "output_tokens": 3},
}
EVENTS: list[dict[str, Any]] = [
    {"type": "response.created", "response": RESPONSE | {"output": [], "status": "in_progress"}},
    {"type": "response.output_item.added", "output_index": 0, "item": ITEM | {"content": []}},
    {"type": "response.output_text.delta", "output_index": 0, "item_id": "msg_1", "delta": "ab"},
    {"type": "response.output_text.delta", "output_index": 0, "item_id": "msg_1", "delta": "c"},
    {"type": "response.output_item.done", "output_index": 0, "item": ITEM},
    {"type": "response.completed", "response": RESPONSE},
]


def read(events: list[dict[str, Any]]) -> Outcome:
    reading, seen = responses_api._Reading(), Collector()
    for number, event in enumerate(events):
        seen.add(reading.piece({"sequence_number": number} | event))
    return seen.outcome()


def test_a_stream_of_events_is_the_whole_response() -> None:
    whole = Collector()
    whole.add(responses_api._Reading().whole(RESPONSE))
    assert read(EVENTS) == whole.outcome()


@pytest.mark.parametrize(
    ("place", "change", "complaint"),
    [
        (3, {"sequence_number": 2}, "event 2 came after 2"),
        (3, {"sequence_number": 4}, "event 4 came after 2"),
        (3, {"item_id": "msg_2"}, "id of item 0"),
        (3, {"delta": "C"}, "its events had"),
        (5, {"response": RESPONSE | {"created_at": 2}}, "created_at"),
        (5, {"response": RESPONSE | {"output": []}}, "its events had"),
        (3, {"type": "error", "message": "no"}, "no"),
    ],
)
def test_what_must_not_happen_in_a_response(place: int, change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(StreamFailed, match=complaint):
        read([*EVENTS[:place], EVENTS[place] | change, *EVENTS[place + 1 :]])


MESSAGE_EVENTS: list[dict[str, Any]] = [
    {"type": "message_start", "message": {"id": "msg_1", "usage": {"input_tokens": 4, "cache_read_input_tokens": 2}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "ping"},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "ab"}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {"output_tokens": 3},
    },
    {"type": "message_stop"},
]


def read_message(events: list[dict[str, Any]]) -> Outcome:
    reading, seen = messages_api._Reading(), Collector()
    for event in events:
        seen.add(Piece(parts=tuple(reading.parts(event))))
    return seen.outcome()


def test_a_stream_of_blocks_is_the_whole_message() -> None:
    parts = dict(read_message(MESSAGE_EVENTS).parts)
    assert (parts["0 type"], parts["0 text"], parts["finish_reason"]) == ("text", "ab", "end_turn ")
    assert json.loads(parts["usage"]) == {"input": 6, "output": 3}


@pytest.mark.parametrize(("place", "complaint"), [(4, "block 1 begins after 1, 0 is open"), (1, "a delta of block 0")])
def test_what_must_not_happen_in_a_message(place: int, complaint: str) -> None:
    second = MESSAGE_EVENTS[1] | {"index": 1}
    events = [*MESSAGE_EVENTS[:5], second, *MESSAGE_EVENTS[5:]]
    with pytest.raises(StreamFailed, match=complaint):
        read_message([event for number, event in enumerate(events) if number != place])


def test_requests_of_every_kind_are_the_same_for_a_seed() -> None:
    specs = make_api_specs(1, 63, "a")
    assert specs == make_api_specs(1, 63, "a") != make_api_specs(2, 63, "a")
    assert {spec.protocol for spec in specs} == set(API_PROTOCOLS)
    names = {(spec.protocol, name) for spec in specs for name in spec.sampling}
    assert {("responses", "text"), ("background", "text"), ("messages", "output_config")} <= names
    assert all((protocol, "tool_choice") in names for protocol in API_PROTOCOLS)


def asked(**body: Any) -> StreamSpec:
    return StreamSpec(0, "responses", "agents", "", json.dumps(body), True, None)


def answered(kind: str, **parts: str) -> Outcome:
    named = {"usage": "{}", "finish_reason": "completed", "0 type": kind} | {
        f"0 {name}": v for name, v in parts.items()
    }
    return Outcome(parts=tuple(sorted(named.items())))


def test_what_a_custom_tool_asks_for() -> None:
    spec = asked(tool_choice="required")
    assert api_validity(spec, answered("custom_tool_call", name="patch", input="add a\n")).valid == 1
    for text in ("add", "put a\n", ""):
        assert api_validity(spec, answered("custom_tool_call", name="patch", input=text)).complaint
    assert api_validity(spec, answered("message", text="no")).complaint


def test_what_a_schema_asks_for() -> None:
    spec, plan = asked(text={}), {"title": "a", "steps": [{"what": "b", "minutes": 1}], "mood": None}
    assert api_validity(spec, answered("message", text=json.dumps(plan))).valid == 1
    assert api_validity(spec, answered("message", text=json.dumps(plan | {"mood": "so"}))).complaint
