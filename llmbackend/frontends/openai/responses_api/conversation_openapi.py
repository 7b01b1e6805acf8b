"""The endpoints of conversations in OpenAPI's words.

For: `openai/openapi.py`. Does not know: handlers. Invariant: as of that module: requests are documented by the models
that read them.
"""

from __future__ import annotations

from typing import Any, Final

from ...http.openapi_parts import array, body, closed, json_response, open_object, operation, optional, refusals
from ..errors import JsonObject
from .conversation_endpoints import ConversationBody, ConversationItemsBody, ConversationUpdateBody

_STRING: Final = {"type": "string"}
_REFUSED: Final = refusals("OpenAIError", 400, 404, 413, 415, 503)
_ONE: Final = "/v1/conversations/{conversation_id}"
_ITEMS: Final = f"{_ONE}/items"
_ITEM: Final = _ITEMS + "/{item_id}"

REQUESTS: Final = (ConversationBody, ConversationUpdateBody, ConversationItemsBody)
SCHEMAS: Final[JsonObject] = {
    "Conversation": closed(
        {
            "id": _STRING,
            "object": {"const": "conversation"},
            "created_at": {"type": "integer"},
            "metadata": {"type": "object"},
        }
    ),
    "ConversationDeleted": closed(
        {"id": _STRING, "object": {"const": "conversation.deleted"}, "deleted": {"const": True}}
    ),
    "Item": open_object({"type": _STRING, "id": _STRING}, ["type"]),
    "ItemList": closed(
        {
            "object": {"const": "list"},
            "data": array({"$ref": "#/components/schemas/Item"}),
            "first_id": optional(_STRING),
            "last_id": optional(_STRING),
            "has_more": {"type": "boolean"},
        }
    ),
}
PAGE_PARAMETERS: Final[tuple[JsonObject, ...]] = (
    {"name": "after", "in": "query", "schema": _STRING, "description": "The item that the page begins behind."},
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
)


def _conversation(summary: str, **more: Any) -> JsonObject:
    return operation(summary, {"200": json_response("Conversation")} | _REFUSED, **more)


OPERATIONS: Final[dict[tuple[str, str], JsonObject]] = {
    ("POST", "/v1/conversations"): _conversation("Create a conversation", body=body("ConversationBody")),
    ("GET", _ONE): _conversation("One conversation"),
    ("POST", _ONE): _conversation("Change its metadata", body=body("ConversationUpdateBody")),
    ("DELETE", _ONE): operation(
        "Delete a conversation and its items", {"200": json_response("ConversationDeleted")} | _REFUSED
    ),
    ("POST", _ITEMS): operation(
        "Add items", {"200": json_response("ItemList")} | _REFUSED, body=body("ConversationItemsBody")
    ),
    ("GET", _ITEMS): operation("Its items", {"200": json_response("ItemList")} | _REFUSED, parameters=PAGE_PARAMETERS),
    ("GET", _ITEM): operation("One item", {"200": json_response("Item")} | _REFUSED),
    ("DELETE", _ITEM): _conversation("Remove an item"),
}
