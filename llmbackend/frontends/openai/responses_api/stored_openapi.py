"""The endpoints of stored responses in OpenAPI's words.

For: openai/openapi.py. Does not know: handlers. Invariant: each route of stored_endpoints.py is here, and no other.
"""

from __future__ import annotations

from typing import Final

from ...http.openapi_parts import closed, json_response, operation, refusals
from ..errors import JsonObject
from .conversation_openapi import PAGE_PARAMETERS

_STRING: Final[JsonObject] = {"type": "string"}
_ONE: Final = "/v1/responses/{response_id}"
_REFUSED: Final = refusals("OpenAIError", 400, 404, 429, 503)
_WHOLE: Final = {"200": json_response("Response")} | _REFUSED
SCHEMAS: Final[JsonObject] = {
    "ResponseDeleted": closed({"id": _STRING, "object": {"const": "response.deleted"}, "deleted": {"const": True}})
}
_CURSOR: Final[tuple[JsonObject, ...]] = (
    {"name": "stream", "in": "query", "schema": {"type": "boolean"}, "description": "Its events instead of it."},
    {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0}},
)
OPERATIONS: Final[dict[tuple[str, str], JsonObject]] = {
    ("GET", _ONE): operation("A stored response", _WHOLE, parameters=_CURSOR),
    ("DELETE", _ONE): operation("Delete a response", {"200": json_response("ResponseDeleted")} | _REFUSED),
    ("POST", f"{_ONE}/cancel"): operation("Cancel a background response", _WHOLE),
    ("GET", f"{_ONE}/input_items"): operation(
        "What a response was made from", {"200": json_response("ItemList")} | _REFUSED, parameters=PAGE_PARAMETERS
    ),
}
