"""Every format reads its sample texts as it should, and tells the same of any text however its stream is cut."""

from __future__ import annotations

from random import Random

import pytest

from llmbackend.frontends.openai.parsers import REASONING_FORMATS, TOOL_CALL_FORMATS, OutputParser
from tests.frontends.parsers.sample import Sample, Seen, cut, parse, seen, tokens
from tests.frontends.parsers.samples import SAMPLES

NUM_CUTS = 240
"""For each format, over its samples and changed ones."""


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.tools}-{sample.reasoning}-{sample.text[:20]}")
def test_a_sample(sample: Sample) -> None:
    assert seen(parse(sample, tokens(sample))) == Seen(sample.content, sample.reasons, list(sample.calls))


def of_format(name: str) -> list[Sample]:
    return [sample for sample in SAMPLES if name in (sample.tools, sample.reasoning)]


@pytest.mark.parametrize("name", [*TOOL_CALL_FORMATS, *REASONING_FORMATS])
def test_any_cut_tells_what_the_whole_tells(name: str) -> None:
    random = Random(name)
    samples = of_format(name)
    assert samples, f"the format {name} has no sample texts"
    for number in range(NUM_CUTS):
        sample = samples[number % len(samples)]
        text = sample.text if number < len(samples) else changed(sample.text, random)
        whole = tokens(sample, text)
        parts = list(cut(whole, random, random.choice((1, 3, 10))))
        assert parse(sample, parts) == parse(sample, whole), (sample, parts)


def changed(text: str, random: Random) -> str:
    """The text with parts removed, doubled or cut off: what a model writes when it fails."""
    for _ in range(random.randint(1, 3)):
        begin = random.randint(0, len(text))
        end = min(len(text), begin + random.randint(0, 12))
        text = random.choice(
            (text[:begin] + text[end:], text[:end] + text[begin:], text[:begin], text[:begin] + "{<[" + text[begin:])
        )
    return text


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
