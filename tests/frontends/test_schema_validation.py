"""Finished answers judged by a client's schema: the verdicts, and that no schema makes them long."""

from __future__ import annotations

import itertools
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from llmbackend.frontends.generation.plan import TEXT
from llmbackend.frontends.generation.schema_report import VALID, NotJudgedError, SchemaReport, violation
from llmbackend.frontends.generation.tensors import Delta

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
SATISFIED: list[tuple[Any, str]] = [
    (True, "1"),
    ({"type": "object"}, "{}"),
    ({"pattern": "^(?=.*[a-z]).{2}$"}, '"a1"'),
    ({"uniqueItems": True}, '[1, true, "1", {"a": 1}, {"a": 2}]'),
    ({"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False}, '{"ab": 1}'),
    ({"$schema": DRAFT_4, "minimum": 1, "exclusiveMinimum": True}, "2"),
    ({"unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}]}, '{"a": 1}'),
    ({"strict": True, "format": "multi-host-uri"}, '"x"'),
]
VIOLATED: list[tuple[Any, str, str]] = [
    (False, "1", "$ does not satisfy 'False'"),
    ({"type": "object"}, "{", "is not JSON"),
    ({"properties": {"a": {"not": {"const": 1}}}}, '{"a": 1}', "$.a does not satisfy 'not'"),
    ({"uniqueItems": True}, "[1, 1.0]", "$ does not satisfy 'uniqueItems'"),
    ({"uniqueItems": True}, '[{"a": 1, "b": 2}, {"b": 2, "a": 1}]', "$ does not satisfy 'uniqueItems'"),
    ({"pattern": "^(?=.*[a-z]).{2}$"}, '"11"', "$ does not satisfy 'pattern'"),
    ({"patternProperties": {"^a": {"type": "integer"}}}, '{"ab": "x"}', "$.ab does not satisfy 'type'"),
    (
        {"patternProperties": {"^a": {}}, "additionalProperties": False},
        '{"b": 1}',
        "$ does not satisfy 'additionalProperties'",
    ),
    ({"$schema": DRAFT_4, "minimum": 1, "exclusiveMinimum": True}, "1", "$ does not satisfy 'minimum'"),
    ({"unevaluatedProperties": False}, '{"a": 1}', "$ does not satisfy 'unevaluatedProperties'"),
]
_LEVELS = 60
EXPLODING = {
    "$defs": {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(_LEVELS)} | {f"d{_LEVELS}": False},
    "$ref": "#/$defs/d0",
}
NOT_JUDGED: list[tuple[Any, str]] = [
    (EXPLODING, "takes more than 1.0 s"),
    ({"pattern": r"^(?:a+)+(?=!)\1?$"}, "pattern"),
    ({"pattern": "("}, "a pattern cannot be read"),
    ({"pattern": "a" * 9000}, "more than 8192 characters"),
    ({"patternProperties": {"(": {}}}, "a pattern cannot be read"),
    ({"$ref": "https://example.com/schema"}, "cannot be read"),
    ({"$ref": "#"}, "cannot be read"),
    ({"minimum": "x"}, "cannot be read"),
    ({"patternProperties": {"a": {}}, "unevaluatedProperties": False}, "is not judged"),
]
BEHIND_A_REFERENCE: list[dict[str, Any]] = [{"patternProperties": {"^(a+)+$": {}}}, {"dependentSchemas": {"a": {}}}]


@pytest.mark.parametrize(("schema", "text"), SATISFIED)
def test_what_satisfies_a_schema(schema: Any, text: str) -> None:
    assert violation(schema, text) == ""


@pytest.mark.parametrize(("schema", "text", "expected"), VIOLATED)
def test_a_violation_is_told_without_the_value(schema: Any, text: str, expected: str) -> None:
    assert violation(schema, text) == expected


@pytest.mark.parametrize(("schema", "why"), NOT_JUDGED, ids=[why for _, why in NOT_JUDGED])
def test_what_cannot_be_judged_says_why(schema: Any, why: str) -> None:
    texts = {"minimum": "1", "patternProperties": '{"a": 1}'}
    text = next((texts[name] for name in texts if name in schema), json.dumps("a" * 40 + "b"))
    with pytest.raises(NotJudgedError, match=why):
        violation(schema, text)


@pytest.mark.parametrize("target", BEHIND_A_REFERENCE)
def test_unevaluated_properties_follow_no_reference_without_a_bound(target: dict[str, Any]) -> None:
    referring = {"$ref": "#/$defs/target", "unevaluatedProperties": False}
    with pytest.raises(NotJudgedError, match="is not judged"):
        violation({"properties": {"x": referring}, "$defs": {"target": target}}, '{"x": {"aaaa!": 1}}')


def test_many_items_are_compared_once_each() -> None:
    items = [{"a": number} for number in range(20_000)]
    assert violation({"uniqueItems": True}, json.dumps(items)) == ""
    assert violation({"uniqueItems": True}, json.dumps([*items, {"a": 7}])) != ""


def test_all_choices_of_an_answer_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = itertools.count(0.0, 0.2)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock_s))
    schema = {"type": "integer", "minimum": 1, "unknown": 0}
    request: Any = SimpleNamespace(
        sampling={"structured_outputs": {"json": schema}}, schema_field="", structure_field="structured_outputs"
    )
    report = SchemaReport(request, TEXT)
    for choice in range(8):
        places = ["structured_outputs#/json/unknown"]
        report.add(choice, Delta("5", "stop", [], 1, 1, True, not_enforced=places))
    assert report.judge("id")[VALID] == "unknown"
