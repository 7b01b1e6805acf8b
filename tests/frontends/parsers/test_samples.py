"""Every format reads its sample texts as it should, and tells the same of any text however its stream is cut."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from llmbackend.frontends.generation.parsers import REASONING_FORMATS, TOOL_CALL_FORMATS, MarkedCalls, OutputParser
from llmbackend.frontends.generation.parsers.reader import MAX_HELD_CHARS
from tests.frontends.parsers.laws import Cuts, distinct_formats
from tests.frontends.parsers.sample import Call, Sample, Seen, cut, parse, seen, tokens
from tests.frontends.parsers.samples import SAMPLES
from tests.helpers.machine_settings import tries

NUM_CUTS = 240
"""For each format, over its samples and changed ones."""


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.tools}-{sample.reasoning}-{sample.text[:20]}")
def test_a_sample(sample: Sample) -> None:
    assert seen(parse(sample, tokens(sample))) == Seen(sample.content, sample.reasons, list(sample.calls))


@pytest.mark.parametrize("name", distinct_formats())
def test_the_laws_hold_for_any_cut_of_any_text(name: str) -> None:
    cuts = Cuts(name)
    for _ in range(tries(NUM_CUTS)):
        cuts.check_next()


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_hostile_text_is_bounded_and_comes_out(name: str) -> None:
    for symbol in ("<", "[", "{", '{"', "{'a':", "<tool_call>", "\n", '{"name":', "functools["):
        parser = OutputParser(TOOL_CALL_FORMATS[name])
        text = symbol * 5_000
        events = [event for begin in range(0, len(text), 7) for event in parser.push(0, text[begin : begin + 7], False)]
        visible = seen(events + parser.finish("length"))
        assert visible.calls or visible.content == text


LONG_LIST, LONG_OBJECT = json.dumps(["a"] * MAX_HELD_CHARS), json.dumps({"a": "b" * MAX_HELD_CHARS})
LONG_WORD = "a" * 2 * MAX_HELD_CHARS


@pytest.mark.parametrize("longest", [999, 99999999])
def test_a_long_value_is_a_list_or_an_object_if_its_type_says_so(longest: int) -> None:
    cases: list[tuple[Any, str, bool]] = [
        ("array", LONG_LIST, True),
        (["object", "null"], LONG_OBJECT, True),
        (["array", "string"], LONG_LIST, False),
        ("array", LONG_WORD, False),
    ]
    for kind, value, is_json in cases:
        text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
        sample = Sample(text=text, tools="qwen3_coder", schemas={"f": {"properties": {"a": {"type": kind}}}})
        (call,) = seen(parse(sample, cut(tokens(sample), Random(0), longest))).calls
        assert call == Call("f", f'{{"a": {value if is_json else json.dumps(value)}}}')


def test_reasoning_tokens_are_counted() -> None:
    parser = OutputParser(None, REASONING_FORMATS["qwen3"])
    for token_id, text in ((0, "\n"), (0, "<th"), (0, "ink>"), (0, "a"), (0, ""), (-1, "b"), (0, "</think>"), (0, "c")):
        parser.push(token_id, text, False)
    assert parser.num_reasoning_tokens == 6
    parser = OutputParser(None, REASONING_FORMATS["qwen3"])
    for text in ("<th", "e", "<think>"):
        parser.push(0, text, False)
    assert parser.num_reasoning_tokens == 0


def test_of_messages_those_of_reasoning_are_counted() -> None:
    counts = []
    parser = OutputParser(TOOL_CALL_FORMATS["openai"], REASONING_FORMATS["openai_gptoss"])
    markers = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    commentary = ("<|channel|>", "commentary", "<|message|>", "I", " look", "<|end|>")
    analysis = ("<|start|>", "assistant", "<|channel|>", "analysis", "<|message|>", "Hm", "<|end|>")
    final = ("<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Yes", "<|end|>")
    for message in (commentary, analysis, final, analysis):
        for text in message:
            parser.push(0, text, text in markers)
        counts.append(parser.num_reasoning_tokens)
    assert counts == [0, len(analysis), len(analysis), 2 * len(analysis)]


IN_SECTIONS = [
    sample
    for sample in SAMPLES
    if sample.calls
    and not sample.reasoning
    and isinstance(body := TOOL_CALL_FORMATS[sample.tools].body, MarkedCalls)
    and sample.text.startswith(body.begin)
    and not sample.content.startswith(body.begin)
]


@pytest.mark.parametrize("sample", IN_SECTIONS, ids=lambda sample: f"{sample.tools}-{sample.text[:20]}")
def test_calls_end_reasoning_that_lacks_its_end(sample: Sample) -> None:
    schemas = {call.name: sample.schemas.get(call.name, {}) for call in sample.calls}
    inside = replace(sample, text=f"<think>Hm. {sample.text}", reasoning="qwen3", schemas=schemas)
    expected = Seen(sample.content, "Hm. ", list(sample.calls))
    for longest in (1, 5, 999):
        assert seen(parse(inside, cut(tokens(inside), Random(0), longest))) == expected


def test_reasoning_that_only_resembles_calls_is_linear_and_ends() -> None:
    text = "<tool_call>{" * 10_000 + "</think>Yes." + "<tool_call>{" * 10_000
    parser = OutputParser(TOOL_CALL_FORMATS["glm45"], REASONING_FORMATS["glm45"], reasoning_is_open=True)
    events = [event for begin in range(0, len(text), 7) for event in parser.push(0, text[begin : begin + 7], False)]
    visible = seen(events + parser.finish("stop"))
    assert (visible.reasons + "</think>" + visible.content, visible.calls) == (text, [])


def test_tokens_of_a_call_are_of_reasoning_only_if_its_end_follows() -> None:
    call = ("<tool_call>", "{", '"name": "f"}', "</tool_call>")
    for end, count in (((), 5), (("</think>", "Yes."), 10)):
        parser = OutputParser(TOOL_CALL_FORMATS["hermes"], REASONING_FORMATS["qwen3"], schemas={"f": {}})
        for text in ("<think>", "Hm", "<tool_call>", "{", "x", *call, *end):
            parser.push(0, text, False)
        parser.finish("stop")
        assert parser.num_reasoning_tokens == count
