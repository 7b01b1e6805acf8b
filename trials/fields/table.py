"""The elements of the field table: a field is effective, refused or a label, and each entry says how that is
observed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Check = Callable[[Any], None]
"""Given an endpoint (api.py), sends requests with the field; AssertionError where an answer breaks the promise."""


@dataclass(frozen=True)
class Done:
    """A field with an effect."""

    promise: str
    """What differs between two values of the field."""
    check: Check
    is_label: bool = False
    """It asks nothing of the model, and the check has seen where it is shown."""


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
    logged: str = ""
    """Its name in the log, where that is another."""


Row = Done | Refused | Label


EndpointT = TypeVar("EndpointT")


def promise(text: str, *, is_label: bool = False) -> Callable[[Callable[[EndpointT], None]], Done]:
    """Decorates a check."""
    return lambda check: Done(text, check, is_label)
