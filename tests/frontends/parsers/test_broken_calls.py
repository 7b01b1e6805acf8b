"""Calls that the model breaks off: either a call, without the marker of its end in its arguments, or text."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import pytest

from llmbackend.frontends.conversation.tools import Function, ToolUse
from llmbackend.frontends.generation.answer import Answer
from llmbackend.frontends.generation.parsers import TOOL_CALL_FORMATS
from llmbackend.frontends.generation.plan import AnswerPlan
from llmbackend.frontends.generation.tensors import Delta

from . import laws
from .sample import Sample, Seen, cut, parse, seen, tokens

USE = ToolUse(tools=[], functions=(Function("f", {}, False),), is_required=False, max_calls=None, is_legacy=False)
HERMES = "<tool_call>\n{}\n</tool_call>"


def answered(text: str, seed: int, *, is_required: bool = False, format: str = "hermes", reason: str = "stop") -> Any:
    """The message and the reason of its end, from a text that is cut at random places."""
    use = dataclasses.replace(USE, is_required=is_required)
    plan = AnswerPlan(
        tool_use=use, tool_format=TOOL_CALL_FORMATS[format], reasoning_format=None, includes_reasoning=True,
        shows_special_tokens=False,
    )  # fmt: skip
    answer, random = Answer(plan, "id", 0), Random(seed)
    while text:
        length = random.randint(1, 9)
        answer.add(Delta("", None, [], 0, 0, False, text_tokens=[(5, text[:length], False)]))
        text = text[length:]
    answer.add(Delta("", reason, [], 0, 0, True))
    return answer.message(), answer.reader.finish_reason(reason)


def arguments(message: Any) -> list[str]:
    return [call["function"]["arguments"] for call in message.get("tool_calls", ())]


BROKEN = [
    ('{"name": "f", "arguments": {"a": "x}}', '{"a": "x}}'),
    ('{"name": "f", "arguments": {"a": {"b": 1}', '{"a": {"b": 1}'),
    ('{"name": "f", "arguments": {"a": [1, 2', '{"a": [1, 2'),
    ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
]


@pytest.mark.parametrize(("call", "expected"), BROKEN)
def test_a_call_that_lacks_its_end_is_a_call_without_the_marker(call: str, expected: str) -> None:
    whole = HERMES.replace("{}", '{"name": "f", "arguments": {"z": 9}}')
    for seed in range(6):
        broken = HERMES.replace("{}", call)
        message, reason = answered(broken, seed)
        assert (arguments(message), message["content"], reason) == ([expected], None, "tool_calls")
        message, reason = answered(f"{broken}\n{whole}", seed)
        assert (arguments(message), reason) == ([expected, '{"z": 9}'], "tool_calls")
        message, reason = answered(HERMES.replace("{}", call).replace("\n</tool_call>", "</tool_call>"), seed)
        assert arguments(message) == [expected]


def test_a_string_may_hold_the_marker() -> None:
    for text in ("</tool_call>", "a </tool_call> b", "\\n</tool_call>\\n", "<tool_call>"):
        written = '{"a": "' + text + '"}'
        call = f'{{"name": "f", "arguments": {written}}}'
        for seed in range(6):
            message, reason = answered(HERMES.replace("{}", call), seed)
            assert (arguments(message), reason) == ([written], "tool_calls")


@pytest.mark.parametrize("format", ["mistral", "deepseek_v31", "kimi_k2", "granite", "llama3_json", "qwen3_coder"])
@pytest.mark.parametrize("kept", [1, 4, 9, 14])
def test_what_a_call_that_must_be_made_begins_with_is_no_text(format: str, kept: int) -> None:
    grammar = TOOL_CALL_FORMATS[format].grammar
    assert grammar is not None
    begun = f"{grammar.begin}{grammar.call_begin}f"[:kept]
    for seed in range(3):
        message, reason = answered(begun, seed, is_required=True, format=format, reason="length")
        assert (message["content"], reason, "tool_calls" in message) == ("", "length", False)
    message, _ = answered('<tool_call>\n{"na', 0, reason="length")
    assert message["content"] == '<tool_call>\n{"na'  # a model that was free to write text


@pytest.mark.parametrize("format", ["hermes", "longcat"])
@pytest.mark.parametrize(
    "call",
    [
        '{"arguments": {"a": "</TAG>"}, "nam": "f"}\n</TAG> and text',
        '{"arguments": {\n"x": [1]}, "name\\ud83c": "f"}</TAG>',
        '{"arguments": {"x"ts": {"x": [1]}, "name": "f"}</',
        '{"arguments": {<"x":ame": "f"}</TAG>',
        '\n{"nam}e": "f", "arguments": {\n"x": "y',
        '\n{"nam}e": "f", "arguments": {\n"x": "y}\n</T\\AG>\nmore',
    ],
)
def test_a_broken_call_whose_name_is_not_known_is_text(format: str, call: str) -> None:
    tag = {"hermes": "tool_call", "longcat": "longcat_tool_call"}[format]
    text = f"<{tag}>{call}".replace("TAG", tag)
    for seed in range(6):
        message, reason = answered(text, seed, format=format)
        assert (message["content"], reason, "tool_calls" in message) == (text, "stop", False)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<|clo<|close|>response<|sep|>se|>", "<|close|>"),
        ("<<|close|>response<|sep|>|open|>res", "<|open|>res"),
        ("a<|se<|sep|><|close|>message<|sep|>p|>b", "a<|sep|>b"),
    ],
)
def test_ordinary_text_around_a_marker_is_shown_although_it_then_reads_like_a_special_token(
    text: str, content: str
) -> None:
    """The model wrote it in ordinary tokens, and might have done so without the marker between them."""
    sample = Sample(
        text=text, content=content, tools="kimi_k3", reasoning="kimi_k3", special=("<|open|>", "<|close|>", "<|sep|>")
    )
    for seed in range(6):
        parts = list(cut(tokens(sample), Random(seed), 3))
        laws.check(sample, text, parts)
        assert seen(parse(sample, parts)) == Seen(content=content)
