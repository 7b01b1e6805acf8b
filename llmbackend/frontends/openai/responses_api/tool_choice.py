"""`tool_choice` of a Responses request: which tools a client names, before it is known which ones there are.

For: the fields of a request; tools.py, which finds the named ones. Does not know: the tools. Invariant: as of chat's
(tools.py beside this package); the names of hosted tools are refused by their type.
Source: OpenAI's API reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from ..errors import JsonObject, OpenAIError, refuse
from ..tools import MAX_TOOLS, Mode
from ..validation import refuse_unknown
from .tool_fields import REFUSED_TOOLS, WEB_SEARCHES

_FIELD = "tool_choice"
_NAMED_TYPES = ("function", "custom")


@dataclass(frozen=True, slots=True)
class NamedChoice:
    """One tool, by its type and name."""

    type: str
    name: str
    param: str
    """Where it stands."""


@dataclass(frozen=True, slots=True)
class Choice:
    mode: Mode
    tools: tuple[NamedChoice, ...] | None = None
    """None: all of them."""
    is_named: bool = False
    """One tool, which is called once."""


def _read(value: object) -> Choice:
    if value in ("none", "auto", "required"):
        return Choice(value)
    if not isinstance(value, dict):
        raise refuse(_FIELD, '"none", "auto", "required", or an object with a \'type\'', value)
    if value.get("type") == "allowed_tools":
        return _read_allowed(value)
    return Choice("required", (_read_named(value, _FIELD),), is_named=True)


def _read_allowed(value: JsonObject) -> Choice:
    refuse_unknown(value, frozenset(("type", "mode", "tools")), _FIELD, may_be_null=True)
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise refuse(f"{_FIELD}.mode", '"auto" or "required"', mode)
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        raise refuse(f"{_FIELD}.tools", f"a list of 1 to {MAX_TOOLS} tools", tools)
    return Choice(mode, tuple(_read_named(tool, f"{_FIELD}.tools[{index}]") for index, tool in enumerate(tools)))


def _read_named(value: object, param: str) -> NamedChoice:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str):
        raise refuse(param, 'an object {"type": "function", "name": …} or {"type": "custom", "name": …}', value)
    if kind not in _NAMED_TYPES:
        if reason := REFUSED_TOOLS.get(kind, "this server searches nothing" if kind in WEB_SEARCHES else ""):
            message = f"'{param}.type' is \"{kind}\", which is not supported: {reason}"
            raise OpenAIError(message, param=f"{param}.type", code="unsupported_parameter")
        raise refuse(f"{param}.type", "'function' or 'custom'", kind)
    refuse_unknown(value, frozenset(("type", "name")), param, may_be_null=True)
    if not isinstance(name := value.get("name"), str):
        raise refuse(f"{param}.name", "the name of a tool", name)
    return NamedChoice(kind, name, f"{param}.name")


def _named_schema(kind: str) -> JsonObject:
    return {
        "type": "object",
        "required": ["type", "name"],
        "properties": {"type": {"const": kind}, "name": {"type": "string"}},
        "additionalProperties": False,
    }


_NAMED = [_named_schema(kind) for kind in _NAMED_TYPES]
_SCHEMA: JsonObject = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        *_NAMED,
        {
            "type": "object",
            "required": ["type", "mode", "tools"],
            "properties": {
                "type": {"const": "allowed_tools"},
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "minItems": 1, "maxItems": MAX_TOOLS, "items": {"anyOf": _NAMED}},
            },
            "additionalProperties": False,
        },
    ]
}
ToolChoiceField = Annotated[Any, PlainValidator(_read), WithJsonSchema(_SCHEMA)]
