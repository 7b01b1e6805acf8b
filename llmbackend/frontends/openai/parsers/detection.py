"""Finds which formats a model writes, by what its chat template says.

For: models for which nobody has named a parser. Does not know: models, files. Invariant: what a template does not say
is not guessed: "" then.
"""

from __future__ import annotations


def detect(chat_template: str) -> tuple[str, str]:
    """The names of the tool-call format and of the reasoning format."""
    tools = "hermes" if "<tool_call>" in chat_template else ""
    reasoning = "qwen3" if "</think>" in chat_template else ""
    return tools, reasoning
