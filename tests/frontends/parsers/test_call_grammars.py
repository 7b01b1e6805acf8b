"""What a format's grammar makes a model write, the format's parser reads: for every format that has a grammar.

Also the oracle for families of which no package at hand ships a template (Granite 3, Phi-4-mini, xLAM, InternLM …).
"""

from __future__ import annotations

import json
from random import Random

import jsonschema
import pytest

from llmbackend.frontends.conversation.tools import Function, ToolUse
from llmbackend.frontends.generation.call_grammars import required_calls, value_end
from llmbackend.frontends.generation.parsers import TOOL_CALL_FORMATS, CallGrammar
from tests.frontends.parsers.laws import distinct_formats
from tests.frontends.parsers.sample import Sample, cut, parse, seen, tokens
from tests.frontends.parsers.turns import SCHEMAS, random_calls
from tests.helpers import byte_grammars
from tests.helpers.machine_settings import tries

NUM_TURNS = 40
NUM_WALKS = 12
TEXTS = ("Zürich", "<", "\n")
SPECIAL = {"openai": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>")}
"""Markers that are read only as special tokens."""
ENFORCED = [name for name in distinct_formats() if name in TOOL_CALL_FORMATS]


@pytest.mark.parametrize("name", ENFORCED)
def test_enforced_calls_are_read(name: str) -> None:
    grammar = TOOL_CALL_FORMATS[name].grammar
    assert grammar
    random = Random(name)
    for _ in range(tries(NUM_TURNS)):
        calls = random_calls(random)
        sample = Sample(text=written(calls, grammar), tools=name, special=SPECIAL.get(name, ()), schemas=SCHEMAS)
        found = seen(parse(sample, cut(tokens(sample), random, 8)))
        assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls, sample.text
        assert all(call.is_complete for call in found.calls)
        assert not found.content


def written(calls: list[tuple[str, dict[str, object]]], grammar: CallGrammar) -> str:
    """The calls as the grammar has them."""
    texts = [
        f"{grammar.call_begin}{name}{grammar.name_end}{arguments_text(arguments, grammar)}{grammar.call_end}"
        for name, arguments in calls
    ]
    return grammar.begin + grammar.separator.join(texts) + grammar.end


def arguments_text(arguments: dict[str, object], grammar: CallGrammar) -> str:
    if not grammar.key_end:
        return json.dumps(arguments, ensure_ascii=False)
    return "".join(
        f"{grammar.key_begin}{key}{value_text(value, grammar)}{value_end(key, grammar)}"
        for key, value in arguments.items()
    )


def value_text(value: object, grammar: CallGrammar) -> str:
    if isinstance(value, str) and grammar.text_quote is not None:
        return f"{grammar.key_end}{grammar.text_quote}{value}{grammar.text_quote}"
    return (grammar.json_key_end or grammar.key_end) + json.dumps(value, ensure_ascii=False)


FUNCTIONS = (
    Function(
        "search",
        {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "kind": {"type": "string", "enum": ["all", "new ones"]},
                "limit": {"type": "integer"},
                "code": {"type": "string", "pattern": "^[a-z]{2}$"},
                "price": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                "place": {"$ref": "#/$defs/place"},
                "is_exact": {"type": "boolean"},
                "words": {"type": "array", "items": {"enum": ["</b>", '"', 3]}, "maxItems": 2},
            },
            "required": ["text", "kind", "place"],
            "additionalProperties": False,
            "$defs": {
                "place": {
                    "type": "object",
                    "properties": {"x": {"type": "integer"}},
                    "required": ["x"],
                    "additionalProperties": False,
                }
            },
        },
        is_strict=True,
    ),
    Function("now", {"type": "object", "properties": {}, "additionalProperties": False}, is_strict=True),
)


@pytest.mark.parametrize("name", ENFORCED)
def test_what_the_compiled_grammar_lets_through_is_a_valid_call(name: str) -> None:
    grammar = TOOL_CALL_FORMATS[name].grammar
    assert grammar
    use = ToolUse(tools=(), functions=FUNCTIONS, is_required=True, max_calls=1, is_legacy=False)
    compiler = byte_grammars.compiler()
    wanted = {"structural_tag": {"format": required_calls(use, grammar)}}
    compiled = byte_grammars.grammar(compiler, structured_outputs=wanted)
    hints = [text for text in (grammar.value_end, grammar.value_end.strip(), grammar.text_quote, *TEXTS) if text]
    schemas = {function.name: function.parameters for function in FUNCTIONS}
    random, num_whole = Random(name), 0
    for _ in range(NUM_WALKS):
        text = byte_grammars.walk(compiler, random, compiled, 800, hints)
        if text is None:
            continue
        num_whole += 1
        sample = Sample(text=text, tools=name, special=SPECIAL.get(name, ()), schemas=schemas)
        (call,) = seen(parse(sample, tokens(sample))).calls
        assert call.is_complete, text
        jsonschema.validate(json.loads(call.arguments), dict(schemas[call.name]))
    assert num_whole > NUM_WALKS // 4
