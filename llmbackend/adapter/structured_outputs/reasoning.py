"""A request's reasoning markers and budget (vLLM's names), converted to tokens for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from llmbackend.engine.messages import Reasoning

from .constraint import RequestPath, from_json_text

MARKERS, BUDGET = "reasoning_markers", "thinking_token_budget"
FIELDS: Final = (MARKERS, BUDGET)
"""The sampling parameters read by `read_reasoning`."""
_MAX_MARKER_CHARS = 256
_MAX_BUDGET_TOKENS = 1 << 31
_TAIL_TOKENS = 16
"""Tokens at the end of the prompt that are searched for the marker, besides its own: whitespace may follow it."""


class Tokens(Protocol):
    """The parts of a tokenizer that are used here."""

    def encode(self, text: str, *, add_special_tokens: bool, below: int | None = None) -> list[int]: ...
    def token_text(self, token_id: int) -> str: ...


@dataclass(frozen=True, slots=True)
class ReasoningParams:
    start: str
    """"" = every prompt ends within reasoning."""
    end: str
    max_tokens: int | None

    def for_prompt(self, prompt_token_ids: Sequence[int], tokens: Tokens) -> Reasoning:
        """Raises TritonError INVALID_ARG for a marker that is not a token."""
        start = tuple(tokens.encode(self.start, add_special_tokens=False)) if self.start else ()
        end = tuple(tokens.encode(self.end, add_special_tokens=False))
        if not end:
            RequestPath(MARKERS).refuse(self.end, "an end marker of at least one token")
        tail = prompt_token_ids[-_TAIL_TOKENS - len(start) :]
        text = "".join(map(tokens.token_text, tail)).rstrip()
        is_open = text.endswith(self.start.rstrip()) if self.start else True
        return Reasoning(start_token_ids=start, end_token_ids=end, max_tokens=self.max_tokens, is_open=is_open)


def read_reasoning(parameters: Mapping[str, Any]) -> ReasoningParams | None:
    """None for a request without these parameters. Raises TritonError INVALID_ARG."""
    markers, budget = parameters.get(MARKERS), parameters.get(BUDGET)
    if budget is not None and (type(budget) is not int or not -1 <= budget <= _MAX_BUDGET_TOKENS):
        RequestPath(BUDGET).refuse(budget, f"an integer from 0 to {_MAX_BUDGET_TOKENS}, or -1 for no limit")
    if budget == -1:
        budget = None
    if markers is None:
        if budget is not None:
            RequestPath(BUDGET).wrong(f"expected it together with '{MARKERS}': the model has no known reasoning format")
        return None
    start, end = _pair(markers)
    return ReasoningParams(start, end, budget)


def _pair(markers: object) -> tuple[str, str]:
    place, expected = RequestPath(MARKERS), "a list of two strings: the start and the end of reasoning"
    markers = from_json_text(markers, place, expected)
    if not isinstance(markers, list) or len(markers) != 2 or not all(isinstance(marker, str) for marker in markers):
        place.refuse(markers, expected)
    for index, marker in enumerate(markers):
        (place / index).check_at_most(len(marker), _MAX_MARKER_CHARS, "characters")
        (place / index).check_encodable(marker)
    return markers[0], markers[1]
