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
_HEX = "[0-9a-f]"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"


def _uuid(version: int) -> str:
    return f"^{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}$"


def _ipv4_networks() -> str:
    """An address whose bits behind the prefix are 0, for each length of the prefix, as Python's ipaddress wants it."""
    return "|".join(_ipv4_network(prefix) for prefix in range(33))


def _ipv4_network(prefix: int) -> str:
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
    "ipv4network": f"^(?:{_ipv4_networks()})$",
    **{f"uuid{version}": _uuid(version) for version in range(1, 9)},
}
"""Formats that are enforced by a pattern."""
ANY_TEXT: Final = frozenset({"binary", "directory-path", "file-path", "password", "path"})
"""Formats that every string has: OpenAPI's of how a text is shown or sent, Pydantic's of paths that need not exist."""
COMPILED: Final = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that the compiler knows."""
WITHOUT_LOOKING_AROUND: Final = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",  # Pydantic's of a decimal number
}
"""Common patterns, each with one that matches the same and that a grammar can have."""
ENFORCED: Final = tuple(sorted({*PATTERNS, *COMPILED}))
