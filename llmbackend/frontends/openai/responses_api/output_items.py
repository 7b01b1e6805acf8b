"""The items of a response's output as JSON, and the input of custom tools.

Invariants: an item is the same object in events and in the whole response; its id is a function of the response's id
and its position, so its response can be found by the item's id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from ...conversation.tools import INPUT, NamedTool, ToolKind
from ...http.errors import JsonObject

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ID_PREFIX = "resp_"
"""Prefix of the ids of responses."""
Side = Literal["i", "o"]
"""i: input, o: output."""
_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[io]\d+")
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "compaction": "cmp",
}


@dataclass(frozen=True, slots=True)
class ItemKind:
    """OpenAI's names for a kind of item, its text and its events."""

    type: str
    delta_event: str
    """This and `done_event` are "" if the kind has no events for its text."""
    done_event: str
    text_field: str
    """The field with the text, in the item or in its content part."""
    part_type: str | None = None
    """None: the item has no content part."""


MESSAGE = ItemKind(
    "message", "response.output_text.delta", "response.output_text.done", "text", part_type="output_text"
)
REASONING = ItemKind(
    "reasoning",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "text",
    part_type="reasoning_text",
)
FUNCTION_CALL = ItemKind(
    "function_call",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "arguments",
)
CUSTOM_CALL = ItemKind(
    "custom_tool_call",
    "response.custom_tool_call_input.delta",
    "response.custom_tool_call_input.done",
    "input",
)
TOOL_SEARCH_CALL = ItemKind("tool_search_call", "", "", "arguments")
CALLS: Mapping[ToolKind, ItemKind] = {
    "function": FUNCTION_CALL,
    "custom": CUSTOM_CALL,
    "tool_search": TOOL_SEARCH_CALL,
}


@dataclass(slots=True)
class OutputItem:
    """Modified only by the builder of its output."""

    kind: ItemKind
    id: str
    index: int
    """Position in the output."""
    tool: NamedTool | None = None
    """The tool, if the item is a call."""
    call_id: str = ""
    seal: Callable[[str], str] | None = None
    """Seals reasoning; None: not requested."""
    status: ItemStatus = "in_progress"
    pieces: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    """Tokens of a message as JSON, encoded once for several events."""

    @property
    def text(self) -> str:
        if len(self.pieces) > 1:
            self.pieces[:] = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    @property
    def logprobs_json(self) -> orjson.Fragment:
        return orjson.Fragment(b"[%b]" % b",".join(self.logprobs))

    def part(self) -> JsonObject:
        return self._part(self.text, self.logprobs_json)

    def empty_part(self) -> JsonObject:
        return self._part("", [])

    def _part(self, text: str, logprobs: object) -> JsonObject:
        if self.kind is MESSAGE:
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return {"type": self.kind.part_type, "text": text}

    def as_added(self) -> JsonObject:
        """The item as JSON before it has any text."""
        return self._json("in_progress", [] if self.kind.part_type else "")

    def as_json(self) -> JsonObject:
        """The item in its current state, for orjson."""
        has_part = self.status != "in_progress" or bool(self.pieces)
        parts = [self.part()] if self.kind.part_type and has_part else []
        return self._json(self.status, parts if self.kind.part_type else self.text)

    def _json(self, status: ItemStatus, content: list[JsonObject] | str) -> JsonObject:
        item: JsonObject = {"id": self.id, "type": self.kind.type, "status": status}
        if self.kind is MESSAGE:
            return item | {"role": "assistant", "content": content}
        if self.kind is REASONING:
            reasoning = item | {"summary": [], "content": content}
            if self.seal is not None:
                reasoning["encrypted_content"] = self.seal(self.text) if content else None
            return reasoning
        return item | self._call(str(content))

    def _call(self, text: str) -> JsonObject:
        call: JsonObject = {"call_id": self.call_id}
        if self.kind is TOOL_SEARCH_CALL:
            return call | {"execution": "client", "arguments": _as_value(text)}
        if self.tool is not None:
            call["name"] = self.tool.name
            if self.tool.namespace is not None:
                call["namespace"] = self.tool.namespace
        return call | {self.kind.text_field: text}


def _as_value(text: str) -> Any:
    """The arguments as an object; a text that is not JSON is returned unchanged."""
    try:
        return orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return text


def item_id(kind: str, response_id: str, side: Side, index: int) -> str:
    """kind: the item's `type`."""
    return f"{_PREFIXES.get(kind, 'item')}_{response_id.removeprefix(ID_PREFIX)}{side}{index}"


def response_of(id: str) -> str | None:
    """The id of the item's response; None for an id of another form."""
    found = _ID.fullmatch(id)
    return None if found is None else ID_PREFIX + found[1]


_OPENING = ("{", f'"{INPUT}"', ":", '"')
"""The tokens before the string's characters; there may be white space between them."""
_SPACE = " \t\r\n"
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_UNIT = re.compile(rf'[^"\\]+|{_PAIR}|\\u[0-9a-fA-F]{{4}}|\\[^u]|"', re.DOTALL)
_INCOMPLETE_ESCAPE = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD][c-fC-F]?[0-9a-fA-F]?)?)?)?)?"
)
"""An incomplete escape, or the first half of a surrogate pair."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class CustomInput:
    """The input of a custom tool's call, read from its JSON arguments as they arrive: models call a function with one
    string parameter, and the client gets that string. The joined pieces do not depend on how the text was split, and
    contain only whole characters. Arguments of another form, which are possible without a grammar, are the input
    unchanged."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        """Kept while they may turn out to have another form."""
        self._token, self._matched_chars = 0, 0
        self._is_other_form = False
        self._held = ""
        self._is_closed = False

    def push(self, text: str) -> str:
        """The characters of the input in the next piece of the arguments."""
        if self._token < len(_OPENING):
            self._arguments.append(text)
            text = self._open(text)
        return self._decoded(text) if text else ""

    def finish(self) -> str:
        """The rest, at the end of the arguments."""
        if self._token == len(_OPENING):
            return ""  # the pending text is half an escape
        return _of_other_form("".join(self._arguments))

    def _open(self, text: str) -> str:
        """Reads the opening, and returns the text after it."""
        for index, char in enumerate(text):
            if self._is_other_form:
                return ""
            expected = _OPENING[self._token]
            if self._matched_chars == 0 and char in _SPACE:
                continue
            if char != expected[self._matched_chars]:
                self._is_other_form = True
                return ""
            self._matched_chars += 1
            if self._matched_chars == len(expected):
                self._token, self._matched_chars = self._token + 1, 0
            if self._token == len(_OPENING):
                self._arguments.clear()
                return text[index + 1 :]
        return ""

    def _decoded(self, text: str) -> str:
        if self._is_closed:
            return ""
        text, at, pieces = self._held + text, 0, []
        while at < len(text):
            if _INCOMPLETE_ESCAPE.fullmatch(text, at):
                break
            unit = _UNIT.match(text, at)
            if unit is None:  # \u without four digits is not JSON, and is shown unchanged
                pieces.append(text[at])
                at += 1
                continue
            at = unit.end()
            if unit[0] == '"':
                self._is_closed = True
                at = len(text)
            else:
                pieces.append(_unescaped(unit[0]))
        self._held = text[at:]
        return "".join(pieces)


def _unescaped(unit: str) -> str:
    if unit[0] != "\\":
        return unit
    if unit[1] != "u":
        return _ESCAPES.get(unit[1], unit[1])
    if len(unit) > 6:
        return chr(0x10000 + ((int(unit[2:6], 16) - 0xD800) << 10) + int(unit[8:], 16) - 0xDC00)
    char = chr(int(unit[2:], 16))
    return "\ufffd" if "\ud800" <= char <= "\udfff" else char


def _of_other_form(arguments: str) -> str:
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return "" if _is_begun(arguments) else arguments
    if value == {}:
        return ""
    found = value.get(INPUT) if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments


def _is_begun(arguments: str) -> bool:
    """Whether `arguments` end before the first character of the input."""
    return "".join(_OPENING).startswith("".join(arguments.split()))
