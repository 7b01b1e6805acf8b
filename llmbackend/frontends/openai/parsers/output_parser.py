"""OutputParser: reads one choice's tokens, and tells what is content, what is reasoning, what a tool call.

For: writers of responses, of choices whose request has tools or whose model reasons; others need none. Does not know:
requests, JSON of responses. Invariants: events are a function of the tokens alone, and pieces put together do not
depend on how the text was cut into tokens; special tokens never come out as text unless they are shown; the work is
linear in the output, and what is held back is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .events import Event, Sink
from .messages import MessagesReader
from .reader import Reader, Reading
from .sections import MarkedCallsReader
from .tables import MarkedCalls, Messages, ReasoningFormat, ToolCallFormat

NO_CALLS = MarkedCalls(calls=())


class OutputParser:
    """Owner: the writer of its choice. `push` each token in order, then `finish`, once."""

    def __init__(
        self,
        tool_call_format: ToolCallFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
        *,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        reasoning_is_open: bool = False,
        shows_special_tokens: bool = False,
        strings_are_text: bool = False,
    ) -> None:
        """tool_call_format: None where the request has no tools: no calls are looked for
        reasoning_format: None where the model does not reason
        schemas: the request's functions by name, with the JSON schema of their parameters
        reasoning_is_open: whether the prompt ends inside reasoning, so that the output begins there
        shows_special_tokens: whether special tokens that are no markers are content (skip_special_tokens is false)
        strings_are_text: whether the model writes every string between tags as its text, quotes and all; otherwise one
            that its schema narrows may also come as JSON, which is what a grammar holds a model to
        """
        self._reader = Reader(shows_special_tokens=shows_special_tokens)
        self._sink = Sink()
        reader, sink = self._reader, self._sink
        body = tool_call_format.body if tool_call_format else NO_CALLS
        messages = reasoning_format.messages if reasoning_format and not tool_call_format else None
        self._body: MarkedCallsReader | MessagesReader
        if isinstance(body, Messages):
            self._body = MessagesReader(reader, sink, body, reads_calls=True, names=(schemas or {}).keys())
        elif messages is not None:
            self._body = MessagesReader(reader, sink, messages, reads_calls=False, names=())
        else:
            self._body = MarkedCallsReader(reader, sink, body, reasoning_format, schemas or {}, strings_are_text)
        self._sink.is_reasoning = reasoning_is_open and reasoning_format is not None
        self._num_tokens = 0
        self.num_reasoning_tokens = 0
        """Tokens of the reasoning, with those of its markers."""
        self._reading = self._read()
        next(self._reading)

    def push(self, token_id: int, text: str, is_special: bool) -> list[Event]:
        """What the next token tells. `token_id` is not looked at: formats are texts, whatever the vocabulary."""
        self._num_tokens += 1
        was_reasoning = self._sink.is_reasoning
        if text:
            self._reader.feed(text, is_special)
            next(self._reading)
        if was_reasoning or self._sink.is_reasoning:
            # What stands before the first reasoning is its marker.
            self.num_reasoning_tokens = self.num_reasoning_tokens + 1 if self.num_reasoning_tokens else self._num_tokens
        return self._sink.take()

    def finish(self, finish_reason: str) -> list[Event]:
        """What was held back, when the generation has ended. A call that is not complete then gets no end."""
        self._reader.has_ended, self._reader.is_cut_off = True, finish_reason == "length"
        next(self._reading, None)
        return self._sink.take()

    def _read(self) -> Reading[None]:
        yield from self._body.read()
        while True:
            yield
