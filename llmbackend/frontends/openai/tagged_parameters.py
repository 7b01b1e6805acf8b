"""What may stand between the tags of a call whose parameters are tagged text, as structural tags.

For: grammars of tool calls. Does not know: which model. Invariant: a text that is let through is read as arguments that
the function's schema allows; what such a grammar cannot hold a model to is refused, with its place in the schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .errors import JsonObject
from .parsers import CallGrammar, is_plain_text

_ENFORCED = frozenset(("type", "properties", "required", "additionalProperties"))
_SAYS_NOTHING = frozenset(
    ("$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated")
)
_NAME = re.compile(r'[^\s<>"](?:[^<>"\n]*[^\s<>"])?')
"""Of a parameter that can be read back."""


class NotTaggedError(ValueError):
    """A schema that tagged parameters cannot be held to."""


def tagged_parameters(schema: Mapping[str, Any], grammar: CallGrammar) -> JsonObject:
    """Those of the schema, in its order; those that are not required may be left out. Raises NotTaggedError."""
    properties, required = _checked(schema)
    elements: list[JsonObject] = []
    for name in properties:
        tag = _parameter(name, schema, grammar)
        elements.append(tag if name in required else {"type": "optional", "content": tag})
    return {"type": "sequence", "elements": elements}


def _checked(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if (unknown := next((key for key in schema if key not in _ENFORCED | _SAYS_NOTHING), None)) is not None:
        raise NotTaggedError(f"'{unknown}' at its root is not enforced in this model's format of calls")
    if schema.get("type", "object") != "object":
        raise NotTaggedError("'type' must be \"object\"")
    if not isinstance(properties, Mapping):
        raise NotTaggedError("'properties' must be an object")
    if not isinstance(required, list) or any(name not in properties for name in required):
        raise NotTaggedError("'required' must be a list of names of 'properties'")
    if (strange := next((name for name in properties if not _NAME.fullmatch(name)), None)) is not None:
        raise NotTaggedError(f"the name of the property '{strange}' cannot be written in this model's format of calls")
    return properties, required


def _parameter(name: str, schema: Mapping[str, Any], grammar: CallGrammar) -> JsonObject:
    begin, end = grammar.key_begin + name, value_end(name, grammar)
    content: JsonObject
    if grammar.text_quote is not None and is_plain_text(schema, name):
        content = {"type": "any_text", "excludes": list(grammar.text_excludes)}
        begin, end = begin + grammar.key_end + grammar.text_quote, grammar.text_quote + end
    else:
        content = {"type": "json_schema", "json_schema": _with_definitions(schema["properties"][name], schema)}
        begin += grammar.json_key_end or grammar.key_end
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def value_end(name: str, grammar: CallGrammar) -> str:
    """What stands behind a parameter's value."""
    return f"{grammar.value_end}{name}{grammar.name_closes}" if grammar.name_closes else grammar.value_end


def _with_definitions(description: Any, schema: Mapping[str, Any]) -> Any:
    """What the description may refer to, beside it."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {**shared, **description} if isinstance(description, Mapping) else description
