"""What holds for every format and every text, also for one that a model would hardly write.

A stream tells what the whole tells; no special token and no marker of a call that was read comes out as text; a text
without calls and reasoning comes out as it is; arguments made from another notation are JSON.
"""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

from llmbackend.frontends.generation.parsers import REASONING_FORMATS, TOOL_CALL_FORMATS, ToolCallEnd, ToolCallStart
from llmbackend.frontends.generation.parsers.tables import (
    LiteralCall,
    MarkedCalls,
    NestedCall,
    TaggedCall,
    ToolCallFormat,
)

from .sample import Sample, Seen, Token, cut, parse, seen, tokens
from .samples import SAMPLES

LENGTHS = (1, 3, 10)
"""The longest token of a cut, in characters."""


class Cuts:
    """Texts of one format and random cuts of them: each sample first as it is, then changed."""

    def __init__(self, format_name: str, seed: int = 0) -> None:
        self.format_name = format_name
        self._random = Random(f"{format_name} {seed}")
        self._samples = [sample for sample in SAMPLES if format_name in (sample.tools, sample.reasoning)]
        assert self._samples, f"the format {format_name} has no sample texts"
        self._number = 0

    def check_next(self) -> None:
        """Raises AssertionError where a law is broken."""
        random, number = self._random, self._number
        sample = self._samples[number % len(self._samples)]
        text = sample.text if number < len(self._samples) else changed(sample.text, self._samples, random)
        self._number += 1
        check(sample, text, list(cut(tokens(sample, text), random, random.choice(LENGTHS))))


def changed(text: str, samples: list[Sample], random: Random) -> str:
    """The text with parts removed, doubled, cut off or mixed with others: what a model writes when it fails."""
    for _ in range(random.randint(1, 3)):
        begin = random.randint(0, len(text))
        end = min(len(text), begin + random.randint(0, 12))
        other = random.choice(samples).text
        other = other[random.randint(0, len(other)) :]
        strange = random.choice(("{", "<", "[", '"', "\\", "\n", "é🌦", "\\ud83c", "0" * 20, "'", "}", "]", ")", other))
        text = random.choice(
            (text[:begin] + text[end:], text[:end] + text[begin:], text[:begin], text[:begin] + strange + text[begin:])
        )
    return text


def check(sample: Sample, text: str, parts: list[Token]) -> None:
    whole = tokens(sample, text)
    events = parse(sample, whole)
    assert parse(sample, parts) == events, f"a cut of {text!r} of {sample.tools or sample.reasoning}: {parts}"
    visible = seen(events)
    shown = [event.text for event in events if not isinstance(event, ToolCallStart | ToolCallEnd)]
    ordinary = _ordinary(sample, text)
    joined = _around_content_markers(sample, text)
    hidden = [special for special in sample.special if special not in ordinary and special not in joined]
    assert not any(special in piece for special in hidden for piece in shown), (text, visible)
    if not visible.calls and not _may_reason(sample):
        assert visible.content == ordinary, (text, visible)
    _check_arguments(sample, text, visible)


def _ordinary(sample: Sample, text: str) -> str:
    return "".join(piece for piece, is_special in tokens(sample, text) if not is_special)


def _around_content_markers(sample: Sample, text: str) -> str:
    """The ordinary text on both sides of a marker stands together, and may then read like a special token."""
    reasoning = REASONING_FORMATS.get(sample.reasoning)
    parts = [text]
    for marker in (*reasoning.content_begin, *reasoning.content_end) if reasoning else ():
        parts = [piece for part in parts for piece in part.split(marker)]
    return "".join(_ordinary(sample, part) for part in parts)


def _may_reason(sample: Sample) -> bool:
    return bool(sample.reasoning) or not isinstance(TOOL_CALL_FORMATS[sample.tools].body, MarkedCalls)


def _check_arguments(sample: Sample, text: str, visible: Seen) -> None:
    """Arguments that are not the model's own bytes are JSON."""
    table = TOOL_CALL_FORMATS.get(sample.tools)
    if table is None or not _converts(table):
        return
    for call in visible.calls:
        if call.is_complete:
            assert isinstance(json.loads(call.arguments), dict), (text, call)


def _converts(table: ToolCallFormat) -> bool:
    return isinstance(table.body, MarkedCalls) and all(
        isinstance(call, LiteralCall | NestedCall) or (isinstance(call, TaggedCall) and not call.json_begin)
        for call in table.body.calls
    )


def distinct_formats() -> list[str]:
    """One name for each table: several of vLLM's names stand for the same one."""
    tools: dict[ToolCallFormat, str] = {}
    for name, table in TOOL_CALL_FORMATS.items():
        tools.setdefault(replace(table, name=""), name)
    reasoning = {replace(table, name=""): name for name, table in REASONING_FORMATS.items()}
    return [*tools.values(), *(name for name in reasoning.values() if name not in TOOL_CALL_FORMATS)]
