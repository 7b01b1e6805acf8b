"""What the table of fields is made of: a field is done, refused or a label, and each says how that is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .asking import Endpoint

Check = Callable[[Endpoint], None]
"""Sends requests with the field, and raises AssertionError where an answer is not as promised."""


@dataclass(frozen=True)
class Done:
    """A field with an effect."""

    promise: str
    """What differs between two values of the field."""
    check: Check


@dataclass(frozen=True)
class Refused:
    """A field that is refused by name, with a reason."""

    values: Sequence[Any]
    """Some that must be refused."""
    accepted: Sequence[Any] = ()
    """Those that ask for what happens anyway."""


@dataclass(frozen=True)
class Label:
    """A field that asks nothing of the model, and is in the access log."""

    value: Any


Row = Done | Refused | Label


def promise(text: str) -> Callable[[Check], Done]:
    """Decorates a check."""
    return lambda check: Done(text, check)
