"""Numbers and texts of schemas, as far as the grammar compiler can represent them.

For: json_schema.py and schema_keywords.py. Does not know: keywords beyond their names. Invariant: a value that is
returned means to the compiler what it means to the client.
"""

from __future__ import annotations

import math

from .bounds import Place

EXACT = 1 << 53
"""Beyond it the compiler's numbers, which are doubles, are not the client's."""
_SMALLEST = 1e-9
_FINE_EXCLUSIVE, _LARGEST_EXCLUSIVE, _COARSE_STEP = 10**6, 10**12, 1e-3
"""Up to which exclusive limits 1e-9 beside them, or 0.001, are numbers of their own."""


def within(value: object, name: str) -> object:
    """A limit; one beyond what the compiler compares exactly becomes the nearest exact one, which is stricter."""
    if isinstance(value, int) and not isinstance(value, bool):
        return min(value, EXACT) if name.endswith("aximum") else max(value, -EXACT)
    return value


def number_of(value: object, place: Place, *, smallest: float = _SMALLEST) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        place.refuse(value, "a number")
    if isinstance(value, float) and not math.isfinite(value):
        place.refuse(value, "a number")
    if abs(value) > EXACT or 0 < abs(value) < smallest:
        expected = f"a number from {-EXACT} to {EXACT}, not closer to 0 than {smallest}"
        place.value_not_enforced(value, expected)
    return value


def beside(number: float, name: str, place: Place, *, is_integer: bool) -> tuple[float, str]:
    """An exclusive limit that is an integer, as an inclusive one beside it: where both limits have one integer part,
    the compiler's exclusive ones include the integer."""
    if abs(number) > _LARGEST_EXCLUSIVE and not is_integer:
        expected = f"an exclusive limit from {-_LARGEST_EXCLUSIVE} to {_LARGEST_EXCLUSIVE}, or a fraction"
        place.value_not_enforced(number, expected)
    step = 1 if is_integer else _SMALLEST if abs(number) <= _FINE_EXCLUSIVE else _COARSE_STEP
    is_minimum = name == "exclusiveMinimum"
    beside = int(number) if is_integer else number
    return (beside + step if is_minimum else beside - step), ("minimum" if is_minimum else "maximum")


def encodable(text: str, place: Place) -> str:
    """JSON strings may hold half of a surrogate pair, and names or values with control characters need an escape that
    is not generated."""
    if any(
        "\ud800" <= character < "\ue000" or (character < " " and character not in "\b\t\n\f\r") for character in text
    ):
        place.value_not_enforced(text, "text without control characters and halves of surrogate pairs")
    return text
