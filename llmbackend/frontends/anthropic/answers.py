"""Answers of the Messages API: content blocks, whole messages, and stream events.

Invariants: blocks, signatures and ids are functions of the request, the message's id and the tokens; one block is open
at a time; a stream's events, joined as by Anthropic's clients, yield the whole message. A piece of text costs one
orjson call.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Final, Literal, NotRequired, Protocol

import orjson
from pydantic_core import from_json, to_json
from starlette.responses import Response
from typing_extensions import TypedDict  # pydantic accepts typing.TypedDict only from Python 3.12 on

from ..generation.answer import AnswerReader, Identity, Usage
from ..generation.inferences import Generation
from ..generation.parsers import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from ..generation.plan import AnswerPlan
from ..generation.sealed_reasoning import SealingKey
from ..generation.tensors import Delta
from ..http.errors import CONTEXT_LENGTH_EXCEEDED, JsonObject, OpenAIError, anthropic_error_body
from ..http.responses import JSON
from ..http.routing import Count
from .requests import MessageRequest, UnsupportedThreadError

TEXT: Final = "text"
THINKING: Final = "thinking"
TOOL_USE: Final = "tool_use"
SIGNATURE: Final = "signature"
_OWN_CALL_IDS: Final = "call_"
_CALL_IDS: Final = "toolu_"


class BlockSink(Protocol):
    def start(self, block: JsonObject) -> None:
        """block: empty except for its `type`"""

    def piece(self, kind: str, text: str) -> None:
        """Adds text to the open block. kind: the block's type, or SIGNATURE."""

    def stop(self) -> None: ...


class Blocks:
    """Builds content blocks from deltas; `close` ends the last one."""

    def __init__(
        self, request: MessageRequest, plan: AnswerPlan, message_id: str, key: SealingKey, sink: BlockSink
    ) -> None:
        self._request = request
        self._reader = AnswerReader(plan, message_id, 0)
        self._key = key
        self._sink = sink
        self._open = ""
        """Type of the open block."""
        self._layout: list[str] = []
        """White space that starts a block only if other text follows."""
        self._thoughts: list[str] = []
        """Text of the open thinking block."""
        self._num_blocks = 0
        self._usage = Usage(1)
        self._finish_reason = ""
        self._stop: str | int | None = None

    def add(self, delta: Delta) -> None:
        self._usage.add(0, delta)
        self._finish_reason = delta.finish_reason or self._finish_reason
        if delta.stop_reason is not None:
            self._stop = delta.stop_reason
        for event in self._reader.read(delta):
            self._take(event)

    def close(self) -> None:
        """Ends the answer. If the answer is only white space, the white space becomes its text."""
        if self._layout and not self._num_blocks:
            self._begin(TEXT, {"type": TEXT, "text": ""})
            self._sink.piece(TEXT, "".join(self._layout))
        self._end_block()
        if self._reader.reports_reasoning:
            self._usage.set_reasoning(0, self._reader.num_reasoning_tokens)

    def ending(self) -> JsonObject:
        """Why the answer ended; available after `close`."""
        reason = "end_turn"
        if self._finish_reason == "length":
            counts = self._usage.total()
            within_max_tokens = counts is not None and counts["completion_tokens"] < self._request.max_tokens
            reason = "model_context_window_exceeded" if within_max_tokens else "max_tokens"
        elif isinstance(self._stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stop}
        elif self._reader.has_call:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": None}

    def usage(self) -> JsonObject:
        """Usage so far. Input tokens exclude cached ones; caching more of them costs a client nothing."""
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
            if text.isspace():  # models write it between thinking and calls
                self._layout.append(text)
                return
            text = "".join((*self._layout, text))
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
    """A call id in Anthropic's format, unless the model wrote one."""
    return _CALL_IDS + id.removeprefix(_OWN_CALL_IDS) if id.startswith(_OWN_CALL_IDS) else id


_PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
_MESSAGE_STOP: Final = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_DELTA_OPEN: Final = {
    TEXT: b',"delta":{"type":"text_delta","text":',
    THINKING: b',"delta":{"type":"thinking_delta","thinking":',
    TOOL_USE: b',"delta":{"type":"input_json_delta","partial_json":',
    SIGNATURE: b',"delta":{"type":"signature_delta","signature":',
}


class AnswerText(TypedDict):
    type: Literal["text"]
    text: str


class AnswerThinking(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class AnswerToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingDetails(TypedDict):
    thinking_tokens: Count


class MessageUsage(TypedDict):
    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: NotRequired[ThinkingDetails]
    service_tier: Literal["standard"]


class AnthropicMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerText | AnswerThinking | AnswerToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(TypedDict):
    input_tokens: Count


def _message(identity: Identity) -> JsonObject:
    return {"id": identity.id, "type": "message", "role": "assistant", "model": identity.model}


async def whole_message(
    generation: Generation, request: MessageRequest, identity: Identity, plan: AnswerPlan, key: SealingKey
) -> bytes:
    """The answer's body. Raises OpenAIError."""
    message = WholeMessage(request, identity, plan, key)
    while not generation.is_over:
        _, delta = await generation.next()
        await generation.in_thread_if_long(delta.num_listed_tokens, partial(message.add, delta))
    return message.body()


class WholeMessage:
    """The BlockSink of its own blocks."""

    def __init__(self, request: MessageRequest, identity: Identity, plan: AnswerPlan, key: SealingKey) -> None:
        self._identity = identity
        self._blocks = Blocks(request, plan, identity.id, key, self)
        self._content: list[tuple[JsonObject, dict[str, list[str]]]] = []
        """Each block, and its texts by kind."""

    def add(self, delta: Delta) -> None:
        self._blocks.add(delta)

    def body(self) -> bytes:
        self._blocks.close()
        content = {"content": [block | _fields(pieces) for block, pieces in self._content]}
        usage = self._blocks.usage() | {"service_tier": "standard"}
        return orjson.dumps(_message(self._identity) | content | self._blocks.ending() | {"usage": usage})

    def start(self, block: JsonObject) -> None:
        self._content.append((block, {}))

    def piece(self, kind: str, text: str) -> None:
        self._content[-1][1].setdefault(kind, []).append(text)

    def stop(self) -> None:
        pass


def _fields(pieces: dict[str, list[str]]) -> JsonObject:
    joined = {kind: "".join(parts) for kind, parts in pieces.items()}
    call = joined.pop(TOOL_USE, None)
    return joined if call is None else {"input": _input(call)}


def _input(text: str) -> Any:
    """A call's input. If the call was cut off, only its complete part, as for clients of a stream."""
    try:
        if isinstance(orjson.loads(text), dict):
            return orjson.Fragment(text)
    except orjson.JSONDecodeError:
        pass
    try:
        partial = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    if not isinstance(partial, dict):
        return {}
    return orjson.Fragment(to_json(partial, inf_nan_mode="null"))  # orjson has no integers of more than 64 bits


class MessageWriter:
    """The events of one stream. The first one contains the number of prompt tokens, which is in the first delta."""

    def __init__(
        self,
        request: MessageRequest,
        identity: Identity,
        plan: AnswerPlan,
        key: SealingKey,
        request_id: str,
    ) -> None:
        """request_id: for errors"""
        self._identity = identity
        self._request_id = request_id
        self._blocks = Blocks(request, plan, identity.id, key, self)
        self._has_begun = False
        self._index = -1
        self._head = b""
        """The start of every event with a piece of the open block."""
        self._events: list[bytes] = []

    def begin(self) -> bytes:
        return b""

    def begin_choice(self, index: int, first: Delta) -> bytes:
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        self._blocks.add(delta)
        return self._message_start() + self._taken()

    def end(self) -> bytes:
        self._blocks.close()
        body = {"type": "message_delta", "delta": self._blocks.ending(), "usage": self._blocks.usage()}
        message_delta = b"event: message_delta\ndata: %b\n\n" % orjson.dumps(body)
        return b"".join((self._message_start(), self._taken(), message_delta, _MESSAGE_STOP))

    def ping(self) -> bytes:
        return self._message_start() or _PING

    def fail(self, error: OpenAIError) -> bytes:
        return error_event(error, self._request_id)

    def start(self, block: JsonObject) -> None:
        self._index += 1
        self._head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d' % self._index
        self._events.append(
            b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
            % (self._index, orjson.dumps(block))
        )

    def piece(self, kind: str, text: str) -> None:
        self._events.append(b"%b%b%b}}\n\n" % (self._head, _DELTA_OPEN[kind], orjson.dumps(text)))

    def stop(self) -> None:
        self._events.append(
            b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n' % self._index
        )

    def _taken(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)

    def _message_start(self) -> bytes:
        """Sent once, followed by a ping, as by Anthropic's server."""
        if self._has_begun:
            return b""
        self._has_begun = True
        usage = self._blocks.usage() | {"output_tokens": 0, "service_tier": "standard"}
        usage.pop("output_tokens_details", None)
        message = _message(self._identity) | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        start = orjson.dumps({"type": "message_start", "message": message})
        return b"event: message_start\ndata: %b\n\n" % start + _PING


REQUEST_ID: Final = "request-id"
"""Header by which an operator can find a request."""
_OVERLOADED: Final = 529
_RETRIED: Final = (429, _OVERLOADED)
_TOO_MANY_TOKENS: Final = re.compile(r"has (\d+) tokens, expected at most (\d+)")
_CONTEXT: Final = re.compile(r"maximum (?:context|model) length (?:is|of) (\d+)")


def status_of(error: OpenAIError) -> int:
    """Anthropic uses 529 instead of 503."""
    return _OVERLOADED if error.status == 503 else error.status


def _text_of(error: OpenAIError) -> str:
    """The message; for a prompt that is too long in Anthropic's words, at which clients compact the conversation."""
    if error.code != CONTEXT_LENGTH_EXCEEDED:
        return error.message
    if (found := _TOO_MANY_TOKENS.search(error.message)) is not None:
        return f"prompt is too long: {found[1]} tokens > {found[2]} maximum"
    if (found := _CONTEXT.search(error.message)) is not None:  # refused for its size, before it was tokenised
        return f"prompt is too long: at least {int(found[1]) + 1} tokens > {found[1]} maximum"
    return error.message


def error_response(error: OpenAIError, request_id: str) -> Response:
    status = status_of(error)
    headers = {REQUEST_ID: request_id} | ({"Retry-After": error.retry_after} if status in _RETRIED else {})
    details = error.details if isinstance(error, UnsupportedThreadError) else None
    body = anthropic_error_body(status, _text_of(error), request_id, details)
    return Response(body, status, headers, media_type=JSON)


def error_event(error: OpenAIError, request_id: str) -> bytes:
    return b"event: error\ndata: %b\n\n" % anthropic_error_body(status_of(error), _text_of(error), request_id)
