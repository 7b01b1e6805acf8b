"""Schemas of which not everything is enforced: what is, and how the rest is named."""

from __future__ import annotations

import enum
import ipaddress
import json
import pathlib
import uuid
from decimal import Decimal
from typing import Annotated, Any, Literal

import pydantic
import pytest

from llmbackend.core.backend_api import TritonError
from tests.helpers.byte_grammars import accepts, compiler, grammar, not_enforced

COMPILER = compiler()


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str


PASSWORD = r"^(?=.*[a-z])(?=.*\d).{8,}$"
ANNOTATED: list[tuple[Any, list[str], list[str], list[str]]] = [
    # type, keywords left out, texts that can be written, texts that cannot
    (set[str], ["uniqueItems"], ['["a", "a"]'], ['["a", 1]', '"a"']),
    (set[Color], [], ['["red", "blue"]', '["blue", "red"]', '["blue"]', "[]"], ['["red", "red"]', '["green"]']),
    (frozenset[bool], [], ["[true, false]", "[false]"], ["[true, true]"]),
    (pathlib.Path, [], ['"/tmp"'], ["1"]),
    (pydantic.SecretStr, [], ['"x"'], ["1"]),
    (bytes, [], ['"x"'], ["1"]),
    (pydantic.UUID4, [], [f'"{uuid.UUID(int=9, version=4)}"'], [f'"{uuid.UUID(int=9, version=1)}"', '"x"']),
    (ipaddress.IPv4Network, [], ['"10.0.0.0/8"', '"10.16.0.0/12"', '"1.2.3.4/32"'], ['"10.0.0.1/8"', '"10.0.0.0"']),
    (ipaddress.IPv6Network, ["format"], ['"::/0"', '"x"'], ["1"]),
    (pydantic.Json, ["contentMediaType", "contentSchema"], ['"{}"'], ["{}"]),
    (dict[Literal["a", "b"], int], [], ['{"a": 1, "b": 2}', "{}"], ['{"c": 1}', '{"a": "x"}']),
    (dict[Color, int], [], ['{"red": 1}'], ['{"green": 1}']),
    (Decimal, [], ["1.5", '"-1.5"'], ["true"]),
    (Annotated[str, pydantic.Field(pattern=PASSWORD)], ["pattern"], ['"x"'], ["1"]),
    (Annotated[int, pydantic.Field(ge=-(2**63), le=2**63 - 1)], [], ["5"], ["0.5"]),
    (
        Annotated[Cat | Dog, pydantic.Field(discriminator="kind")],
        [],
        ['{"kind": "cat", "lives": 9}'],
        ['{"kind": "cow"}'],
    ),
]


def schema_of(kind: Any) -> dict[str, Any]:
    config = pydantic.ConfigDict(regex_engine="python-re")
    return pydantic.create_model("M", __config__=config, v=(kind, ...)).model_json_schema()


@pytest.mark.parametrize(("kind", "left_out", "valid", "invalid"), ANNOTATED, ids=[str(case[0]) for case in ANNOTATED])
def test_schemas_that_pydantic_writes(kind: Any, left_out: list[str], valid: list[str], invalid: list[str]) -> None:
    asked: dict[str, Any] = {"structured_outputs": {"json": schema_of(kind)}}
    assert not_enforced(COMPILER, **asked) == tuple(
        f"structured_outputs#/json/properties/v/{name}" for name in left_out
    )
    assert [text for text in valid if not accepts(COMPILER, f'{{"v": {text}}}', **asked)] == []
    assert [text for text in invalid if accepts(COMPILER, f'{{"v": {text}}}', **asked)] == []


@pytest.mark.parametrize(
    ("kind", "left_out"), [case[:2] for case in ANNOTATED], ids=[str(case[0]) for case in ANNOTATED]
)
def test_only_what_is_left_out_is_refused_where_the_request_is_strict(kind: Any, left_out: list[str]) -> None:
    asked = {"structured_outputs": {"json": schema_of(kind), "strict": True}}
    if not left_out:
        assert grammar(COMPILER, **asked)
        return
    with pytest.raises(TritonError, match=f"'structured_outputs' at /json/properties/v/{left_out[0]}"):
        grammar(COMPILER, **asked)


OVERLAPPING = {"oneOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"type": "object"}]}
BEYOND_DOUBLES = 10**400
LEFT_OUT: list[tuple[dict[str, Any], list[str]]] = [
    ({"type": "object", "strict": True, "properties": {"a": {"minLenght": 3}}}, ["strict", "properties/a/minLenght"]),
    ({"items": OVERLAPPING}, ["items/oneOf"]),
    ({"$defs": {"d": {"not": {}}}, "items": {"$ref": "#/$defs/d"}}, ["$defs/d/not"]),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, ["if", "then"]),
    ({"type": "object", "minProperties": 3}, ["minProperties"]),
    ({"$ref": "https://example.com/schema"}, ["$ref"]),
    ({"oneOf": [{"$ref": "https://example.com/schema"}]}, ["oneOf/0/$ref"]),
    ({"oneOf": [{"$ref": "#anchor"}, {"type": "string"}]}, ["oneOf", "oneOf/0/$ref"]),
    ({"type": "object", "properties": {"a": {}}, "maxProperties": 1}, ["maxProperties"]),
    ({"patternProperties": {"^a": {"type": "integer"}, "b": {"type": "string"}}}, ["patternProperties"]),
    ({"type": "number", "multipleOf": 0.00001, "maximum": 3}, ["multipleOf"]),
    ({"multipleOf": BEYOND_DOUBLES, "enum": [BEYOND_DOUBLES]}, ["multipleOf", "enum"]),
    ({"type": "array", "items": {"type": "integer", "enum": [BEYOND_DOUBLES]}, "uniqueItems": True},
     ["items/enum", "uniqueItems"]),
    ({"type": "object", "patternProperties": {"^(?=a)": {"type": "integer"}}, "additionalProperties": False},
     ["patternProperties"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "left_out"), LEFT_OUT)
def test_the_places_of_what_is_left_out(schema: dict[str, Any], left_out: list[str]) -> None:
    places = not_enforced(COMPILER, structured_outputs={"json": schema})
    assert places == tuple(f"structured_outputs#/json/{path}" for path in left_out)
    places = not_enforced(COMPILER, guided_json=schema)
    assert places == tuple(f"guided_json#/{path}" for path in left_out)


def test_properties_whose_names_cannot_be_enforced_have_their_values() -> None:
    asked: dict[str, Any] = {"guided_json": LEFT_OUT[-1][0]}
    assert accepts(COMPILER, '{"b": 1}', **asked) and not accepts(COMPILER, '{"b": "x"}', **asked)


INTEGERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
BESIDE: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    # the keyword left out, a schema with others beside it, texts that can be written, texts that cannot
    (
        "unevaluatedProperties",
        {"type": "object", "allOf": [{"properties": INTEGERS, "required": ["a"]}], "unevaluatedProperties": False},
        ['{"a": 1}'],
        ['{"a": "x"}', "{}"],
    ),
    (
        "unevaluatedItems",
        {"type": "array", "anyOf": [{"prefixItems": [{"type": "integer"}], "minItems": 1}], "unevaluatedItems": False},
        ["[1]"],
        ['["x"]', "[]"],
    ),
    (
        "patternProperties",
        {"type": "object", "patternProperties": {"^(?=a)": {}}, "propertyNames": {"enum": ["a"]}},
        ['{"a": 1}'],
        ['{"b": 1}'],
    ),
    (
        "patternProperties",
        {"type": "object", "patternProperties": {"^(?=a)": {"type": "integer"}}, "unevaluatedProperties": False},
        ['{"a": 1}'],
        ['{"a": "x"}'],
    ),
]


@pytest.mark.parametrize(("keyword", "schema", "valid", "invalid"), BESIDE, ids=[case[0] for case in BESIDE])
def test_the_keywords_beside_one_that_is_left_out_are_enforced(
    keyword: str, schema: dict[str, Any], valid: list[str], invalid: list[str]
) -> None:
    assert not_enforced(COMPILER, guided_json=schema) == (f"guided_json#/{keyword}",)
    assert [text for text in valid if not accepts(COMPILER, text, guided_json=schema)] == []
    assert [text for text in invalid if accepts(COMPILER, text, guided_json=schema)] == []


def test_a_tag_is_strict_by_itself() -> None:
    def form(**more: Any) -> dict[str, Any]:
        content = {"type": "json_schema", "json_schema": {"not": {}}, **more}
        return {"structured_outputs": {"structural_tag": {"format": {"begin": "<", "content": content, "end": ">"}}}}

    assert not_enforced(COMPILER, **form()) == ("structured_outputs#/structural_tag/format/content/json_schema/not",)
    with pytest.raises(TritonError, match="/json_schema/not"):
        grammar(COMPILER, **form(strict=True))


def test_an_alternative_that_may_match_twice_is_refused_in_each_strict_schema_but_in_no_other() -> None:
    exclusive = {"oneOf": [{"type": "integer"}, {"type": "string"}]}

    def tags(strict_schema: dict[str, Any]) -> dict[str, Any]:
        contents = [
            {"type": "json_schema", "json_schema": strict_schema, "strict": True},
            {"type": "json_schema", "json_schema": OVERLAPPING},
        ]
        return {"structural_tag": {"format": {"type": "or", "elements": contents}}}

    assert not_enforced(COMPILER, **tags(exclusive)) == ("structural_tag#/format/elements/1/json_schema/oneOf",)
    for asked in (tags(OVERLAPPING), {"guided_grammar": f"start: %json {json.dumps(OVERLAPPING)}"}):
        with pytest.raises(TritonError, match=r"alternatives of oneOf.* may both match"):
            grammar(COMPILER, **asked)
    with pytest.raises(TritonError, match="'structured_outputs' at /json: alternatives of oneOf may both match"):
        grammar(COMPILER, structured_outputs={"json": json.dumps(OVERLAPPING), "strict": True})


def recursive_union(count: int, kinds: list[dict[str, Any]]) -> dict[str, Any]:
    """Types that contain lists of each other, as pydantic writes them."""
    union = {"oneOf": [{"$ref": f"#/$defs/T{number}"} for number in range(count)]}
    members = {"children": {"type": "array", "items": union}}
    definitions = {
        f"T{number}": {"type": "object", "properties": {"kind": kinds[number], **members}, "required": ["kind"]}
        for number in range(count)
    }
    return {**union, "$defs": definitions}


@pytest.mark.parametrize("is_strict", [True, False])
def test_alternatives_that_contain_each_other_are_told_apart_by_a_required_text(is_strict: bool) -> None:
    kinds: list[dict[str, Any]] = [*({"const": f"t{number}"} for number in range(20)), {"enum": ["u", "v"]}]
    asked: dict[str, Any] = {"structured_outputs": {"json": recursive_union(21, kinds), "strict": is_strict}}
    assert not_enforced(COMPILER, **asked) == ()
    assert accepts(COMPILER, '{"kind": "t1", "children": [{"kind": "v", "children": [{"kind": "t19"}]}]}', **asked)
    for text in ('{"kind": "t1", "children": [{"kind": "w"}]}', '{"children": []}', '{"kind": "t1", "children": [1]}'):
        assert not accepts(COMPILER, text, **asked), text


def test_alternatives_that_contain_each_other_may_have_keywords_beside_them() -> None:
    schema = {**recursive_union(3, [{"const": kind} for kind in "abc"]), "type": "object"}
    assert not_enforced(COMPILER, guided_json=schema) == ()
    for kind, is_right in (("c", True), ("d", False)):
        text = f'{{"kind": "a", "children": [{{"kind": "{kind}"}}]}}'
        assert accepts(COMPILER, text, guided_json=schema) == is_right


def test_alternatives_that_contain_each_other_and_cannot_be_told_apart_are_any_of_them() -> None:
    schema = recursive_union(20, [{"type": "string", "maxLength": 1 + number % 2} for number in range(20)])
    assert "structured_outputs#/json/oneOf" in not_enforced(COMPILER, structured_outputs={"json": schema})
    for text, is_right in (('{"kind": "a", "children": [{"kind": "b"}]}', True), ('{"kind": "abc"}', False)):
        assert accepts(COMPILER, text, structured_outputs={"json": schema}) == is_right
    with pytest.raises(TritonError, match="/oneOf"):
        grammar(COMPILER, structured_outputs={"json": schema, "strict": True})


STILL_REFUSED: list[tuple[Any, str]] = [
    ({"type": "strnig"}, "/type"),
    ({"type": "object", "required": True}, "/required"),
    ({"enum": []}, "/enum"),
    ({"format": 3}, "/format"),
    ({"$ref": "#/$defs/x"}, "that exists"),
    ({"$ref": "#"}, "refers to itself"),
    ({"enum": list(range(9000))}, "more than 8192 nodes"),
    ({"properties": {str(n): {} for n in range(2000)}}, "at most 480"),
    ({"type": "integer", "minimum": 3, "maximum": 1}, "is greater than"),
]


@pytest.mark.parametrize(("schema", "text"), STILL_REFUSED)
def test_what_is_no_schema_or_has_no_bounds_is_refused(schema: Any, text: str) -> None:
    with pytest.raises(TritonError, match=text):
        grammar(COMPILER, guided_json=schema)


def test_the_list_of_what_is_left_out_is_bounded() -> None:
    schema = {f"unknown{number}": 1 for number in range(5000)}
    assert len(not_enforced(COMPILER, guided_json=schema)) == 64


def test_lists_without_repetitions_are_bounded_together() -> None:
    names = [f"p{number}" for number in range(8)]
    unique = {"type": "array", "items": {"enum": [1, 2, 3, 4, 5]}, "uniqueItems": True}
    left_out = not_enforced(COMPILER, guided_json={"properties": dict.fromkeys(names, unique)})
    assert left_out == tuple(f"guided_json#/properties/{name}/uniqueItems" for name in names[5:])
