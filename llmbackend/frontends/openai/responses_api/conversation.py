"""Items → the chat messages that templates read.

For: parsing.py. Does not know: templates, the store. Invariant: what an answer wrote as items becomes the one
assistant's message that a chat's history has of the same answer; the prompt is the same over both APIs.

An answer's items are those between two inputs: what a model says before and after its calls and its reasoning is one
message's content. Only a message directly behind a message is another answer's: no answer has two in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from ..errors import JsonObject, refuse
from ..sealed_reasoning import FIXED_KEY, SealingKey
from ..tools import INPUT
from .items import item_type
from .tools import TOOL_SEARCH, called_name

_SYSTEM_ROLES = ("system", "developer")
_JOINT = "\n"
"""Between text parts: as chat joins them."""
_SYSTEM_JOINT = "\n\n"
_UNFINISHED = ("in_progress", "incomplete")


class Conversation:
    """Collects messages, item by item."""

    def __init__(self, key: SealingKey = FIXED_KEY) -> None:
        self._key = key
        self._messages: list[JsonObject] = []
        self._answer: _Answer | None = None

    def add_system(self, text: str) -> None:
        """System messages at the start become one: many templates read no second one."""
        self._end_answer()
        if len(self._messages) == 1 and self._messages[0]["role"] == "system":
            self._messages[0]["content"] += _SYSTEM_JOINT + text
        else:
            self._messages.append({"role": "system", "content": text})

    def add_user(self, text: str) -> None:
        self._end_answer()
        self._messages.append({"role": "user", "content": text})

    def add(self, item: Mapping[str, Any], param: str) -> None:
        """A valid item. param: where it stands. Raises OpenAIError for reasoning that was not sealed here."""
        match item_type(item):
            case "message":
                self._add_message(item)
            case "reasoning":
                self._current().add_reasoning(_reasoning(item, param, self._key))
            case "function_call":
                self._add_call(item, item["name"], item["arguments"])
            case "custom_tool_call":
                self._add_call(item, item["name"], orjson.dumps({INPUT: item["input"]}).decode())
            case "tool_search_call":
                self._add_call(item, TOOL_SEARCH, orjson.dumps(item["arguments"]).decode())
            case "function_call_output" | "custom_tool_call_output":
                self._add_output(item, _text(item["output"]))
            case "tool_search_output":
                self._add_output(item, orjson.dumps(item["tools"]).decode())

    def messages(self) -> list[JsonObject]:
        self._end_answer()
        return self._messages

    def _add_message(self, item: Mapping[str, Any]) -> None:
        text = _text(item["content"])
        if item["role"] == "assistant":
            if self._answer is not None and self._answer.ends_with_text:
                self._end_answer()
            self._current().add_text(text)
        elif item["role"] in _SYSTEM_ROLES:
            self.add_system(text)
        else:
            self.add_user(text)

    def _add_call(self, item: Mapping[str, Any], name: str, arguments: str) -> None:
        function = {"name": called_name(name, item.get("namespace")), "arguments": arguments}
        self._current().add_call({"id": item["call_id"], "type": "function", "function": function})

    def _add_output(self, item: Mapping[str, Any], text: str) -> None:
        self._end_answer()
        self._messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})

    def _current(self) -> _Answer:
        if self._answer is None:
            self._answer = _Answer()
        return self._answer

    def _end_answer(self) -> None:
        if self._answer is not None:
            self._messages.append(self._answer.message())
            self._answer = None


class _Answer:
    """One assistant's message in the making."""

    def __init__(self) -> None:
        self._reasonings: list[str] = []
        self._texts: list[str] = []
        self._calls: list[JsonObject] = []
        self.ends_with_text = False

    def add_reasoning(self, text: str) -> None:
        self._reasonings.append(text)
        self.ends_with_text = False

    def add_text(self, text: str) -> None:
        self._texts.append(text)
        self.ends_with_text = True

    def add_call(self, call: JsonObject) -> None:
        self._calls.append(call)
        self.ends_with_text = False

    def message(self) -> JsonObject:
        message: JsonObject = {"role": "assistant"}
        if reasoning := "".join(self._reasonings):
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return message | {"content": "".join(self._texts)}


def without_former_reasoning(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Without the reasoning of answers before the last message of the user."""
    last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=0)
    return [
        {name: value for name, value in message.items() if name != "reasoning_content"} if index < last else message
        for index, message in enumerate(messages)
    ]


def is_unfinished(items: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last item is an answer's text that was cut off, which the model goes on with (as vLLM has it)."""
    last = items[-1] if items else {}
    is_answer = last.get("role") == "assistant" and item_type(last) == "message"
    return is_answer and last.get("status") in _UNFINISHED


def _reasoning(item: Mapping[str, Any], param: str, key: SealingKey) -> str:
    content, sealed = item.get("content"), item.get("encrypted_content")
    if sealed is not None:
        try:
            return key.unseal(sealed)
        except ValueError as error:
            if not content:
                message = f"what this server sealed ({error})"
                raise refuse(f"{param}.encrypted_content", message, sealed) from None
    return _joined(content or item.get("summary") or ())


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else _joined(content)


def _joined(parts: Iterable[Mapping[str, Any]]) -> str:
    return _JOINT.join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)
