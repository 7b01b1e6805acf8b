"""Every format reads its sample texts as it should, and tells the same of any text however its stream is cut."""

from __future__ import annotations

import pytest

from llmbackend.frontends.generation.parsers import REASONING_FORMATS, TOOL_CALL_FORMATS, OutputParser
from tests.frontends.parsers.laws import Cuts, distinct_formats
from tests.frontends.parsers.sample import Sample, Seen, parse, seen, tokens
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


def test_reasoning_tokens_are_counted() -> None:
    parser = OutputParser(None, REASONING_FORMATS["qwen3"])
    for text in ("<think>", "a", "b", "</think>", "c"):
        parser.push(0, text, False)
    assert parser.num_reasoning_tokens == 4
    assert OutputParser(None, REASONING_FORMATS["qwen3"]).num_reasoning_tokens == 0
