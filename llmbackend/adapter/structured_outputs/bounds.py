"""Bounds of constraints: what one request may make the adapter walk and the grammar compiler build.

For: all of structured_outputs. Does not know: what is bounded. Invariant: within them a constraint costs its own
request well below a second of a conversion thread, and no other request a step: the compiler works without the GIL.
"""

from __future__ import annotations

import dataclasses
from typing import NoReturn

from llmbackend.core.backend_api import ErrorCode, TritonError, invalid_argument, shown
from llmbackend.engine.grammars.grammar_compiler import ENGINE_LIMITS

MAX_DEPTH = 64
"""Of nested schemas, tags, groups of a regular expression."""
MAX_SCHEMA_NODES = 8192
"""Schemas, enumerated values and what is in them, in one constraint."""
MAX_ADDED_ALTERNATIVES = 600
"""For lists without repetitions: those of five such lists of five values, which compile in 0.2 s."""
MAX_LEFT_OUT = 64
"""Places of a constraint that are named as not enforced."""
MAX_PROPERTIES = 480
"""Of one object: the parser follows four items for each, and 2000 at a time."""
MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 65536
"""Of all choices together."""
MAX_REGEX_CHARS = 8192
MAX_REGEX_LENGTH = 100_000
"""Characters of a regular expression with its repetitions written out."""
MAX_MULTIPLE_OF = 10_000
"""Numerator and denominator of multipleOf: the compiler builds a state for each remainder."""
MAX_GRAMMAR_CHARS = 65536
MAX_TAGS = 512
CHECK_LIMITS = dataclasses.replace(ENGINE_LIMITS, initial_lexer_fuel=500_000, max_grammar_size=100_000)
"""Of the compiler. None is larger than the engine's, so that what passes here compiles there."""
PROBES, PROBE_MASKS = 2, 32
"""Texts of a grammar that are begun to see whether it can be followed, and masks for each of them."""


class NotEnforcedError(TritonError):
    """A keyword of a valid schema that a grammar cannot enforce. No bound depends on it: a request that is not strict
    is served without it."""


class Place:
    """Where in a request something stands: the parameter, and the path inside its value."""

    __slots__ = ("param", "path")

    def __init__(self, param: str, path: str = "") -> None:
        self.param = param
        self.path = path

    def __truediv__(self, part: str | int) -> Place:
        """The place of a member, as a JSON pointer."""
        text = str(part)[:80].replace("~", "~0").replace("/", "~1")
        return Place(self.param, f"{self.path}/{text}")

    def __str__(self) -> str:
        return f"'{self.param}'" + (f" at {self.path}" if self.path else "")

    def refuse(self, value: object, expected: str) -> NoReturn:
        """Raises TritonError INVALID_ARG naming the place, the value, and what was expected."""
        raise invalid_argument(f"{self} is {shown(value)}, expected {expected}", param=self.param)

    def wrong(self, why: str) -> NoReturn:
        """Raises TritonError INVALID_ARG."""
        raise invalid_argument(f"{self}: {why}", param=self.param)

    def not_enforced(self, why: str) -> NoReturn:
        """Raises NotEnforcedError."""
        raise NotEnforcedError(f"{self}: {why}", ErrorCode.INVALID_ARG, self.param)

    def value_not_enforced(self, value: object, expected: str) -> NoReturn:
        """Raises NotEnforcedError in the words of `refuse`."""
        raise NotEnforcedError(f"{self} is {shown(value)}, expected {expected}", ErrorCode.INVALID_ARG, self.param)

    @property
    def pointer(self) -> str:
        """The parameter and the path as one word: `structured_outputs#/json/not`."""
        return f"{self.param}#{self.path}"

    def check_at_most(self, count: int, limit: int, unit: str) -> None:
        if count > limit:
            self.wrong(f"{count} {unit}, expected at most {limit}")
