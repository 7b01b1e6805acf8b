"""Decides validity with the package jsonschema, with exact numbers and strict formats.

Used by verdict.py. Independent of grammars.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import urlsplit

from jsonschema import Draft202012Validator, FormatChecker, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for

_EMAIL = re.compile(r"[^@\s]+@[^@\s]+")
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOSTNAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_TIME_OF_DURATION = r"T(?=\d)(?:\d+H)?(?:\d+M)?(?:\d+S)?"
_DURATION = re.compile(rf"P(?=\d|T)(?:\d+W|(?:\d+Y)?(?:\d+M)?(?:\d+D)?(?:{_TIME_OF_DURATION})?)")
_OFFSET_TIME = re.compile(r"\d\d:\d\d:\d\d(?:\.\d+)?(?:[Zz]|[+-]\d\d:\d\d)")


def exact(text: str) -> Any:
    """JSON with decimal numbers."""
    return json.loads(text, parse_float=Decimal)


def validator(schema: Any) -> Validator:
    """By the draft that the schema names."""
    read = exact(json.dumps(schema))
    kind = validator_for(read, default=Draft202012Validator) if isinstance(read, dict) else Draft202012Validator
    return extend(kind, {"multipleOf": _multiple_of})(read, format_checker=_FORMATS)


def _multiple_of(validator: Any, step: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "number") and (Fraction(instance) / Fraction(step)).denominator != 1:
        yield ValidationError(f"{instance} is no multiple of {step}")


_FORMATS = FormatChecker(formats=())


Check = Callable[[str], object]


def _check(name: str) -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        _FORMATS.checks(name, raises=ValueError)(lambda value: not isinstance(value, str) or bool(function(value)))
        return function

    return register


@_check("date")
def _date(value: str) -> object:
    return len(value) == 10 and bool(datetime.date.fromisoformat(value))


@_check("time")
def _time(value: str) -> object:
    whole = re.sub(r"\.\d+", "", value)
    return bool(_OFFSET_TIME.fullmatch(value)) and bool(
        datetime.time.fromisoformat(whole.upper().replace("Z", "+00:00"))
    )


@_check("date-time")
def _date_time(value: str) -> object:
    return len(value) > 10 and value[10] in "Tt" and _date(value[:10]) and _time(value[11:])


@_check("ipv4")
def _ipv4(value: str) -> bool:
    return ipaddress.IPv4Address(value) is not None


@_check("ipv6")
def _ipv6(value: str) -> bool:
    return "%" not in value and ipaddress.IPv6Address(value) is not None


@_check("uuid")
def _uuid(value: str) -> bool:
    return len(value) == 36 and all(value[at] == "-" for at in (8, 13, 18, 23)) and uuid.UUID(value) is not None


_check("email")(_EMAIL.fullmatch)
_check("hostname")(lambda value: len(value) <= 253 and _HOSTNAME.fullmatch(value))
_check("duration")(_DURATION.fullmatch)
_check("uri")(lambda value: re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", value) and urlsplit(value) and " " not in value)
