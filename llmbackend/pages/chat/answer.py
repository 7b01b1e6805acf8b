"""Answer: a model's answer while it arrives, assembled from the chunks of a chat completion.

Used by the chat page. Independent of HTTP and of what is shown. Invariant: `turn` always contains everything that has
arrived, including the earlier text of a continued answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from .conversation import STOPPED, Timing, TokenProbability, ToolCall, Turn

_MAX_PROBABILITIES: Final = 4096
"""For how many tokens of an answer the probabilities are stored."""

_MIN_STREAMED_S: Final = 0.05
"""No speed is shown for answers that arrive faster; they consist of one or two pieces."""


class Answer:
    def __init__(self, base: Turn, now_s: Callable[[], float] = time.monotonic) -> None:
        """base: the answer before this request."""
        self._base = base
        self._now_s = now_s
        self._began_s = now_s()
        self._first_s = 0.0
        self._last_s = 0.0
        self._content = [base.content]
        self._reasoning = [base.reasoning]
        self._calls: dict[int, list[str]] = {}
        """By the call's index: id, name, arguments."""
        self._probabilities = list(base.probabilities)
        self._usage: dict[str, Any] = {}
        self._finish_reason = ""
        self.error = ""

    def take(self, chunk: dict[str, Any]) -> None:
        if error := chunk.get("error"):
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
        if usage := chunk.get("usage"):
            self._usage = usage
        for choice in chunk.get("choices") or ():
            self._take_choice(choice)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        if any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")):
            self._last_s = self._now_s()
            self._first_s = self._first_s or self._last_s
        self._content.append(delta.get("content") or "")
        self._reasoning.append(delta.get("reasoning_content") or "")
        for call in delta.get("tool_calls") or ():
            self._take_call(call)
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            if len(self._probabilities) < _MAX_PROBABILITIES:
                self._probabilities.append(_probability(entry))
        self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def _take_call(self, delta: dict[str, Any]) -> None:
        parts = self._calls.setdefault(int(delta.get("index", 0)), ["", "", ""])
        function = delta.get("function") or {}
        parts[0] += delta.get("id") or ""
        parts[1] += function.get("name") or ""
        parts[2] += function.get("arguments") or ""

    @property
    def has_begun(self) -> bool:
        return bool(self._first_s)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(ToolCall(*parts) for _, parts in sorted(self._calls.items()))

    def turn(self, *, is_stopped: bool = False) -> Turn:
        """The answer so far. is_stopped: whether the viewer stopped it"""
        return msgspec.structs.replace(
            self._base,
            content=self.content,
            reasoning=self.reasoning,
            tool_calls=self.tool_calls,
            finish_reason=STOPPED if is_stopped else self._finish_reason,
            error=self.error,
            timing=self._timing(),
            probabilities=tuple(self._probabilities),
        )

    def _timing(self) -> Timing | None:
        """A continued answer has the figures of its beginning, with all tokens and the rate of its last part."""
        output_tokens, begun = self._usage.get("completion_tokens", 0), self._base.timing
        if not self._first_s or not output_tokens or (self._base.content and begun is None):
            return begun
        details = self._usage.get("prompt_tokens_details") or {}
        streamed_s = self._last_s - self._first_s
        tokens_per_s = (output_tokens - 1) / streamed_s if streamed_s > _MIN_STREAMED_S else 0.0
        if begun is not None:
            output_tokens += begun.output_tokens
            return msgspec.structs.replace(begun, tokens_per_s=tokens_per_s, output_tokens=output_tokens)
        return Timing(
            first_token_ms=(self._first_s - self._began_s) * 1e3,
            tokens_per_s=tokens_per_s,
            output_tokens=output_tokens,
            prompt_tokens=self._usage.get("prompt_tokens", 0),
            cached_tokens=details.get("cached_tokens") or 0,
        )


def _probability(entry: dict[str, Any]) -> TokenProbability:
    top = tuple((other["token"], other["logprob"]) for other in entry.get("top_logprobs") or ())
    return TokenProbability(entry["token"], entry["logprob"], top)
