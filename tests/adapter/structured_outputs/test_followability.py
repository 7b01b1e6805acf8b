"""A grammar that compiles, but that the engine could not follow to its end, is refused before it begins."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from llmbackend.adapter.structured_outputs.compilation import why_not_followed
from llmbackend.adapter.structured_outputs.constraint import CHECK_LIMITS
from llmbackend.core.backend_api import TritonError
from llmbackend.engine.grammars.grammar_compiler import ENGINE_LIMITS
from tests.helpers import byte_grammars

COMPILER = byte_grammars.compiler()


def alternatives(count: int, *, in_lists: bool = False) -> dict[str, Any]:
    """An object with one property, which is one of many objects, or of many lists of them."""
    objects: list[dict[str, Any]] = [
        {"type": "object", "properties": {f"p{n}": {"type": "integer"}}, "required": [f"p{n}"]} for n in range(count)
    ]
    kinds = [{"type": "array", "items": one} for one in objects] if in_lists else objects
    return {"type": "object", "properties": {"a": {"anyOf": kinds}}, "required": ["a"]}


def test_no_limit_of_the_check_is_larger_than_the_engines() -> None:
    check, engine = dataclasses.asdict(CHECK_LIMITS), dataclasses.asdict(ENGINE_LIMITS)
    assert check.keys() == engine.keys()
    assert all(0 < check[name] <= engine[name] for name in engine)
    CHECK_LIMITS.for_library()


@pytest.mark.parametrize("schema", [alternatives(2000), alternatives(700, in_lists=True)])
def test_too_many_ways_on_from_a_place_inside_are_found(schema: dict[str, Any]) -> None:
    with pytest.raises(TritonError, match=r"Current row has [0-9]+ items; max is 2000") as raised:
        byte_grammars.grammar(COMPILER, structured_outputs={"json": schema})
    assert raised.value.param == "structured_outputs"


@pytest.mark.parametrize("schema", [alternatives(700), alternatives(200, in_lists=True)])
def test_fewer_can_be_followed(schema: dict[str, Any]) -> None:
    grammar = byte_grammars.grammar(COMPILER, structured_outputs={"json": schema})
    assert why_not_followed(COMPILER.matcher(grammar)) == ""


@pytest.mark.parametrize(
    "asked",
    [
        {"choice": ["yes", "no"]},
        {"regex": "a?"},
        {"grammar": 'root ::= ""'},
        {"structural_tag": {"format": {"type": "const_string", "value": "<tool_call>x</tool_call>"}}},
    ],
)
def test_short_texts_and_special_tokens_come_to_their_end(asked: dict[str, Any]) -> None:
    byte_grammars.grammar(COMPILER, structured_outputs=asked)


def test_the_answer_is_always_the_same() -> None:
    grammar = byte_grammars.grammar(COMPILER, structured_outputs={"json_object": True})
    assert {why_not_followed(COMPILER.matcher(grammar)) for _ in range(3)} == {""}
