"""Markers and budget of reasoning: what of them reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest

from llmbackend.adapter.structured_outputs.reasoning import read_reasoning
from llmbackend.adapter.text.tokenizer import ByteTokenizer
from llmbackend.core.backend_api import TritonError

MARKERS = ["<t>", "</t>"]


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [("ask", False), ("ask<t>", True), ("ask<t>\n ", True), ("<t>x</t>", False), ("a <t> b", False)],
)
def test_reasoning_is_open_where_the_prompt_ends_with_its_start(prompt: str, is_open: bool) -> None:
    params = read_reasoning({"reasoning_markers": MARKERS, "thinking_token_budget": 7})
    assert params is not None
    reasoning = params.for_prompt(tuple(prompt.encode()), ByteTokenizer())
    assert (reasoning.is_open, reasoning.max_tokens) == (is_open, 7)
    assert (bytes(reasoning.start_token_ids), bytes(reasoning.end_token_ids)) == (b"<t>", b"</t>")


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"thinking_token_budget": 3}, "thinking_token_budget"),
        ({"reasoning_markers": MARKERS, "thinking_token_budget": -2}, "thinking_token_budget"),
        ({"reasoning_markers": MARKERS, "thinking_token_budget": True}, "thinking_token_budget"),
        ({"reasoning_markers": ["a"]}, "reasoning_markers"),
        ({"reasoning_markers": "["}, "reasoning_markers"),
        ({"reasoning_markers": ["a", "b" * 300]}, "reasoning_markers"),
        ({"reasoning_markers": ["a", "\ud800"]}, "reasoning_markers"),
    ],
)
def test_what_is_refused_by_name(parameters: dict[str, Any], param: str) -> None:
    with pytest.raises(TritonError) as caught:
        read_reasoning(parameters)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message


def test_nothing_said_of_reasoning() -> None:
    assert read_reasoning({"max_tokens": 3}) is None


def test_a_budget_of_minus_one_is_no_limit() -> None:
    params = read_reasoning({"reasoning_markers": MARKERS, "thinking_token_budget": -1})
    assert params is not None and params.max_tokens is None
    assert read_reasoning({"thinking_token_budget": -1}) is None
