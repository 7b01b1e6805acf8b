"""Counts the tokens of a request as the model reports them.

For: the writers of responses and chunks. Does not know: tokenizers; it never guesses. Invariant: what is shown is the
sum of what the model said for each choice.
"""

from __future__ import annotations

from .fields import JsonObject
from .tensors import Delta


class Usage:
    """The running counts of one response."""

    def __init__(self) -> None:
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        self._completion_tokens = 0

    def add(self, index: int, delta: Delta) -> None:
        if delta.num_input_tokens:
            self._prompt_tokens[index] = delta.num_input_tokens
        if delta.num_cached_tokens is not None:
            self._cached_tokens[index] = delta.num_cached_tokens
        self._completion_tokens += delta.num_output_tokens

    def total(self) -> JsonObject | None:
        """Of a response that is complete; None when the model has reported nothing."""
        return self.as_json() if self._prompt_tokens or self._completion_tokens else None

    def as_json(self) -> JsonObject:
        prompt = sum(self._prompt_tokens.values())
        usage: JsonObject = {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
        }
        if self._cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(self._cached_tokens.values())}
        return usage
