"""Llama 3.x: bare JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..sample import Call, Sample

_SCHEMAS: Mapping[str, Mapping[str, Any]] = {"f": {}, "get_weather": {}}
_CASES: tuple[tuple[str, str, tuple[Call, ...]], ...] = (
    ('{"name": "f", "parameters": {"a": {"b": "}"}}}', "", (Call("f", '{"a": {"b": "}"}}'),)),
    ('\n<|python_tag|>{"type": "function", "name": "f", "parameters": {}}<|eom_id|>', "", (Call("f", "{}"),)),
    (
        '{"name": "f", "arguments": {"a": 1}}; {"name": "get_weather", "parameters": {"b": 2}}',
        "",
        (Call("f", '{"a": 1}'), Call("get_weather", '{"b": 2}')),
    ),
    ('Sure: <|python_tag|>{"name": "f", "parameters": {}} ok', "Sure:  ok", (Call("f", "{}"),)),
    # Answers in JSON, and calls of no function.
    ('{"city": "Paris", "population": 2}', '{"city": "Paris", "population": 2}', ()),
    ('{"name": "Paris", "parameters": {}}', '{"name": "Paris", "parameters": {}}', ()),
    ('{"name": "f", "population": 2}', '{"name": "f", "population": 2}', ()),
    (' {"name": "f", "parameters": {}}; then', "; then", (Call("f", "{}"),)),
    ('Text {"name": "f", "parameters": {}}', 'Text {"name": "f", "parameters": {}}', ()),
    ('{"name": "f", "parameters": {"a": ', "", (Call("f", '{"a": ', is_complete=False),)),
)
SAMPLES = tuple(
    Sample(
        tools=name, text=text, special=("<|python_tag|>", "<|eom_id|>"), schemas=_SCHEMAS, content=content, calls=calls
    )
    for name in ("llama3_json", "llama4_json")
    for text, content, calls in _CASES
)
