"""Fewer, larger chunks: `stream_interval` tokens of a choice go out together.

For: the router. Does not know: chunks. Invariant: the first and the last tokens of a choice wait for no others.
"""

from __future__ import annotations

import msgspec

from .errors import OpenAIError
from .prompt_details import Writer
from .tensors import Delta, PromptDetails


class IntervalWriter:
    """A writer that gets a choice's deltas joined. Owner: the stream's events."""

    def __init__(self, writer: Writer, interval_tokens: int) -> None:
        self._writer = writer
        self._interval_tokens = interval_tokens
        self._begun: set[int] = set()
        self._waiting: dict[int, Delta] = {}

    def begin(self) -> bytes:
        return self._writer.begin()

    def begin_choice(self, index: int, prompt: PromptDetails) -> bytes:
        return self._writer.begin_choice(index, prompt)

    def delta(self, index: int, delta: Delta) -> bytes:
        waiting = self._waiting.pop(index, None)
        delta = delta if waiting is None else _joined(waiting, delta)
        is_last = delta.finish_reason is not None or delta.is_final
        if index not in self._begun or is_last or delta.num_output_tokens >= self._interval_tokens:
            self._begun.add(index)
            return self._writer.delta(index, delta)
        self._waiting[index] = delta
        return b""

    def end(self) -> bytes:
        return self._writer.end()

    def ping(self) -> bytes:
        return self._writer.ping()

    def fail(self, error: OpenAIError) -> bytes:
        return self._writer.fail(error)


def _joined(first: Delta, second: Delta) -> Delta:
    return msgspec.structs.replace(
        second,
        text=first.text + second.text,
        logprobs=[*first.logprobs, *second.logprobs],
        num_output_tokens=first.num_output_tokens + second.num_output_tokens,
        text_tokens=(*first.text_tokens, *second.text_tokens),
        token_ids=[*first.token_ids, *second.token_ids],
        prompt=first.prompt or second.prompt,
    )
