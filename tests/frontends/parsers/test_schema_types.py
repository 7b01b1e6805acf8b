"""What a function's schema says about a parameter, and what a text means by it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmbackend.frontends.generation.parsers import TOOL_CALL_FORMATS, OutputParser, ToolCallArguments, is_plain_text
from llmbackend.frontends.generation.parsers.schema_types import allowed_types, json_of


def parameters(description: Any, **definitions: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": description}, "$defs": definitions}


@pytest.mark.parametrize(
    ("description", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": True}, {"boolean"}),
        ({"anyOf": [{"type": "array"}, {"oneOf": [{"type": "object"}]}]}, {"array", "object"}),
        ({"$ref": "#/$defs/X"}, {"number"}),
        ({"$ref": "#/$defs/missing"}, set()),
        ({"$ref": "#/$defs/Loop"}, set()),
        ({}, set()),
        (True, set()),
        ({"type": 5}, set()),
        ({"type": ["integer", ["string"], {}]}, {"integer"}),
        ({"$ref": "#/$defs/" + "/" * 5000}, set()),
    ],
)
def test_allowed_types(description: Any, types: set[str]) -> None:
    schema = parameters(description, X={"type": "number"}, Loop={"$ref": "#/$defs/Loop"})
    assert allowed_types(schema, "x") == types


def test_a_schema_that_multiplies_itself_is_looked_at_within_bounds() -> None:
    many = {"anyOf": [{"$ref": "#/$defs/Many"}] * 10_000}
    assert allowed_types(parameters(many, Many=many), "x") == set()


@pytest.mark.parametrize("schema", [None, {}, {"properties": 5}, {"properties": {"x": None}}])
def test_a_schema_may_say_nothing(schema: Any) -> None:
    assert allowed_types(schema, "x") == set()
    assert not is_plain_text(schema, "x")


def test_plain_text() -> None:
    assert is_plain_text(parameters({"type": "string", "description": "a"}), "x")
    assert is_plain_text(parameters({"$ref": "#/$defs/X"}, X={"type": "string"}), "x")
    for narrowed in ({"enum": ["a"]}, {"pattern": "a"}, {"maxLength": 3}, {"format": "date"}):
        assert not is_plain_text(parameters({"type": "string", **narrowed}), "x")


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        (" 12 ", {"integer"}, "12"),
        ("1e5", {"number"}, "1e5"),
        ("12", {"number"}, "12"),
        ("12", {"string"}, '"12"'),
        ("12", set(), "12"),
        ("twelve", {"integer"}, '"twelve"'),
        ("True", {"boolean"}, "true"),
        ("True", set(), '"True"'),
        ("None", {"null", "string"}, "null"),
        ("NaN", {"number"}, '"NaN"'),
        ("{'a': (1, 2)}", {"object"}, '{"a": [1, 2]}'),
        ("{'a': {1}}", {"object"}, "\"{'a': {1}}\""),
        ('{"a":1}', {"object"}, '{"a":1}'),
        ("[" * 5000, {"array"}, json.dumps("[" * 5000)),
        ("(" * 5000, {"array"}, json.dumps("(" * 5000)),
        ("9" * 5000, {"integer"}, json.dumps("9" * 5000)),
        ("", {"object"}, '""'),
    ],
)
def test_what_a_text_means(text: str, types: set[str], expected: str) -> None:
    assert json_of(text, frozenset(types)) == expected


def test_a_root_that_only_refers_to_descriptions() -> None:
    text, number = {"properties": {"x": {"type": "string"}}}, {"properties": {"x": {"type": "integer"}}}
    definitions = {"Text": text, "Number": number}
    roots: list[tuple[dict[str, Any], set[str], bool]] = [
        ({"$ref": "#/$defs/Text"}, {"string"}, True),
        ({"allOf": [{"$ref": "#/$defs/Text"}]}, {"string"}, True),
        ({"anyOf": [{"$ref": "#/$defs/Text"}, {"properties": {"y": {}}}]}, {"string"}, True),
        ({"oneOf": [text, number]}, {"string", "integer"}, False),
        ({"additionalProperties": {"type": "string"}}, {"string"}, True),
        ({"properties": {"x": {"type": "null"}}, "additionalProperties": {"type": "string"}}, {"null"}, False),
    ]
    for root, types, is_text in roots:
        schema = {**root, "$defs": definitions}
        assert allowed_types(schema, "x") == types and is_plain_text(schema, "x") == is_text, root


@pytest.mark.parametrize("format", ["qwen3_coder", "minimax_m3"])
def test_quotes_are_part_of_a_string_that_may_be_null(format: str) -> None:
    schema = {"properties": {"a": {"type": ["string", "null"]}}}
    written = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
        "minimax_m3": 'M<tool_call>M<invoke name="f">M<a>{}M</a>M</invoke>M</tool_call>'.replace("M", "]<]minimax[>["),
    }[format]
    for value, expected in (('"exact phrase"', '"exact phrase"'), ("null", None), ("7", "7"), (' "a"', ' "a"')):
        parser = OutputParser(TOOL_CALL_FORMATS[format], schemas={"f": schema}, free_functions=("f",))
        events = parser.push(0, written.replace("{}", value), False) + parser.finish("stop")
        arguments = "".join(event.text for event in events if isinstance(event, ToolCallArguments))
        assert json.loads(arguments) == {"a": expected}, value


@pytest.mark.parametrize("strings_are_text", [True, False])
def test_a_string_that_its_schema_narrows_is_its_text_where_no_grammar_asks_for_json(strings_are_text: bool) -> None:
    """Its quotes are part of it, as in a string of code; a grammar has the model write JSON, which is read as such."""
    narrowed = {"type": "string", "minLength": 1}
    count = {"type": "integer"}
    schema = {"type": "object", "properties": {"text": narrowed, "count": count, "any": {"type": ["string", "null"]}}}
    free = ("f",) if strings_are_text else ("g",)
    parser = OutputParser(TOOL_CALL_FORMATS["qwen3_coder"], schemas={"f": schema}, free_functions=free)
    values = (("text", '"helo,"'), ("count", "3"), ("any", "null"))
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values)
    text = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    events = parser.push(0, text, False) + parser.finish("stop")
    arguments = json.loads("".join(event.text for event in events if isinstance(event, ToolCallArguments)))
    assert arguments == {"text": '"helo,"' if strings_are_text else "helo,", "count": 3, "any": None}
