"""`tool_choice` of a chat, and its older form `function_call`: both become a ToolChoice.

For: schema.py; the Responses API, whose form differs in how a tool is named. Does not know: which tools there are.
Source: OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

from pydantic import PlainValidator, WithJsonSchema

from ..conversation.tools import MAX_TOOLS, ChosenTool, ToolChoice
from .errors import JsonObject, refuse
from .validation import refuse_unknown

_FIELD: Final = "tool_choice"
_FUNCTION_CALL: Final = "function_call"
MODES: Final = ("none", "auto", "required")


def _read_of_chat(value: object) -> ToolChoice:
    if value in MODES:
        return ToolChoice(value)
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("function", "allowed_tools"):
        expected = '"none", "auto", "required", or an object of type "function" or "allowed_tools"'
        raise refuse(_FIELD, expected, value)
    refuse_unknown(value, frozenset(("type", kind)), _FIELD, may_be_null=True)
    if kind == "function":
        return ToolChoice("required", (_named_in_chat(value, _FIELD),), is_named=True)
    param, allowed = f"{_FIELD}.allowed_tools", value.get("allowed_tools")
    if not isinstance(allowed, dict):
        raise refuse(param, "an object with 'mode' and 'tools'", allowed)
    refuse_unknown(allowed, frozenset(("mode", "tools")), param, may_be_null=True)
    return read_allowed(allowed, param, _named_in_chat)


def _named_in_chat(value: object, param: str) -> ChosenTool:
    """Of `{"type": "function", "function": {"name": …}}`."""
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise refuse(param, 'an object {"type": "function", "function": {"name": …}}', value)
    return ChosenTool(name, _FIELD, "a function of 'tools'")


def _read_function_call(value: object) -> ToolChoice:
    if value in ("none", "auto"):
        return ToolChoice(value)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str):
        raise refuse(_FUNCTION_CALL, '"none", "auto", or an object with a \'name\'', value)
    refuse_unknown(value, frozenset(("name",)), _FUNCTION_CALL, may_be_null=True)
    return ToolChoice("required", (ChosenTool(name, _FUNCTION_CALL, "a function of 'functions'"),), is_named=True)


def read_allowed(value: JsonObject, param: str, read: Callable[[object, str], ChosenTool]) -> ToolChoice:
    """Of `{"mode": …, "tools": […]}`, the object `param`. read: one of the tools. Raises OpenAIError."""
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise refuse(f"{param}.mode", '"auto" or "required"', mode)
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        raise refuse(f"{param}.tools", f"a list of 1 to {MAX_TOOLS} tools", tools)
    return ToolChoice(mode, tuple(read(tool, f"{param}.tools[{index}]") for index, tool in enumerate(tools)))


def closed(properties: JsonObject) -> JsonObject:
    """JSON Schema of an object with exactly these properties."""
    return {"type": "object", "required": [*properties], "properties": properties, "additionalProperties": False}


_NAME: JsonObject = {"name": {"type": "string"}}
_CHAT_NAMED = closed({"type": {"const": "function"}, "function": closed(_NAME)})
_CHAT_ALLOWED = {
    "mode": {"enum": ["auto", "required"]},
    "tools": {"type": "array", "minItems": 1, "items": _CHAT_NAMED},
}
_CHAT_SCHEMA: JsonObject = {
    "anyOf": [
        {"enum": [*MODES]},
        _CHAT_NAMED,
        closed({"type": {"const": "allowed_tools"}, "allowed_tools": closed(_CHAT_ALLOWED)}),
    ]
}
ChatToolChoice = Annotated[Any, PlainValidator(_read_of_chat), WithJsonSchema(_CHAT_SCHEMA)]
FunctionCall = Annotated[
    Any, PlainValidator(_read_function_call), WithJsonSchema({"anyOf": [{"enum": ["none", "auto"]}, closed(_NAME)]})
]
