"""What an answer says of its prompt: its text (`echo`), its token ids, and the logprobs of its tokens.

For: requests, which ask for it; whole responses and streams, which begin with it. Does not know: how a model tells it.
Invariant: nothing of a choice is written before what its client asked of the prompt; the work is in proportion to the
prompt, so it is done outside the event loop (InferenceGate.run_in_thread).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import orjson

from .errors import JsonObject, OpenAIError
from .logprobs import first_position
from .tensors import (
    RETURN_PROMPT_FIRST_TOKEN,
    RETURN_PROMPT_TEXT,
    RETURN_PROMPT_TOKEN_IDS,
    Delta,
    PromptDetails,
    TokenEntries,
)


@dataclass(frozen=True, slots=True)
class PromptForm:
    """What a client asked to know of its prompts, beside what it sent itself."""

    has_text: bool = False
    """`echo` of a prompt that was sent as token ids."""
    has_echoed_logprobs: bool = False
    """`echo` with logprobs."""
    has_rendered_text: bool = False
    """`return_prompt_text`."""
    has_token_ids: bool = False
    logprobs: int | None = None
    """`prompt_logprobs`."""

    @property
    def is_asked(self) -> bool:
        return (
            self.has_text
            or self.has_rendered_text
            or self.has_echoed_logprobs
            or self.has_token_ids
            or self.logprobs is not None
        )

    @property
    def inputs(self) -> dict[str, str]:
        """The model's inputs that ask for it, each with the field that needs it."""
        wanted = {
            RETURN_PROMPT_TEXT: (
                "echo" if self.has_text else "return_prompt_text",
                self.has_text or self.has_rendered_text,
            ),
            RETURN_PROMPT_FIRST_TOKEN: ("echo", self.has_echoed_logprobs),
            RETURN_PROMPT_TOKEN_IDS: (
                "return_token_ids" if self.has_token_ids else "prompt_logprobs",
                self.has_token_ids or self.has_echoed_logprobs or self.logprobs is not None,
            ),
        }
        return {name: field for name, (field, is_wanted) in wanted.items() if is_wanted}

    def fields(self, prompt: PromptDetails) -> JsonObject:
        """The fields of a response, of a choice in completions."""
        fields: JsonObject = {}
        if self.has_rendered_text:
            fields["prompt_text"] = prompt.text
        if self.has_token_ids:
            fields["prompt_token_ids"] = prompt.token_ids
        if self.logprobs is not None:
            # JSON has no minus infinity: the interface sends null, vLLM's server this number.
            text = prompt.logprobs_json.replace(b'"logprob":null', b'"logprob":-9999.0')
            fields["prompt_logprobs"] = orjson.Fragment(text)
        return fields

    def positions(self, prompt: PromptDetails) -> list[TokenEntries]:
        """What logprobs begin with: those of the prompt, where they are echoed. The first token has none."""
        if not self.has_echoed_logprobs:
            return []
        first = first_position(prompt.token_ids[0], prompt.first_token)
        return [first, *(entries for entries in prompt.logprobs[1:] if entries is not None)]


NO_PROMPT_FORM = PromptForm()


class Writer(Protocol):
    """Makes the chunks of a stream."""

    def begin(self) -> bytes: ...
    def begin_choice(self, index: int, prompt: PromptDetails) -> bytes: ...
    def delta(self, index: int, delta: Delta) -> bytes: ...
    def end(self) -> bytes: ...

    def ping(self) -> bytes:
        """Says that the stream goes on, while nothing happens."""
        ...

    def fail(self, error: OpenAIError) -> bytes:
        """The stream's end where the answer failed."""
        ...


class PromptFirst:
    """A writer whose choices begin with what the model tells of their prompt: deltas that come earlier wait for it."""

    def __init__(self, writer: Writer, n: int) -> None:
        """n: choices of each prompt"""
        self._writer = writer
        self._n = n
        self._told: set[int] = set()
        self._held: list[tuple[int, Delta]] = []

    def begin(self) -> bytes:
        return b""

    def begin_choice(self, index: int, prompt: PromptDetails) -> bytes:
        return self._writer.begin_choice(index, prompt)

    def delta(self, index: int, delta: Delta) -> bytes:
        number = index // self._n
        if delta.prompt is not None:
            return self._begun(number, delta.prompt) + self._writer.delta(index, delta) + self._released(number)
        if number in self._told:
            return self._writer.delta(index, delta)
        self._held.append((index, delta))
        return b""

    def end(self) -> bytes:
        held = b"".join(self._writer.delta(index, delta) for index, delta in self._held)
        return held + self._writer.end()

    def ping(self) -> bytes:
        return self._writer.ping()

    def fail(self, error: OpenAIError) -> bytes:
        return self._writer.fail(error)

    def _begun(self, number: int, prompt: PromptDetails) -> bytes:
        self._told.add(number)
        choices = range(number * self._n, (number + 1) * self._n)
        return b"".join(self._writer.begin_choice(index, prompt) for index in choices)

    def _released(self, number: int) -> bytes:
        held, self._held = self._held, []
        chunks: list[bytes] = []
        for index, delta in held:
            if index // self._n == number:
                chunks.append(self._writer.delta(index, delta))
            else:
                self._held.append((index, delta))
        return b"".join(chunks)
