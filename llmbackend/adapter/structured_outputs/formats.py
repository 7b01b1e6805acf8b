"""Formats of strings in JSON schemas: which are enforced, and how.

For: json_schema.py. Does not know: schemas. Invariant: a string of an enforced format is valid to strict validators, by
RFC 3339 also in leap years; leap seconds are not generated, since their dates are not known in advance.
"""

from __future__ import annotations

from typing import Final

_LEAP_YEAR = "(?:[0-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
"""All but 0000."""
_LONG_MONTHS, _SHORT_MONTHS = "(?:0[13578]|1[02])", "(?:0[469]|11)"
_DAY = (
    f"(?:{_LONG_MONTHS}-(?:0[1-9]|[12][0-9]|3[01])|{_SHORT_MONTHS}-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR_MINUTE}:[0-5][0-9](?:\\.[0-9]{{1,9}})?(?:[Zz]|[+-]{_HOUR_MINUTE})"
PATTERNS: Final = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
}
"""Formats that are enforced by a pattern."""
COMPILED: Final = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that the compiler knows."""
ENFORCED: Final = tuple(sorted({*PATTERNS, *COMPILED}))
