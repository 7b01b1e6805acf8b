"""Whatever a format's grammar of calls lets through, its parser reads as calls whose arguments fit the schemas."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import pytest

from llmbackend.frontends.openai.call_grammars import required_calls
from llmbackend.frontends.openai.errors import OpenAIError
from llmbackend.frontends.openai.parsers import TOOL_CALL_FORMATS, CallGrammar
from llmbackend.frontends.openai.tools import Function, ToolUse
from tests.frontends.parsers.sample import Sample, cut, parse, seen, tokens
from tests.helpers import byte_grammars

NUM_WALKS = 6
"""Per format, with one call and with any number."""
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"$ref": "#/$defs/Unit"},
            "days": {"type": "integer"},
            "detail": {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 2},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
        "$defs": {"Unit": {"type": "string", "enum": ["C", "°F"]}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
MARKERS = {"openai": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>")}
"""Those that are read only as special tokens."""
ENFORCED = sorted(name for name, table in TOOL_CALL_FORMATS.items() if table.grammar)
TAGGED = [name for name in ENFORCED if (grammar := TOOL_CALL_FORMATS[name].grammar) and grammar.key_begin]
COMPILER = byte_grammars.compiler()


def use(schemas: dict[str, dict[str, Any]], max_calls: int | None = None) -> ToolUse:
    return ToolUse(
        tools=[{"type": "function", "function": {"name": name}} for name in schemas],
        functions=tuple(
            Function(name, schema, is_strict=False, param=f"tools[{index}].function.parameters")
            for index, (name, schema) in enumerate(schemas.items())
        ),
        is_required=True,
        max_calls=max_calls,
        is_legacy=False,
    )


def grammar_of(name: str) -> CallGrammar:
    grammar = TOOL_CALL_FORMATS[name].grammar
    assert grammar
    return grammar


def structure(name: str, max_calls: int | None = None) -> dict[str, Any]:
    form = required_calls(use(SCHEMAS, max_calls), grammar_of(name))
    return {"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": form}}}


@pytest.mark.parametrize("name", ENFORCED)
def test_what_the_grammar_lets_through_is_read(name: str) -> None:
    random = Random(name)
    grammars = [byte_grammars.grammar(COMPILER, **structure(name, max_calls)) for max_calls in (1, None)]
    texts = [byte_grammars.walk(COMPILER, random, grammar) for grammar in grammars for _ in range(NUM_WALKS)]
    complete = [text for text in texts if text is not None]
    assert complete
    for text in complete:
        sample = Sample(text=text, tools=name, special=MARKERS.get(name, ()), schemas=SCHEMAS)
        visible = seen(parse(sample, cut(tokens(sample), random, 5)))
        assert visible.calls and not visible.content, (text, visible)
        for call in visible.calls:
            assert call.is_complete, (text, visible)
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("name", TAGGED)
def test_a_text_cannot_hold_what_would_end_it(name: str) -> None:
    grammar = grammar_of(name)
    for text, is_possible in (("Zürich <b>\n", True), *((f"a{end}b", False) for end in grammar.text_excludes)):
        values = (("city", text), ("unit", '"C"'))
        written = "".join(
            f"{grammar.key_begin}{key}{grammar.key_end}{value}{grammar.value_end}" for key, value in values
        )
        call = f"{grammar.call_begin}get_weather{grammar.name_end}{written}{grammar.call_end}"
        whole = f"{grammar.begin}{call}{grammar.end}"
        assert byte_grammars.accepts(COMPILER, whole, **structure(name)) == is_possible, whole


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {}, "minProperties": 1}, "'minProperties'"),
        ({"anyOf": [{"required": ["a"]}]}, "'anyOf'"),
        ({"properties": ["a"]}, "'properties'"),
        ({"properties": {"a": {}}, "required": ["b"]}, "'required'"),
        ({"properties": {"a<b": {}}}, "a<b"),
    ],
)
def test_what_tags_cannot_enforce_is_refused_by_name(schema: dict[str, Any], expected: str) -> None:
    with pytest.raises(OpenAIError, match=expected) as raised:
        required_calls(use({"now": {}, "f": schema}), grammar_of("qwen3_coder"))
    assert raised.value.param == "tools[1].function.parameters"
