"""What a client makes of a stream of a response's events: checks their form and order, and puts their pieces together.

For: tests of streams. Does not know: how they are written. Invariant: raises AssertionError for a stream that OpenAI
would not send.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
"""The published schema of events."""
_TEXT_FIELDS = {
    "response.output_text": "text",
    "response.reasoning_text": "text",
    "response.function_call_arguments": "arguments",
    "response.custom_tool_call_input": "input",
}
_TERMINAL = ("response.completed", "response.incomplete", "response.failed")
Event = dict[str, Any]


def events_of(stream: bytes) -> list[Event]:
    """The events of a stream's bytes."""
    return [_event(one) for one in stream.decode().split("\n\n") if one and not one.startswith(":")]


def _event(text: str) -> Event:
    kind, data = text.split("\n")
    event: Event = orjson.loads(data.removeprefix("data: "))
    assert kind == f"event: {event['type']}"
    return event


class EventReader:
    """Reads one stream. `read_all` gives the response of its last event."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.kinds: list[str] = []
        """Of all events."""
        self._text = ""
        self._logprobs: list[Any] = []
        self._open: dict[str, Any] | None = None
        self._has_part = self._text_is_done = self._part_is_done = False

    def read_all(self, events: Iterable[Event]) -> dict[str, Any]:
        for number, event in enumerate(events):
            assert event["sequence_number"] == number
            EVENT.validate_python(event, strict=True)
            assert not self.kinds or self.kinds[-1] not in _TERMINAL, "an event behind the last one"
            self.kinds.append(event["type"])
            self._read(event)
        assert self.kinds[-1] in _TERMINAL
        response: dict[str, Any] = event["response"]
        if self.kinds[-1] != "response.failed":
            assert self._open is None and response["output"] == self.items
        return response

    def _read(self, event: Event) -> None:
        kind = event["type"]
        subject, _, verb = kind.rpartition(".")
        if kind == "response.output_item.added":
            self._add_item(event)
        elif kind == "response.output_item.done":
            self._end_item(event)
        elif subject == "response.content_part":
            self._read_part(event, verb)
        elif subject in _TEXT_FIELDS:
            self._read_text(event, verb, _TEXT_FIELDS[subject])
        elif kind != "error":
            self._read_response(event)

    def _read_response(self, event: Event) -> None:
        kind, status = event["type"], event["response"]["status"]
        if kind in ("response.created", "response.queued", "response.in_progress"):
            assert not self.items and self._open is None
            assert status in ("queued", "in_progress") and event["response"]["usage"] is None
        else:
            assert kind == f"response.{status}"

    def _add_item(self, event: Event) -> None:
        assert self._open is None and event["output_index"] == len(self.items)
        self._open = event["item"]
        assert event["item"]["status"] == "in_progress"
        self._text, self._logprobs = "", []
        self._has_part = self._text_is_done = self._part_is_done = False

    def _read_part(self, event: Event, verb: str) -> None:
        self._check_place(event)
        if verb == "added":
            assert not self._has_part and event["part"]["text"] == ""
            self._has_part = True
        else:
            assert self._text_is_done and event["part"]["text"] == self._text
            self._part_is_done = True

    def _read_text(self, event: Event, verb: str, field: str) -> None:
        self._check_place(event)
        assert self._has_part == ("content_index" in event) and not self._text_is_done
        if verb == "delta":
            assert event["delta"] or event.get("logprobs")
            self._text += event["delta"]
            self._logprobs += event.get("logprobs", [])
        else:
            assert event[field] == self._text and event.get("logprobs", []) == self._logprobs
            self._text_is_done = True

    def _end_item(self, event: Event) -> None:
        item, opened = event["item"], self._open
        assert opened is not None and item["id"] == opened["id"] and event["output_index"] == len(self.items)
        if item["type"] in ("message", "reasoning"):
            assert self._part_is_done
            (part,) = item["content"]
            assert part["text"] == self._text and part.get("logprobs", []) == self._logprobs
        elif item["type"] != "tool_search_call":
            assert self._text_is_done and self._text == item["input" if "input" in item else "arguments"]
        self.items.append(item)
        self._open = None

    def _check_place(self, event: Event) -> None:
        assert self._open is not None
        assert event["item_id"] == self._open["id"] and event["output_index"] == len(self.items)
        assert event.get("content_index", 0) == 0
