"""Reads the fields of a JSON object one by one, each with its type and range.

For: the request parsers of this frontend. Does not know: which fields there are. Invariant: every field of the object
is either taken by name or refused by name in `finish`; a null is the same as a field left out (clients send both).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from .errors import OpenAIError, refuse

JsonObject = dict[str, Any]
INT32_MAX = 2**31 - 1


class Fields:
    """The fields of one object that nobody has taken yet. `path` prefixes their names in error messages."""

    def __init__(self, values: JsonObject, path: str = "") -> None:
        self._left = dict(values)
        self._path = path

    def name(self, field: str) -> str:
        return f"{self._path}{field}"

    def take(self, field: str) -> Any:
        return self._left.pop(field, None)

    def require(self, field: str) -> Any:
        value = self.take(field)
        if value is None:
            param = self.name(field)
            raise OpenAIError(f"missing required field '{param}'", param=param, code="missing_required_parameter")
        return value

    def boolean(self, field: str) -> bool | None:
        value = self.take(field)
        if value is not None and not isinstance(value, bool):
            raise refuse(self.name(field), "true or false", value)
        return value

    def integer(self, field: str, low: int, high: int = INT32_MAX) -> int | None:
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise refuse(self.name(field), f"an integer from {low} to {high}", value)
        return value

    def number(self, field: str, low: float, high: float) -> float | None:
        value = self.take(field)
        if value is None:
            return None
        if not _is_number(value) or not low <= value <= high:
            raise refuse(self.name(field), f"a number from {low:g} to {high:g}", value)
        return float(value)

    def text(self, field: str) -> str | None:
        value = self.take(field)
        if value is not None and not isinstance(value, str):
            raise refuse(self.name(field), "a string", value)
        return value

    def mapping(self, field: str) -> JsonObject | None:
        value = self.take(field)
        if value is not None and not isinstance(value, dict):
            raise refuse(self.name(field), "an object", value)
        return value

    def object(self, field: str) -> Fields | None:
        """As `mapping`, to be read field by field."""
        value = self.mapping(field)
        return None if value is None else Fields(value, self.name(field) + ".")

    def strings(self, field: str) -> list[str] | None:
        """A string or a list of strings, none of them empty."""
        value = self.take(field)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str) and item for item in items):
            raise refuse(self.name(field), "a non-empty string or a list of them", value)
        return items

    def token_ids(self, field: str) -> list[int] | None:
        value = self.take(field)
        if value is not None and not is_token_ids(value):
            raise refuse(self.name(field), "a list of token ids", value)
        ids: list[int] | None = value
        return ids

    def logit_bias(self, field: str) -> dict[str, float] | None:
        """Token id (a string, as JSON's keys are) → bias from -100 to 100."""
        value = self.mapping(field)
        if value is None:
            return None
        for token, bias in value.items():
            if not (token.isascii() and token.isdigit()):
                raise refuse(self.name(field), "token ids as keys", token)
            if not _is_number(bias) or not -100 <= bias <= 100:
                raise refuse(self.name(f"{field}.{token}"), "a number from -100 to 100", bias)
        return value

    def only(self, field: str, accepted: Collection[Any]) -> None:
        """Takes a field that may be sent, but only with a value that asks for what happens anyway."""
        value = self.take(field)
        if value is None or any(value == item and type(value) is type(item) for item in accepted):
            return
        param = self.name(field)
        allowed = " or ".join(_as_json(item) for item in accepted)
        hint = f"; only {allowed} is accepted" if accepted else ""
        raise OpenAIError(f"'{param}' is not supported yet{hint}", param=param, code="unsupported_parameter")

    def finish(self) -> None:
        """Refuses what is left."""
        for field in self._left:
            param = self.name(field)
            raise OpenAIError(f"unknown field '{param}'", param=param, code="unknown_parameter")


def is_token_ids(value: object) -> bool:
    """A list of integers from 0 to 2^31-1; an empty list is one."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= INT32_MAX for item in value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_json(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"'{value}'" if isinstance(value, str) else str(value)
