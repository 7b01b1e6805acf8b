"""Reasoning: what a chat may ask about it.

For: schema.py, whose chat request has these fields, and requests.py. Does not know: how a model writes its reasoning.
Invariant: `reasoning_effort` is the chat template's, the others are about this frontend's answer and the engine.
Source: OpenAI's API reference for `reasoning_effort`, vLLM's protocol for the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from .validation import ClosedObject, Expected, Flag, Range

Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    Expected('one of "none", "minimal", "low", "medium", "high", "xhigh", "max"'),
]


class ReasoningFields(ClosedObject):
    reasoning_effort: Effort | None = Field(None, description="For chat templates that read it.")
    include_reasoning: Flag | None = Field(None, description="false: the answer comes without the reasoning.")
    thinking_token_budget: Annotated[int, Range(0)] | None = Field(
        None, description="The reasoning is ended after so many tokens."
    )

    def reasoning_use(self) -> ReasoningUse:
        return ReasoningUse(self.include_reasoning is not False, self.thinking_token_budget)


@dataclass(frozen=True, slots=True)
class ReasoningUse:
    """What a request asks for about reasoning."""

    is_included: bool = True
    """Whether the answer has it."""
    budget_tokens: int | None = None
    """None: no limit."""


NO_REASONING_USE = ReasoningUse()
