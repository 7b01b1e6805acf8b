"""Reads a file's fields with type and bounds.

Invariant: an error names the field, its value and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .errors import GgufError, short
from .header import Strings

MAX_SIZE: Final = 1 << 24
"""Limit of a count or a width."""


class Fields:
    def __init__(self, fields: Mapping[str, Any], architecture: str = "") -> None:
        """architecture: prefix of the names of hyperparameters."""
        self._fields = fields
        self._prefix = f"{architecture}." if architecture else ""

    def has(self, name: str) -> bool:
        return self._prefix + name in self._fields

    def value(self, name: str) -> Any:
        """None = there is no such field."""
        return self._fields.get(self._prefix + name)

    def integer(self, name: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        """Raises GgufError, also if the field is missing and has no default."""
        value = self._required(name, default, f"a number from {least} to {most}")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, value, f"a number from {least} to {most}")
        return value

    def multiple(self, name: str, divisor: int) -> int:
        value = self.integer(name)
        if value % divisor:
            raise self.wrong(name, value, f"a multiple of {divisor}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._required(name, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(name, value, "a finite number")
        return _shortest(float(value))

    def boolean(self, name: str, default: bool) -> bool:
        value = self._required(name, default, "true or false")
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._required(name, default, "a text")
        if not isinstance(value, str):
            raise self.wrong(name, value, "a text")
        return value

    def strings(self, name: str) -> list[str]:
        value = self._required(name, None, "a list of strings")
        if not isinstance(value, Strings):
            raise self.wrong(name, value, "a list of strings")
        return value.decoded(self._prefix + name)

    def numbers(self, name: str, count: int) -> npt.NDArray[Any]:
        """The first `count` numbers of a list of at least that many."""
        expected = f"a list of {count} numbers"
        value = self._required(name, None, expected)
        if not isinstance(value, np.ndarray) or len(value) < count:
            raise self.wrong(name, value, expected)
        return value[:count]

    def common(self, name: str, default: int | None = None) -> int:
        """An integer, or a list with the same one for each layer, or 0 for layers that lack it."""
        value = self.value(name)
        if not isinstance(value, np.ndarray):
            return self.integer(name, default)
        kinds = set(value.tolist()) - {0} if value.dtype.kind in "iu" else set()
        if len(kinds) != 1 or not 1 <= (number := kinds.pop()) <= MAX_SIZE:
            raise self.wrong(name, value, f"a number from 1 to {MAX_SIZE}, or a list of one of them and zeros")
        return int(number)

    def _required(self, name: str, default: Any, expected: str) -> Any:
        value = self._fields.get(self._prefix + name, default)
        if value is None:
            raise GgufError(f"its field '{self._prefix + name}' is missing, expected {expected}")
        return value

    def wrong(self, name: str, value: Any, expected: str) -> GgufError:
        """The error for a field with this value."""
        shown = f"a list of {len(value)}" if isinstance(value, np.ndarray) else repr(value)
        shown = f"a list of {value.count} strings" if isinstance(value, Strings) else shown
        return GgufError(f"its field '{self._prefix}{name}' is {short(shown)}, expected {expected}")


def _shortest(value: float) -> float:
    """The shortest decimal with this float32 value, such as 1e-05."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else value
