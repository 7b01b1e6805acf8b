"""Shared by the answers of all APIs: identity, usage, and the parsed content.

Invariant: all of it is a function of the request, the identity and the tokens. An answer is therefore the same streamed
or whole, and with or without an engine failure.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ..http.errors import JsonObject
from ..journals.journal import Recording
from .parsers import ContentDelta, Event, OutputParser, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from .plan import AnswerPlan
from .request import GenerationRequest
from .tensors import PROMPT_IN_REASONING, Delta, TextToken

DEFAULT_FINISH_REASON = "stop"
"""Used when a model reports no `finish_reason`, which is an optional output."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies an answer and every chunk of its stream."""

    id: str
    created_s: int
    """Unix time in seconds."""
    model: str
    fingerprint: str
    """Changes with the server's release and with the model's configuration; "" for none."""
    salt: str = ""
    """Makes the ids of calls unique if the client chose `id`, which it may send again."""

    @classmethod
    def of(cls, request: GenerationRequest, fingerprint: str, own_id: str = "", salt: str = "") -> Identity:
        """own_id: follows the prefix of the id; "": a new one"""
        id = request.id_prefix + (own_id or uuid.uuid4().hex)
        return cls(id, int(time.time()), request.model, fingerprint, salt)

    @property
    def call_seed(self) -> str:
        """The ids of calls are derived from it."""
        return self.id + self.salt

    def recorded(self, recording: Recording) -> Identity:
        """The recorded identity of a regenerated stream; otherwise this one, after recording it."""
        if recording.identity:
            return msgspec.msgpack.decode(recording.identity, type=Identity)
        recording.identity = msgspec.msgpack.encode(self)
        return self

    def fields(self, kind: str) -> JsonObject:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint or None,
        }


class Usage:
    """The token counts of one answer: each prompt is counted once, and each choice."""

    def __init__(self, n: int) -> None:
        """n: number of choices of each prompt"""
        self._n = n
        self._prompt_tokens: dict[int, int] = {}
        """By the index of the prompt."""
        self._cached_tokens: dict[int, int] = {}
        """By the index of the prompt."""
        self._output_tokens: defaultdict[int, int] = defaultdict(int)
        """By the index of the choice."""
        self._reasoning_tokens: dict[int, int] = {}
        """By the index of the choice."""

    def add(self, index: int, delta: Delta) -> None:
        num_input_tokens, num_cached_tokens = delta.num_input_tokens, delta.num_cached_tokens
        if delta.usage is not None:
            num_input_tokens, self._output_tokens[index], num_cached_tokens = delta.usage
        else:
            self._output_tokens[index] += delta.num_output_tokens
        if num_input_tokens:
            self.set_prompt(index, num_input_tokens)
        if num_cached_tokens is not None and not index % self._n:
            self._cached_tokens[index // self._n] = num_cached_tokens

    def set_prompt(self, index: int, num_tokens: int) -> None:
        """num_tokens: of the prompt of choice `index`"""
        self._prompt_tokens[index // self._n] = num_tokens

    @property
    def num_output_tokens(self) -> int:
        return sum(self._output_tokens.values())

    def set_reasoning(self, index: int, num_tokens: int) -> None:
        self._reasoning_tokens[index] = num_tokens

    def total(self) -> JsonObject | None:
        """The usage of a complete answer; None if the model does not count tokens."""
        return self.as_json() if self._prompt_tokens or self.num_output_tokens else None

    def as_json(self) -> JsonObject:
        counts = (self._prompt_tokens, self._output_tokens, self._cached_tokens, self._reasoning_tokens)
        return _usage(*(sum(one.values()) if one else None for one in counts))

    def of_choice(self, index: int) -> JsonObject:
        """The usage of one choice so far, with its whole prompt."""
        number = index // self._n
        return _usage(
            self._prompt_tokens.get(number),
            self._output_tokens.get(index),
            self._cached_tokens.get(number),
            self._reasoning_tokens.get(index),
        )


def _usage(prompt: int | None, completion: int | None, cached: int | None, reasoning: int | None) -> JsonObject:
    prompt, completion = prompt or 0, completion or 0
    usage: JsonObject = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    if reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return usage


def request_metrics(delta: Delta, num_output_tokens: int) -> JsonObject:
    """vLLM's metrics of a request, from the last delta of its only choice. Times in ms: from when an engine took the
    request to the first token, and from the first to the last token."""
    assert delta.times_ns is not None
    arrival, taken, first, last = (ns / 1e6 for ns in delta.times_ns)
    return {
        "time_to_first_token_ms": first - taken,
        "generation_time_ms": last - first,
        "queue_time_ms": taken - arrival,
        "mean_itl_ms": (last - first) / (num_output_tokens - 1) if num_output_tokens > 1 else None,
        "tokens_per_second": num_output_tokens / (last - taken) * 1e3 if last > taken else None,
    }


_SHORT_IDS = frozenset({"mistral"})
"""Formats whose templates require ids of nine letters or digits."""


def call_id(call_seed: str, choice: int, index: int, format_name: str) -> str:
    """The id of a call to which the model did not give one."""
    digest = hashlib.sha256(f"{call_seed}/{choice}/{index}".encode()).hexdigest()
    return digest[:9] if format_name in _SHORT_IDS else f"call_{digest[:24]}"


class AnswerReader:
    """Parses one choice. Owned by the writer of the answer."""

    def __init__(self, plan: AnswerPlan, call_seed: str, choice: int) -> None:
        self._plan = plan
        self._call_seed = call_seed
        self._choice = choice
        self._parser: OutputParser | None = None
        self._has_ended = False
        self.has_call = False
        """Whether a call has begun, even if it is incomplete."""

    @property
    def reports_reasoning(self) -> bool:
        """Whether the model may reason."""
        return self._plan.reasoning_format is not None

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._parser is None else self._parser.num_reasoning_tokens

    def read(self, delta: Delta) -> list[Event]:
        """The client's events for the next tokens."""
        if not self._plan.reads_tokens:
            return [ContentDelta(delta.text)] if delta.text else []
        # Without the tokens' texts, the whole text counts as one token.
        tokens = delta.text_tokens or ([(0, delta.text, False)] if delta.text else [])
        parser = self._parser
        if parser is None:
            parser = self._parser = self._started(tokens)
        events = [event for token in tokens if token[0] != PROMPT_IN_REASONING for event in parser.push(*token)]
        if (delta.finish_reason or delta.is_final) and not self._has_ended:
            self._has_ended = True
            events += self._last(parser.finish(delta.finish_reason or "stop"))
        return self._shown(events)

    def finish_reason(self, reason: str) -> str:
        """The client's finish reason: `tool_calls` if the model stopped after a call."""
        if reason != "stop" or not self.has_call:
            return reason
        return "function_call" if self._is_legacy else "tool_calls"

    def as_delta(self, event: Event) -> JsonObject | None:
        """The event as a stream's `delta`; None if it has none."""
        match event:
            case ContentDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return {"reasoning": text, "reasoning_content": text}
            case ToolCallStart(index, name, id):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": id, "type": "function", "function": function}
                return {"function_call": function} if self._is_legacy else {"tool_calls": [call]}
            case ToolCallArguments(index, text):
                call = {"index": index, "function": {"arguments": text}}
                return {"function_call": {"arguments": text}} if self._is_legacy else {"tool_calls": [call]}
            case ToolCallEnd():
                return None

    @property
    def _is_legacy(self) -> bool:
        return self._plan.tool_use is not None and self._plan.tool_use.is_legacy

    def _started(self, tokens: Sequence[TextToken]) -> OutputParser:
        return OutputParser(
            self._plan.tool_format,
            self._plan.reasoning_format,
            schemas=self._plan.schemas,
            reasoning_is_open=bool(tokens) and tokens[0][0] == PROMPT_IN_REASONING,
            shows_special_tokens=self._plan.shows_special_tokens,
            free_functions=self._plan.free_functions,
        )

    def _last(self, events: list[Event]) -> list[Event]:
        """Drops content if calls are required: it is then the start of an incomplete call."""
        use = self._plan.tool_use
        if use is None or not use.is_required:
            return events
        return [event for event in events if not isinstance(event, ContentDelta)]

    def _shown(self, events: Iterable[Event]) -> list[Event]:
        shown: list[Event] = []
        max_calls = self._plan.tool_use.max_calls if self._plan.tool_use is not None else None
        for event in events:
            if isinstance(event, ReasoningDelta):
                if self._plan.includes_reasoning:
                    shown.append(event)
            elif isinstance(event, ContentDelta) or max_calls is None or event.index < max_calls:
                self.has_call = self.has_call or isinstance(event, ToolCallStart)
                shown.append(self._with_id(event) if isinstance(event, ToolCallStart) else event)
        return shown

    def _with_id(self, start: ToolCallStart) -> ToolCallStart:
        if start.id is not None:
            return start
        name = self._plan.tool_format.name if self._plan.tool_format is not None else ""
        return dataclasses.replace(start, id=call_id(self._call_seed, self._choice, start.index, name))


class Answer:
    """The whole answer of one choice."""

    def __init__(self, plan: AnswerPlan, call_seed: str, choice: int) -> None:
        self.reader = AnswerReader(plan, call_seed, choice)
        self._plan = plan
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallStart, list[str]]] = []

    def add(self, delta: Delta) -> None:
        for event in self.reader.read(delta):
            match event:
                case ContentDelta(text):
                    self._content.append(text)
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case ToolCallStart():
                    self._calls.append((event, []))
                case ToolCallArguments(_, text):
                    self._calls[-1][1].append(text)
                case ToolCallEnd():
                    pass

    def message(self) -> JsonObject:
        content, reasoning = "".join(self._content), "".join(self._reasoning) or None
        message: JsonObject = {
            "role": "assistant",
            "content": content or ("" if reasoning is None and not self._calls else None),
            "refusal": None,
        }
        if self._plan.reasoning_format is not None and self._plan.includes_reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        functions = [{"name": start.name, "arguments": "".join(parts)} for start, parts in self._calls]
        if functions and self._plan.tool_use is not None and self._plan.tool_use.is_legacy:
            message["function_call"] = functions[0]
        elif functions:
            message["tool_calls"] = [
                {"id": start.id, "type": "function", "function": function}
                for (start, _), function in zip(self._calls, functions, strict=True)
            ]
        return message
