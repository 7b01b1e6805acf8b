"""The endpoints of Anthropic's API in OpenAPI's words.

For: `frontends/openapi.py`. Does not know: handlers. Invariant: requests are documented by the models that read them
(schema.py); answers have their forms here.
"""

from __future__ import annotations

from typing import Final

from ..http.openapi_parts import array, body, closed, json_response, operation, optional, ref, refusals
from ..openai.errors import JsonObject
from ..openai.openapi import request_schemas
from .schema import CountTokensRequest, MessagesRequest

_STRING: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_USAGE: Final = closed(
    {
        "input_tokens": _COUNT,
        "cache_creation_input_tokens": _COUNT,
        "cache_read_input_tokens": _COUNT,
        "output_tokens": _COUNT,
        "output_tokens_details": closed({"thinking_tokens": _COUNT}),
        "service_tier": {"const": "standard"},
    },
    required=[
        "input_tokens",
        "cache_creation_input_tokens",
        "cache_read_input_tokens",
        "output_tokens",
        "service_tier",
    ],
)
_BLOCK: Final = {
    "anyOf": [
        closed({"type": {"const": "text"}, "text": _STRING}),
        closed({"type": {"const": "thinking"}, "thinking": _STRING, "signature": _STRING}),
        closed({"type": {"const": "tool_use"}, "id": _STRING, "name": _STRING, "input": {"type": "object"}}),
    ]
}
_STOP_REASONS: Final = ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
_ANSWERS: Final[JsonObject] = {
    "AnthropicError": closed(
        {
            "type": {"const": "error"},
            "error": closed({"type": _STRING, "message": _STRING}),
            "request_id": optional(_STRING),
        }
    ),
    "AnthropicMessage": closed(
        {
            "id": _STRING,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": _STRING,
            "content": array(_BLOCK),
            "stop_reason": {"enum": _STOP_REASONS},
            "stop_sequence": optional(_STRING),
            "usage": _USAGE,
        }
    ),
    "AnthropicTokenCount": closed({"input_tokens": _COUNT}),
}
_REFUSED: Final = refusals("AnthropicError", 400, 404, 413, 415, 429, 529)


def schemas() -> JsonObject:
    return _ANSWERS | request_schemas(MessagesRequest, CountTokensRequest)


OPERATIONS: Final[dict[tuple[str, str], JsonObject]] = {
    ("POST", "/v1/messages"): operation(
        "Answer a conversation (Anthropic's API)",
        {
            "200": {
                "description": "The whole message, or with `stream` the events that make it.",
                "content": {"application/json": {"schema": ref("AnthropicMessage")}, "text/event-stream": {}},
            }
        }
        | _REFUSED,
        body=body("MessagesRequest"),
    ),
    ("POST", "/v1/messages/count_tokens"): operation(
        "How many tokens a conversation has (Anthropic's API)",
        {"200": json_response("AnthropicTokenCount")} | _REFUSED,
        body=body("CountTokensRequest"),
    ),
}
