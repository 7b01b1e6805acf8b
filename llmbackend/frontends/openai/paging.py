"""Pages of a list, as OpenAI's API has them: `after`, `limit` and `order` of a query, and the answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..http.errors import JsonObject, OpenAIError, refuse

_MAX_ITEMS = 100
PAGE_PARAMETERS: tuple[JsonObject, ...] = (
    {
        "name": "after",
        "in": "query",
        "schema": {"type": "string"},
        "description": "The item after which the page begins.",
    },
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": _MAX_ITEMS}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
)


@dataclass(frozen=True, slots=True)
class PageQuery:
    after: str | None = None
    """The id of the item that the page begins behind."""
    limit: int = 20
    is_descending: bool = True
    """The latest first."""


def read_page_query(
    parameters: Mapping[str, str], includable: Collection[str] = (), default_order: str = "desc"
) -> PageQuery:
    """The query of a URL. includable: what `include` may name, which every item has anyway. Raises OpenAIError."""
    known = ("after", "limit", "order", *(("include", "include[]") if includable else ()))
    for name in parameters:
        if name not in known:
            raise OpenAIError(f"unknown query parameter '{name[:80]}'", param=name[:80], code="unknown_parameter")
    for name in ("include", "include[]"):
        for value in parameters.get(name, "").split(","):
            if value and value not in includable:
                raise refuse("include", f"one of {', '.join(includable)}", value)
    limit, order = parameters.get("limit", "20"), parameters.get("order", default_order)
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
            raise not_listed(query.after)
    return item_list(ordered[begin : begin + query.limit], has_more=begin + query.limit < len(ordered))


def not_listed(after: str) -> OpenAIError:
    return refuse("after", "the id of an item of the list", after)


def item_list(items: Sequence[JsonObject], *, has_more: bool = False) -> JsonObject:
    return {
        "object": "list",
        "data": items,
        "first_id": items[0].get("id") if items else None,
        "last_id": items[-1].get("id") if items else None,
        "has_more": has_more,
    }
