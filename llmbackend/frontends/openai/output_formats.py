"""Which formats a model writes its tool calls and its reasoning in.

For: models.py, which finds them once per load. Does not know: requests. Invariant: what the model's configuration names
counts, then what its chat template shows; a name that no format has is told to the client that needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from .errors import OpenAIError
from .parsers import REASONING_FORMATS, TOOL_CALL_FORMATS, ReasoningFormat, ToolCallFormat, detect

_CHAT_TEMPLATE, _TOOL_CALL_PARSER, _REASONING_PARSER = "chat_template", "tool_call_parser", "reasoning_parser"
"""Parameters of a model's configuration: a template's text, and names of formats."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """Of one model."""

    tool_calls: ToolCallFormat | None = None
    """None: no format is known."""
    reasoning: ReasoningFormat | None = None
    """None: the model does not reason."""
    error: str = ""
    """What is wrong with the names in the model's configuration."""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> OutputFormats:
        """By the parameters of a model's configuration."""
        tool_calls, reasoning = parameters.get(_TOOL_CALL_PARSER, ""), parameters.get(_REASONING_PARSER, "")
        error = _unknown(_TOOL_CALL_PARSER, tool_calls, TOOL_CALL_FORMATS)
        error = error or _unknown(_REASONING_PARSER, reasoning, REASONING_FORMATS)
        shown_calls, shown_reasoning = detect(parameters.get(_CHAT_TEMPLATE, ""))
        return cls(
            TOOL_CALL_FORMATS.get(tool_calls or shown_calls),
            REASONING_FORMATS.get(reasoning or shown_reasoning),
            error,
        )

    def check(self, model: str) -> None:
        """Raises OpenAIError 500 when the model's configuration is wrong."""
        if self.error:
            message = f"the model '{model}' is configured wrongly: {self.error}"
            raise OpenAIError(message, param="model", status=500, kind="server_error")


NO_FORMATS = OutputFormats()


def _unknown(parameter: str, name: str, formats: Mapping[str, T]) -> str:
    if not name or name in formats:
        return ""
    return f"'{parameter}' is '{name}', expected one of: {', '.join(sorted(formats))}"
