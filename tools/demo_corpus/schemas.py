# ruff: noqa: E501  (phrases in a row read better than wrapped ones)
"""JSON by schema: an object that follows a JSON schema, with the values that the user gives.

Independent of tokens or weights. Invariant: every answer is valid by its schema and holds the user's values.
"""

from __future__ import annotations

import json
from typing import Any

from .dialogue import Dialogue, pseudo_word, system, turns
from .source import Source
from .tasks import any_word, code, full_name, key_name
from .words import CITIES, COLOURS, JOBS, KEYS, NAMES

Schema = dict[str, Any]
_REQUESTS = (
    "Answer with JSON that follows this schema: {s}", "Reply in JSON by this schema: {s}", "Output JSON for the schema {s}",
    "Use this JSON schema: {s}", "The answer must match this schema: {s}", "Return an object of this schema: {s}",
    "Follow the schema {s}", "Your answer has the form {s}", "Write JSON. Schema: {s}", "JSON schema: {s}", "Respond with an object like this: {s}",
    "Only answer with JSON of this schema: {s}", "Fill in this schema: {s}", "Stick to this schema: {s}", "Format of the answer: {s}", "The schema is {s}",
)  # fmt: skip


def schema_chat(rng: Source) -> Dialogue:
    """The schema in the system prompt or in the question."""
    properties, values = _properties(rng)
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    rule = rng.wording(_REQUESTS).format(s=json.dumps(schema if rng.random() < 0.7 else properties))
    told = _told(rng, values)
    answer = json.dumps(values)
    if rng.random() < 0.5:
        return Dialogue((system(rule), *turns(told, answer)))
    text = f"{told}\n{rule}" if rng.random() < 0.5 else f"{rule}\n{told}"
    return Dialogue(turns(text, answer))


def _properties(rng: Source) -> tuple[dict[str, Schema], dict[str, Any]]:
    names: list[str] = []
    for _ in range(rng.randint(1, 4)):
        name = rng.choice((rng.value(KEYS), rng.value(KEYS), pseudo_word(rng, 2), key_name(rng)))
        if name not in names:
            names.append(name)
    drawn = {name: _property(rng) for name in names}
    return {name: schema for name, (schema, _) in drawn.items()}, {name: value for name, (_, value) in drawn.items()}


def _property(rng: Source) -> tuple[Schema, Any]:
    roll = rng.random()
    if roll < 0.5:
        return {"type": "string"}, _text(rng)
    if roll < 0.8:
        return {"type": "integer"}, rng.number(0, 9999 if rng.random() < 0.3 else 99)
    if roll < 0.88:
        return {"type": "boolean"}, rng.random() < 0.5
    if roll < 0.95:
        words = [any_word(rng) for _ in range(rng.randint(2, 3))]
        return {"type": "string", "enum": words}, rng.choice(words)
    return {"type": "array", "items": {"type": "string"}}, [any_word(rng) for _ in range(rng.randint(1, 3))]


def _text(rng: Source) -> str:
    makers = (
        lambda: rng.value((*NAMES, *CITIES, *COLOURS, *JOBS)),
        lambda: full_name(rng),
        lambda: code(rng),
        lambda: any_word(rng),
    )
    return rng.choice(makers)()


def _told(rng: Source, values: dict[str, Any]) -> str:
    style = rng.choice(("{} is {}", "{}: {}", "{} = {}", "the {} is {}"))
    parts = [style.format(name, _spoken(value)) for name, value in values.items()]
    if rng.random() < 0.3:
        rng.shuffle(parts)
    return rng.choice((", ", "; ", " and ")).join(parts)


def _spoken(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return " and ".join(value) if isinstance(value, list) else str(value)
