"""The response object in OpenAPI's words.

For: openai/openapi.py. Does not know: handlers. Invariant: a closed form: the members that response_state.py writes
and no others (`make fuzz` compares them).
"""

from __future__ import annotations

from typing import Any, Final

from ...http.openapi_parts import array, closed, optional
from ..errors import JsonObject

_STRING: Final[JsonObject] = {"type": "string"}
_COUNT: Final[JsonObject] = {"type": "integer", "minimum": 0}
_BOOLEAN: Final[JsonObject] = {"type": "boolean"}
_NUMBER: Final[JsonObject] = {"type": "number"}
_OBJECT: Final[JsonObject] = {"type": "object"}


def _item(kind: str, members: JsonObject, may_have: JsonObject | None = None) -> JsonObject:
    shared = {"id": _STRING, "type": {"const": kind}, "status": {"enum": ["in_progress", "completed", "incomplete"]}}
    required = shared | members
    return closed(required | (may_have or {}), required=list(required))


def _part(kind: str, members: JsonObject) -> JsonObject:
    return closed({"type": {"const": kind}, "text": _STRING, **members})


_TEXT: Final = _part("output_text", {"annotations": array(_OBJECT), "logprobs": array(_OBJECT)})
_CALLED: Final[JsonObject] = {"call_id": _STRING, "name": _STRING}
_NAMESPACE: Final[JsonObject] = {"namespace": _STRING}
_OUTPUT: Final[JsonObject] = {
    "anyOf": [
        _item("message", {"role": {"const": "assistant"}, "content": array(_TEXT)}),
        _item(
            "reasoning",
            {"summary": array(_OBJECT), "content": array(_part("reasoning_text", {}))},
            {"encrypted_content": optional(_STRING)},
        ),
        _item("function_call", _CALLED | {"arguments": _STRING}, _NAMESPACE),
        _item("custom_tool_call", _CALLED | {"input": _STRING}, _NAMESPACE),
        _item("tool_search_call", {"call_id": _STRING, "execution": {"const": "client"}, "arguments": {}}),
    ]
}
_USAGE: Final = closed(
    {
        "input_tokens": _COUNT,
        "input_tokens_details": closed({"cached_tokens": _COUNT, "cache_write_tokens": {"const": 0}}),
        "output_tokens": _COUNT,
        "output_tokens_details": closed({"reasoning_tokens": _COUNT}),
        "total_tokens": _COUNT,
    }
)
_OF_REQUEST: Final[JsonObject] = {
    "background": _BOOLEAN,
    "conversation": optional(closed({"id": _STRING})),
    "frequency_penalty": _NUMBER,
    "instructions": optional(_STRING),
    "max_output_tokens": optional(_COUNT),
    "max_tool_calls": optional(_COUNT),
    "metadata": _OBJECT,
    "parallel_tool_calls": _BOOLEAN,
    "presence_penalty": _NUMBER,
    "previous_response_id": optional(_STRING),
    "prompt_cache_key": optional(_STRING),
    "prompt_cache_retention": optional(_STRING),
    "reasoning": _OBJECT,
    "safety_identifier": optional(_STRING),
    "service_tier": _STRING,
    "store": _BOOLEAN,
    "temperature": _NUMBER,
    "text": _OBJECT,
    "tool_choice": {"type": ["string", "object"]},
    "tools": array(_OBJECT),
    "top_logprobs": _COUNT,
    "top_p": _NUMBER,
    "truncation": _STRING,
    "user": optional(_STRING),
}
RESPONSE: Final[dict[str, Any]] = closed(
    {
        "id": _STRING,
        "object": {"const": "response"},
        "created_at": _COUNT,
        "model": _STRING,
        **_OF_REQUEST,
        "status": {"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
        "completed_at": optional(_COUNT),
        "error": optional(closed({"code": _STRING, "message": _STRING})),
        "incomplete_details": optional(closed({"reason": {"const": "max_output_tokens"}})),
        "output": array(_OUTPUT),
        "usage": optional(_USAGE),
    }
)
