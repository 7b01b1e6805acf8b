"""An API in the run of all fields: its endpoint's name, the fields that others document, and a row for each.

Used by the run and the page. Independent of what any field means. Invariant: an endpoint is called only through
`Asked`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from .table import Row


class Asked(Protocol):
    """One endpoint of a running server."""

    @property
    def name(self) -> str: ...

    def texts(self, **fields: Any) -> Sequence[str]:
        """What the endpoint answers, as far as a request determines it."""
        ...

    def reason(self, field: str, value: Any) -> str:
        """Why a value is refused. Raises AssertionError where it is not, or not by the field's name."""
        ...


@dataclass(frozen=True)
class Api:
    """published: the fields that each origin says there are; a field is of the first origin that has it."""

    name: str
    title: str
    """Its heading on the page."""
    published: Mapping[str, frozenset[str]]
    rows: Mapping[str, Row]
    make: Callable[[httpx.Client], Asked]

    @property
    def missing(self) -> set[str]:
        """Published fields without a row."""
        return {field for fields in self.published.values() for field in fields} - self.rows.keys()

    def origin(self, field: str) -> str:
        """Who publishes the field first."""
        return next((origin for origin, fields in self.published.items() if field in fields), "here")
