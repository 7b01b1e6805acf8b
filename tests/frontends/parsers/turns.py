"""Random calls of some functions, with arguments of every type and texts that look like parts of formats."""

from __future__ import annotations

from random import Random
from typing import Any

PIECES = ("Zürich", "🌦 ", "5", "true", " ", "\n", '"', "'", "\\", "{", "}", "[", "]", "<", "</b>", "=", ", ", "- a: b")
"""Of strings."""
PARAMETERS: dict[str, dict[str, str]] = {
    "get_weather": {"city": "string", "days": "integer", "is_wet": "boolean"},
    "search": {"text": "string", "weights": "array", "options": "object", "limit": "number"},
    "now": {},
}
"""Functions with the types of their parameters."""
SCHEMAS: dict[str, dict[str, Any]] = {
    name: {"type": "object", "properties": {key: {"type": kind, "description": ""} for key, kind in types.items()}}
    for name, types in PARAMETERS.items()
}
TYPES = ("string", "integer", "boolean", "array", "object", "number")


def random_calls(
    random: Random, *, max_calls: int = 3, types: tuple[str, ...] = TYPES, without: str = ""
) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments. types: of the parameters that are given; without: characters that no string has"""
    names = random.choices(list(PARAMETERS), k=random.randint(1, max_calls))
    return [
        (
            name,
            {
                key: _value(random, kind, without)
                for key, kind in PARAMETERS[name].items()
                if kind in types and random.random() < 0.8
            },
        )
        for name in names
    ]


def _value(random: Random, kind: str, without: str) -> Any:
    def text() -> str:
        pieces = "".join(random.choices(PIECES, k=random.randint(0, 5)))
        return pieces.translate(dict.fromkeys(map(ord, without)))

    match kind:
        case "integer":
            return random.randint(-9, 10**12)
        case "number":
            return random.choice((0, -1.5, 3.0, 1e-7, 2**53 + 1))
        case "boolean":
            return random.random() < 0.5
        case "array":
            return [random.choice((1, text(), None, True, [text()])) for _ in range(random.randint(0, 3))]
        case "object":
            return {key: random.choice((1, text(), [2.5], {"x": text()})) for key in random.sample("abc", 2)}
        case _:
            return text()
