"""JSON Schema of content blocks, tools and tool choices, for /openapi.json.

For: schema.py, whose fields have them. Does not know: their reader, which is by hand (content.py), since it names the
path of what is wrong. Invariant: what the reader refuses by its form, these do not describe.
"""

from __future__ import annotations

from typing import Final

from ..http.openapi_parts import Json, array, closed, optional

_STRING: Final = {"type": "string"}
_NON_EMPTY: Final = {"type": "string", "minLength": 1}
CACHE_CONTROL: Final = optional(
    closed({"type": {"const": "ephemeral"}, "ttl": {"enum": ["5m", "1h", None]}}, required=["type"])
)


def _block(kind: str, fields: Json, required: tuple[str, ...]) -> Json:
    properties = {"type": {"const": kind}, **fields, "cache_control": CACHE_CONTROL}
    return closed(properties, required=["type", *required])


_TEXT: Final = _block("text", {"text": _STRING}, ("text",))
_TEXTS: Final = {"anyOf": [_STRING, array(_TEXT)]}
_TOOL_RESULT: Final = _block(
    "tool_result",
    {"tool_use_id": _NON_EMPTY, "content": optional(_TEXTS), "is_error": {"type": ["boolean", "null"]}},
    ("tool_use_id",),
)
_TOOL_USE: Final = _block(
    "tool_use", {"id": _NON_EMPTY, "name": _NON_EMPTY, "input": {"type": "object"}}, ("id", "name", "input")
)
_THINKING: Final = _block("thinking", {"thinking": _STRING, "signature": _NON_EMPTY}, ("thinking", "signature"))
_REDACTED: Final = _block("redacted_thinking", {"data": _NON_EMPTY}, ("data",))


def _message(role: str, content: Json) -> Json:
    return closed({"role": {"const": role}, "content": content})


MESSAGES: Final = array(
    {
        "anyOf": [
            _message("user", {"anyOf": [_STRING, array({"anyOf": [_TEXT, _TOOL_RESULT]}, minItems=1)]}),
            _message("assistant", {"anyOf": [_STRING, array({"anyOf": [_TEXT, _THINKING, _REDACTED, _TOOL_USE]})]}),
            _message("system", _TEXTS),
        ]
    },
    minItems=1,
)
SYSTEM: Final = optional(_TEXTS)
TOOLS: Final = optional(
    array(
        closed(
            {
                "type": {"enum": ["custom", None]},
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"},
                "description": {"type": ["string", "null"]},
                "input_schema": {"type": "object"},
                "strict": {"type": ["boolean", "null"]},
                "cache_control": CACHE_CONTROL,
                "eager_input_streaming": {"enum": [True, None]},
                "defer_loading": {"enum": [False, None]},
                "allowed_callers": {"enum": [["direct"], None]},
                "input_examples": {"enum": [[], None]},
            },
            required=["name", "input_schema"],
        )
    )
)
_SINGLE: Final = {"disable_parallel_tool_use": {"type": ["boolean", "null"]}}
TOOL_CHOICE: Final = optional(
    {
        "anyOf": [
            closed({"type": {"enum": ["auto", "any", "none"]}, **_SINGLE}, required=["type"]),
            closed({"type": {"const": "tool"}, "name": _NON_EMPTY, **_SINGLE}, required=["type", "name"]),
        ]
    }
)
