"""The state of a response: its output items, its usage, and the response object at any time.

Invariants: one item is open at a time; except for the completion time, a response is a function of the request, the
identity and the deltas; the object of a stream's last event is the whole response.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import msgspec
import orjson

from ...conversation.tools import NamedTool
from ...generation.answer import DEFAULT_FINISH_REASON, AnswerReader, Identity, Usage
from ...generation.parsers import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from ...generation.plan import AnswerPlan
from ...generation.request import LogprobForm
from ...generation.tensors import PROMPT_IN_REASONING, Delta, TokenEntries
from ...http.errors import JsonObject, OpenAIError
from ..bodies import ChatLogprobs
from .output_items import CALLS, MESSAGE, REASONING, CustomInput, ItemKind, OutputItem, item_id


@dataclass(frozen=True, slots=True)
class ItemAdded:
    item: OutputItem


class TextAdded(msgspec.Struct, frozen=True):
    item: OutputItem
    text: str
    logprobs: bytes
    """Items of a JSON list; b"" for none."""


@dataclass(frozen=True, slots=True)
class ItemDone:
    item: OutputItem


Change = ItemAdded | TextAdded | ItemDone
LENGTH = "length"


class OutputBuilder:
    """Builds the output of one response."""

    def __init__(
        self,
        plan: AnswerPlan,
        response_id: str,
        *,
        tools: Mapping[str, NamedTool] | None = None,
        logprobs: LogprobForm | None = None,
        seal: Callable[[str], str] | None = None,
    ) -> None:
        """tools: by the names that the model uses. seal: seals the reasoning; None: not requested"""
        self.items: list[OutputItem] = []
        self.finish_reason: str | None = None
        """None before the answer's end."""
        self._response_id = response_id
        self._tools = tools or {}
        self._seal = seal
        self._reader = AnswerReader(plan, response_id, 0)
        self._is_text = not plan.reads_tokens
        self._logprobs = None if logprobs is None else ChatLogprobs(logprobs)
        self._pending: list[TokenEntries] = []
        """Logprobs of tokens whose text is still held back."""
        self._open: OutputItem | None = None
        self._input: CustomInput | None = None
        """Set during a call of a custom tool."""
        self._changes: list[Change] = []

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reader.num_reasoning_tokens

    def add(self, delta: Delta) -> list[Change]:
        if self._is_text:
            if delta.text or delta.logprobs:
                self._add_text(MESSAGE, delta.text, delta.logprobs)
        elif self._logprobs is None:
            for event in self._reader.read(delta):
                self._add_event(event, [])
        else:
            for token in by_token(delta):
                self._add_token(token)
        if (delta.finish_reason or delta.is_final) and self.finish_reason is None:
            self._finish(delta.finish_reason or DEFAULT_FINISH_REASON)
        changes, self._changes = self._changes, []
        return changes

    def stop(self) -> None:
        """Ends the open item because the request failed or was cancelled."""
        if self._open is not None:
            self._open.status = "incomplete"
            self._open = None

    def _add_token(self, token: Delta) -> None:
        """Content's logprobs include earlier tokens held back; those of reasoning, calls and markers are dropped."""
        before = self.num_reasoning_tokens
        self._pending += token.logprobs
        for event in self._reader.read(token):
            is_content = isinstance(event, ContentDelta)
            self._add_event(event, self._pending if is_content else [])
            self._pending = []
        is_marker = any(is_special for _, _, is_special in token.text_tokens)
        if self.num_reasoning_tokens > before or (is_marker and token.finish_reason is None):
            self._pending = []

    def _add_event(self, event: Event, positions: list[TokenEntries]) -> None:
        match event:
            case ContentDelta(text):
                self._add_text(MESSAGE, text, positions)
            case ReasoningDelta(text):
                self._add_text(REASONING, text, [])
            case ToolCallStart(_, name, id):
                tool = self._tools.get(name) or NamedTool("function", name)
                self._begin(CALLS[tool.kind], tool, id or "")
                self._input = CustomInput() if tool.kind == "custom" else None
            case ToolCallArguments(_, text):
                self._add_piece(text if self._input is None else self._input.push(text))
            case ToolCallEnd():
                self._end(is_complete=True)

    def _add_text(self, kind: ItemKind, text: str, positions: list[TokenEntries]) -> None:
        if self._open is None or self._open.kind is not kind:
            self._begin(kind)
        render = self._logprobs
        if render is None or not positions:
            self._add_piece(text)
        else:
            self._add_piece(text, orjson.dumps(render.render(positions)["content"])[1:-1])

    def _begin(self, kind: ItemKind, tool: NamedTool | None = None, call_id: str = "") -> None:
        self._end()
        index = len(self.items)
        item = OutputItem(kind, item_id(kind.type, self._response_id, "o", index), index, tool, call_id, self._seal)
        self._open = item
        self.items.append(item)
        self._changes.append(ItemAdded(item))

    def _add_piece(self, text: str, logprobs: bytes = b"") -> None:
        item = self._open
        if item is not None and (text or logprobs):
            item.pieces.append(text)
            if logprobs:
                item.logprobs.append(logprobs)
            self._changes.append(TextAdded(item, text, logprobs))

    def _end(self, *, is_complete: bool | None = None) -> None:
        """Ends the open item. is_complete: None: True unless the item is a call"""
        if self._open is None:
            return
        if self._input is not None:
            self._add_piece(self._input.finish())
            self._input = None
        is_text = self._open.tool is None
        self._open.status = "completed" if (is_text if is_complete is None else is_complete) else "incomplete"
        self._changes.append(ItemDone(self._open))
        self._open = None

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        if self._pending and self._open is not None and self._open.kind is MESSAGE:
            self._add_text(MESSAGE, "", self._pending)
        if not self.items:
            self._begin(MESSAGE)
        self._end(is_complete=False if reason == LENGTH else None)


def by_token(delta: Delta) -> Iterator[Delta]:
    """Splits a delta with text tokens into one delta per token; the last one carries what belongs to all of them."""
    last = len(delta.text_tokens) - 1
    if last < 1:
        yield delta
        return
    positions, ids = iter(delta.logprobs), iter(delta.token_ids)
    for index, token in enumerate(delta.text_tokens):
        num_own = 1 if token[0] >= 0 else 0
        own_positions, own_ids = list(islice(positions, num_own)), list(islice(ids, num_own))
        if index < last:
            yield Delta(token[1], None, own_positions, 0, 0, False, None, (token,), token_ids=own_ids)
        else:
            yield msgspec.structs.replace(
                delta,
                text=token[1],
                logprobs=[*own_positions, *positions],
                text_tokens=(token,),
                token_ids=[*own_ids, *ids],
            )


class RawMessages:
    """The prompt and the answer verbatim, as text and tokens (vLLM's `enable_response_messages`)."""

    def __init__(self) -> None:
        self._prompt = b"null"
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    def add(self, delta: Delta) -> None:
        if delta.prompt is not None:
            self._prompt = orjson.dumps([_raw_message(delta.prompt.text, delta.prompt.token_ids)])
        tokens = delta.text_tokens
        if tokens and delta.finish_reason == DEFAULT_FINISH_REASON and tokens[-1][2]:
            tokens = tokens[:-1]  # the token that ends the answer
        self._texts += [text for id, text, _ in tokens if id != PROMPT_IN_REASONING]
        if not delta.text_tokens:
            self._texts.append(delta.text)
        self._token_ids += delta.token_ids

    def fields(self) -> JsonObject:
        """Fields of the response, for orjson."""
        answer = [_raw_message("".join(self._texts), self._token_ids)] if self._token_ids else None
        return {"input_messages": orjson.Fragment(self._prompt), "output_messages": answer}


def _raw_message(text: str, token_ids: Sequence[int]) -> JsonObject:
    return {"type": "raw_message_tokens", "message": text, "tokens": token_ids}


Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
"""By HTTP status; for other statuses: server_error."""


class ResponseState:
    def __init__(
        self,
        identity: Identity,
        plan: AnswerPlan,
        *,
        echo: bytes = b"{}",
        tools: Mapping[str, NamedTool] | None = None,
        logprobs: LogprobForm | None = None,
        seal: Callable[[str], str] | None = None,
        is_queued: bool = False,
        has_messages: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """echo: the request's fields that the response repeats, as a JSON object. tools, seal: see OutputBuilder.
        is_queued: whether it starts in the background. has_messages: whether it includes prompt and answer as text,
        tokens"""
        self.builder = OutputBuilder(plan, identity.id, tools=tools, logprobs=logprobs, seal=seal)
        self.id = identity.id
        self.status: Status = "queued" if is_queued else "in_progress"
        self._error: JsonObject | None = None
        self._usage = Usage(1)
        self._messages = RawMessages() if has_messages else None
        self._completed_at_s: int | None = None
        self._clock = clock
        self._output = self._json = b""
        """Those of a response that has ended, once they were encoded."""
        head = {"id": identity.id, "object": "response", "created_at": identity.created_s, "model": identity.model}
        self._head = orjson.dumps(head)[:-1]
        self._echo = b"," + echo[1:-1] if echo != b"{}" else b""

    def add(self, delta: Delta) -> list[Change]:
        changes = self.builder.add(delta)
        if self._messages is not None:
            self._messages.add(delta)
        self._usage.add(0, delta)
        self._usage.set_reasoning(0, self.builder.num_reasoning_tokens)
        return changes

    def end(self) -> None:
        self._set_status("incomplete" if self.builder.finish_reason == LENGTH else "completed")
        if self.status == "completed":
            self._completed_at_s = int(self._clock())

    def fail(self, error: OpenAIError) -> None:
        self.builder.stop()
        self._set_status("failed")
        self._completed_at_s = None
        self._error = {"code": _ERROR_CODES.get(error.status, "server_error"), "message": error.message}

    def cancel(self) -> None:
        self.builder.stop()
        self._set_status("cancelled")

    def _set_status(self, status: Status) -> None:
        self.status = status
        self._output = self._json = b""

    def output(self) -> list[JsonObject]:
        """The items so far, for orjson."""
        return [item.as_json() for item in self.builder.items]

    def output_json(self) -> bytes:
        """The items of a response that has ended; encoded once."""
        self._output = self._output or orjson.dumps(self.output())
        return self._output

    def json(self) -> bytes:
        """The response; encoded once if it has ended."""
        if self._json:
            return self._json
        is_over = self.status not in ("queued", "in_progress")
        tail = {
            "status": self.status,
            "completed_at": self._completed_at_s,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "output": orjson.Fragment(self.output_json()) if is_over else [],
            "usage": self.usage() if is_over else None,
        }
        if self._messages is not None and is_over:
            tail |= self._messages.fields()
        json = self._head + self._echo + b"," + orjson.dumps(tail)[1:]
        if is_over:
            self._json = json
        return json

    def usage(self) -> JsonObject | None:
        if (counted := self._usage.total()) is None:
            return None
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": counted.get("prompt_tokens_details", {}).get("cached_tokens", 0),
                "cache_write_tokens": 0,
            },
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": counted.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
            },
            "total_tokens": counted["total_tokens"],
        }
