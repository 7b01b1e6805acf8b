"""Values in schemas: numbers and texts that the grammar compiler can represent, lists of few values, string formats.

Used by json_schema.py and schema_keywords.py. Independent of keywords (except their names) and of the document around a
schema. Invariants: a returned value means the same to the compiler as to the client. `finite_values` lists everything
that a schema permits, without values that JSON Schema considers equal (1 and 1.0 are equal, 1 and true are not). A
string of an enforced format is valid for strict validators (RFC 3339, including leap years); leap seconds are not
generated, because their dates are not known in advance.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from .constraint import RequestPath

EXACT = 1 << 53
"""Larger integers are inexact in the compiler, whose numbers are doubles."""
_UNENCODABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f\ud800-\udfff]")
_SMALLEST = 1e-9
_FINE_EXCLUSIVE, _LARGEST_EXCLUSIVE, _COARSE_STEP = 10**6, 10**12, 1e-3
"""Largest exclusive limits from which 1e-9, or 0.001, can be distinguished."""


def exact_limit(value: object, name: str) -> object:
    """A limit. If the compiler cannot compare it exactly, it becomes the nearest exact value that is stricter."""
    if isinstance(value, int) and not isinstance(value, bool):
        return min(value, EXACT) if name.endswith("aximum") else max(value, -EXACT)
    return value


def number_of(value: object, place: RequestPath, *, smallest: float = _SMALLEST) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        place.refuse(value, "a number")
    if isinstance(value, float) and not math.isfinite(value):
        place.refuse(value, "a number")
    if abs(value) > EXACT or 0 < abs(value) < smallest:
        expected = f"a number from {-EXACT} to {EXACT}, not closer to 0 than {smallest}"
        place.value_not_enforced(value, expected)
    return value


def adjacent_limit(number: float, name: str, place: RequestPath, *, is_integer: bool) -> tuple[float, str]:
    """An exclusive integer limit as the adjacent inclusive limit: if both limits have the same integer part, the
    compiler's exclusive limits would include that integer."""
    if abs(number) > _LARGEST_EXCLUSIVE and not is_integer:
        expected = f"an exclusive limit from {-_LARGEST_EXCLUSIVE} to {_LARGEST_EXCLUSIVE}, or a fraction"
        place.value_not_enforced(number, expected)
    step = 1 if is_integer else _SMALLEST if abs(number) <= _FINE_EXCLUSIVE else _COARSE_STEP
    is_minimum = name == "exclusiveMinimum"
    limit = int(number) if is_integer else number
    return (limit + step if is_minimum else limit - step), ("minimum" if is_minimum else "maximum")


def encodable(text: str, place: RequestPath) -> str:
    """Raises NotEnforcedError for half of a surrogate pair, and for control characters without generated escapes."""
    if _UNENCODABLE.search(text):
        place.value_not_enforced(text, "text without control characters and halves of surrogate pairs")
    return text


# --- few values ----------------------------------------------------------------------------------------------------

Scalar = str | int | float | bool | None
_KEYWORDS: Final = frozenset(("type", "enum", "const"))
_OF_TYPE: Final[Mapping[str, tuple[Scalar, ...]]] = {"boolean": (True, False), "null": (None,)}
MAX_ORDERS: Final = 120
"""For a list without repetition: five values in any order."""


def finite_values(schema: Mapping[str, Any]) -> list[Scalar] | None:
    """The values of a schema consisting only of `type`, `enum` and `const`; None unless finitely many scalars."""
    if not schema.keys() <= _KEYWORDS:
        return None
    kinds = schema.get("type")
    if "const" in schema:
        values: Iterable[Any] = [schema["const"]]
    elif "enum" in schema:
        values = schema["enum"]
    elif isinstance(kinds, str) and kinds in _OF_TYPE:
        return list(_OF_TYPE[kinds])
    else:
        return None
    distinct = {_key(value): value for value in values if kinds is None or _is_of(value, kinds)}
    return None if any(isinstance(value, dict | list) for value in distinct.values()) else list(distinct.values())


def _key(value: Any) -> tuple[str, Any]:
    if isinstance(value, dict | list):
        return ("", id(value))
    return ("number", value) if isinstance(value, int | float) and not isinstance(value, bool) else ("", value)


def _is_of(value: Any, kinds: str | list[str]) -> bool:
    return any(_has_type(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and (isinstance(value, int) or value.is_integer()))
    names = {str: "string", type(None): "null", dict: "object", list: "array"}
    return names[type(value)] == kind


def lists_without_repetition(values: Sequence[object], least: int, most: int) -> list[dict[str, Any]] | None:
    """Schemas for the lists of `least` to `most` values without repetition; None if there are too many."""
    most = min(most, len(values))
    if least > most or math.perm(len(values), most) > MAX_ORDERS:
        return None
    return [
        {
            "type": "array",
            "prefixItems": [{"const": value} for value in order],
            "items": False,
            "minItems": least,
            "maxItems": most,
        }
        for order in itertools.permutations(values, most)
    ]


# --- formats -------------------------------------------------------------------------------------------------------

_LEAP_YEAR = "(?:[0-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
"""All except 0000."""
_LONG_MONTHS, _SHORT_MONTHS = "(?:0[13578]|1[02])", "(?:0[469]|11)"
_DAY = (
    f"(?:{_LONG_MONTHS}-(?:0[1-9]|[12][0-9]|3[01])|{_SHORT_MONTHS}-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR_MINUTE}:[0-5][0-9](?:\\.[0-9]{{1,9}})?(?:[Zz]|[+-]{_HOUR_MINUTE})"
_HEX = "[0-9a-f]"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"


def _uuid(version: int) -> str:
    return f"^{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}$"


def _ipv4_network(prefix: int) -> str:
    """Addresses whose bits after the prefix are 0, as required by Python's ipaddress."""
    full, bits = divmod(prefix, 8)
    octets = [_OCTET] * full
    if bits:
        octets.append(f"(?:{'|'.join(str(value) for value in range(0, 256, 1 << (8 - bits)))})")
    octets += ["0"] * (4 - len(octets))
    return r"\.".join(octets) + f"/{prefix}"


PATTERNS: Final = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "ipv4interface": f"^{_IPV4}/(?:3[0-2]|[12]?[0-9])$",
    "ipv4network": f"^(?:{'|'.join(map(_ipv4_network, range(33)))})$",
    **{f"uuid{version}": _uuid(version) for version in range(1, 9)},
}
"""Formats enforced by a pattern."""
ANY_TEXT: Final = frozenset({"binary", "directory-path", "file-path", "password", "path"})
"""Formats that permit any string: OpenAPI's for how a text is shown or sent, Pydantic's for paths."""
COMPILED: Final = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats known to the compiler."""
WITHOUT_LOOKING_AROUND: Final = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",  # Pydantic's for decimal numbers
}
"""Common patterns with lookahead, and equivalents without."""
ENFORCED: Final = tuple(sorted({*PATTERNS, *COMPILED}))
