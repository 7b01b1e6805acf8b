"""The content blocks of one answer: what the model writes, as thinking, text and calls of tools, one after the other.

For: the writers of whole answers and of streams, which share it, so that both say the same. Does not know: JSON on the
wire, HTTP. Invariants: blocks, signatures and ids are functions of the request, the message's id and the tokens; one
block is open at a time; however the tokens came together, the pieces of a block put together are the same.
"""

from __future__ import annotations

from typing import Final, Protocol

from ..openai.answer_plan import AnswerPlan
from ..openai.answers import AnswerReader
from ..openai.errors import JsonObject
from ..openai.parsers import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from ..openai.responses import Usage
from ..openai.sealed_reasoning import SealingKey
from ..openai.tensors import Delta
from .requests import MessageRequest

TEXT: Final = "text"
THINKING: Final = "thinking"
TOOL_USE: Final = "tool_use"
SIGNATURE: Final = "signature"
_OWN_CALL_IDS: Final = "call_"
_CALL_IDS: Final = "toolu_"


class BlockSink(Protocol):
    """Where blocks go."""

    def start(self, block: JsonObject) -> None:
        """A block begins: its first form, with its `type`."""
        ...

    def piece(self, kind: str, text: str) -> None:
        """Of the block that is open. kind: its type, or SIGNATURE."""
        ...

    def stop(self) -> None: ...


class Blocks:
    """Owner: the writer of the answer. After the last delta `close` ends what is open."""

    def __init__(
        self, request: MessageRequest, plan: AnswerPlan | None, message_id: str, key: SealingKey, sink: BlockSink
    ) -> None:
        self._request = request
        self._reader = None if plan is None else AnswerReader(plan, message_id, 0)
        self._reports_reasoning = plan is not None and plan.reasoning_format is not None
        self._key = key
        self._sink = sink
        self._open = ""
        """The type of the block that is open."""
        self._layout: list[str] = []
        """White space that no block begins with before something follows it."""
        self._thoughts: list[str] = []
        """The text of the thinking that is open."""
        self._num_blocks = 0
        self._usage = Usage(1)
        self._finish_reason = ""
        self._stop: str | int | None = None

    def add(self, delta: Delta) -> None:
        self._usage.add(0, delta)
        self._finish_reason = delta.finish_reason or self._finish_reason
        if delta.stop_reason is not None:
            self._stop = delta.stop_reason
        if self._reader is None:
            if delta.text:
                self._text(delta.text)
            return
        for event in self._reader.read(delta):
            self._take(event)

    def close(self) -> None:
        """The answer is over. White space that was all of it is its text."""
        if self._layout and not self._num_blocks:
            self._begin(TEXT, {"type": TEXT, "text": ""})
            self._sink.piece(TEXT, "".join(self._layout))
        self._end_block()
        if self._reader is not None and self._reports_reasoning:
            self._usage.set_reasoning(0, self._reader.num_reasoning_tokens)

    def ending(self) -> JsonObject:
        """Why the answer ended; after `close`."""
        reason = "end_turn"
        if self._finish_reason == "length":
            counts = self._usage.total()
            had_room = counts is not None and counts["completion_tokens"] < self._request.max_tokens
            reason = "model_context_window_exceeded" if had_room else "max_tokens"
        elif isinstance(self._stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stop}
        elif self._reader is not None and self._reader.has_call:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": None}

    def usage(self) -> JsonObject:
        """So far. What the prefix cache had is no input that was computed; all of the rest is cached from now on, which
        costs a client nothing here."""
        counts = self._usage.as_json()
        cached = counts.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        usage: JsonObject = {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
        }
        if (details := counts.get("completion_tokens_details")) is not None:
            usage["output_tokens_details"] = {"thinking_tokens": details["reasoning_tokens"]}
        return usage

    def _take(self, event: Event) -> None:
        match event:
            case ContentDelta(text):
                self._text(text)
            case ReasoningDelta(text):
                self._thought(text)
            case ToolCallStart(_, name, id):
                self._end_block()
                assert id is not None
                self._begin(TOOL_USE, {"type": TOOL_USE, "id": _own(id), "name": name, "input": {}})
            case ToolCallArguments(_, text):
                self._sink.piece(TOOL_USE, text)
            case ToolCallEnd():
                self._end_block()

    def _text(self, text: str) -> None:
        if self._open != TEXT:
            if self._layout:
                text = "".join((*self._layout, text))
            if text.isspace():  # a block of layout alone, as models write between thinking and calls, says nothing
                self._layout = [text]
                return
            self._end_block()
            self._begin(TEXT, {"type": TEXT, "text": ""})
        self._sink.piece(TEXT, text)

    def _thought(self, text: str) -> None:
        self._layout = []
        if self._open != THINKING:
            self._end_block()
            self._begin(THINKING, {"type": THINKING, "thinking": "", "signature": ""})
        self._thoughts.append(text)
        if self._request.shows_thinking:
            self._sink.piece(THINKING, text)

    def _begin(self, kind: str, block: JsonObject) -> None:
        self._open = kind
        self._num_blocks += 1
        self._sink.start(block)

    def _end_block(self) -> None:
        self._layout = []
        if self._open == THINKING:
            self._sink.piece(SIGNATURE, self._key.seal("".join(self._thoughts)))
            self._thoughts = []
        if self._open:
            self._sink.stop()
        self._open = ""


def _own(id: str) -> str:
    """Of a call: one that the model itself wrote stays as it is."""
    return _CALL_IDS + id.removeprefix(_OWN_CALL_IDS) if id.startswith(_OWN_CALL_IDS) else id
