"""Lists of stored items, page by page.

For: the endpoints that list a response's input items, or a conversation's items. Does not know: where items are stored.
Invariant: pages that follow one another by `after` have every item once, as long as none is added or removed.
Source: OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import JsonObject, OpenAIError, refuse
from .schema import INCLUDABLE

_MAX_ITEMS = 100
PAGE_PARAMETERS: tuple[JsonObject, ...] = (
    {
        "name": "after",
        "in": "query",
        "schema": {"type": "string"},
        "description": "The item that the page begins behind.",
    },
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": _MAX_ITEMS}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
)
_FIELDS = ("after", "limit", "order", "include", "include[]")


@dataclass(frozen=True, slots=True)
class PageQuery:
    after: str | None = None
    """The id of the item that the page begins behind."""
    limit: int = 20
    is_descending: bool = True
    """The latest first."""


def read_page_query(parameters: Mapping[str, str]) -> PageQuery:
    """The query of a URL. `include` asks for nothing that an item has not anyway. Raises OpenAIError."""
    for name in parameters:
        if name not in _FIELDS:
            raise OpenAIError(f"unknown query parameter '{name[:80]}'", param=name[:80], code="unknown_parameter")
    for name in ("include", "include[]"):
        for value in parameters.get(name, "").split(","):
            if value and value not in INCLUDABLE:
                raise refuse("include", f"one of {', '.join(INCLUDABLE)}", value)
    limit, order = parameters.get("limit", "20"), parameters.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= _MAX_ITEMS):
        raise refuse("limit", f"an integer from 1 to {_MAX_ITEMS}", limit)
    if order not in ("asc", "desc"):
        raise refuse("order", '"asc" or "desc"', order)
    return PageQuery(parameters.get("after") or None, int(limit), order == "desc")


def page(items: Sequence[JsonObject], query: PageQuery = PageQuery()) -> JsonObject:
    """items: all of them, the oldest first. Raises OpenAIError where `after` is none of them."""
    ordered = items[::-1] if query.is_descending else items
    begin = 0
    if query.after is not None:
        begin = next((index + 1 for index, item in enumerate(ordered) if item.get("id") == query.after), 0)
        if not begin:
            raise refuse("after", "the id of an item of the list", query.after)
    return item_list(ordered[begin : begin + query.limit], has_more=begin + query.limit < len(ordered))


def item_list(items: Sequence[JsonObject], *, has_more: bool = False) -> JsonObject:
    return {
        "object": "list",
        "data": items,
        "first_id": items[0].get("id") if items else None,
        "last_id": items[-1].get("id") if items else None,
        "has_more": has_more,
    }
