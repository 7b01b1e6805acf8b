"""What a format's grammar makes a model write, the format's parser reads: for every format that has a grammar.

Also the oracle for families of which no package at hand ships a template (Granite 3, Phi-4-mini, xLAM, InternLM …).
"""

from __future__ import annotations

import json
from random import Random

import pytest

from llmbackend.frontends.openai.parsers import TOOL_CALL_FORMATS, CallGrammar
from tests.frontends.parsers.sample import Sample, cut, parse, seen, tokens
from tests.frontends.parsers.turns import SCHEMAS, random_calls

NUM_TURNS = 40
SPECIAL = {"openai": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>")}
"""Markers that are read only as special tokens."""
ENFORCED = [name for name, table in TOOL_CALL_FORMATS.items() if table.grammar]


@pytest.mark.parametrize("name", ENFORCED)
def test_enforced_calls_are_read(name: str) -> None:
    grammar = TOOL_CALL_FORMATS[name].grammar
    assert grammar
    random = Random(name)
    for _ in range(NUM_TURNS):
        calls = random_calls(random)
        sample = Sample(text=written(calls, grammar), tools=name, special=SPECIAL.get(name, ()), schemas=SCHEMAS)
        found = seen(parse(sample, cut(tokens(sample), random, 8)))
        assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls, sample.text
        assert all(call.is_complete for call in found.calls)
        assert not found.content


@pytest.mark.parametrize("name", [name for name in ENFORCED if TOOL_CALL_FORMATS[name].trigger])
def test_a_trigger_begins_what_the_grammar_writes(name: str) -> None:
    table = TOOL_CALL_FORMATS[name]
    assert table.grammar and f"{table.grammar.begin}{table.grammar.call_begin}".startswith(table.trigger)


def written(calls: list[tuple[str, dict[str, object]]], grammar: CallGrammar) -> str:
    """The calls as the grammar has them."""
    texts = [
        f"{grammar.call_begin}{name}{grammar.name_end}{arguments_text(arguments, grammar)}{grammar.call_end}"
        for name, arguments in calls
    ]
    return grammar.begin + grammar.separator.join(texts) + grammar.end


def arguments_text(arguments: dict[str, object], grammar: CallGrammar) -> str:
    if not grammar.key_begin:
        return json.dumps(arguments, ensure_ascii=False)
    return "".join(
        f"{grammar.key_begin}{key}{grammar.key_end}{value_text(value)}{grammar.value_end}"
        for key, value in arguments.items()
    )


def value_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
