"""What may stand between the tags of a call whose parameters are tagged text, as structural tags.

For: grammars of tool calls. Does not know: which model. Invariant: a text that is let through is read as arguments that
the function's schema allows; what such a grammar cannot enforce is known by its place in the schema.
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
_NOT_NAMES = "'required' must be a list of names of 'properties'"
_NAME = re.compile(r'[^\s<>"](?:[^<>"\n]*[^\s<>"])?')
"""Of a parameter that can be read back."""


class NotTaggedError(ValueError):
    """A schema that tagged parameters cannot be held to."""


def tagged_parameters(schema: Mapping[str, Any], grammar: CallGrammar, *, is_strict: bool) -> JsonObject:
    """The parameters of the schema, in its order; those that are not required are optional. is_strict: whether every
    keyword in them must be enforced. Raises NotTaggedError for what is no schema of parameters."""
    root, required = _checked(schema)
    root = _with_definitions(root, schema)
    elements: list[JsonObject] = []
    for name in written_properties(schema):
        tag = _parameter(name, root, grammar, is_strict=is_strict)
        elements.append(tag if name in required else {"type": "optional", "content": tag})
    return {"type": "sequence", "elements": elements}


def written_properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those whose names can be written, in the order of their tags."""
    properties = _resolved(schema).get("properties", {})
    return {name: description for name, description in properties.items() if _NAME.fullmatch(name)}


def property_path(name: str) -> str:
    """The JSON pointer to a property's schema."""
    return f"/properties/{name.replace('~', '~0').replace('/', '~1')}"


def not_tagged(schema: Mapping[str, Any]) -> dict[str, str]:
    """What tagged parameters cannot be held to: the reason, by the path in the schema. Raises NotTaggedError for what
    is no schema of parameters."""
    (root, required), found = _checked(schema), {}
    for key in root:
        if key not in _ENFORCED | _SAYS_NOTHING:
            found[f"/{key}"] = f"'{key}' at its root is not enforced in this model's format of calls"
    properties = root.get("properties", {})
    if any(name not in properties for name in required):
        found["/required"] = _NOT_NAMES
    for name in properties:
        if not _NAME.fullmatch(name):
            why = f"the name of the property '{name}' cannot be written in this model's format of calls"
            found[property_path(name)] = why
    return found


def _checked(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The root and its required names. Raises NotTaggedError."""
    root = _resolved(schema)
    if root.get("type", "object") != "object":
        raise NotTaggedError("'type' must be \"object\"")
    if not isinstance(root.get("properties", {}), Mapping):
        raise NotTaggedError("'properties' must be an object")
    required = root.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise NotTaggedError(_NOT_NAMES)
    return root, required


def _resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The definition that the root refers to, if the root is only a reference to one of its own; else the root."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not schema.keys() <= _SAYS_NOTHING | {"$ref", "type"}:
        return schema
    for kind in ("$defs", "definitions"):
        definitions = schema.get(kind)
        target = definitions.get(reference.removeprefix(f"#/{kind}/")) if isinstance(definitions, Mapping) else None
        if isinstance(target, Mapping) and "$ref" not in target:
            return target
    return schema


def _parameter(name: str, schema: Mapping[str, Any], grammar: CallGrammar, *, is_strict: bool) -> JsonObject:
    begin, end = grammar.key_begin + name, value_end(name, grammar)
    content: JsonObject
    if grammar.text_quote is not None and is_plain_text(schema, name):
        content = {"type": "any_text", "excludes": list(grammar.text_excludes)}
        begin, end = begin + grammar.key_end + grammar.text_quote, grammar.text_quote + end
    else:
        content = {
            "type": "json_schema",
            "json_schema": _with_definitions(schema["properties"][name], schema),
            "strict": is_strict,
        }
        begin += grammar.json_key_end or grammar.key_end
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def value_end(name: str, grammar: CallGrammar) -> str:
    """What stands behind a parameter's value."""
    return f"{grammar.value_end}{name}{grammar.name_closes}" if grammar.name_closes else grammar.value_end


def _with_definitions(description: Any, schema: Mapping[str, Any]) -> Any:
    """What the description may refer to, beside it."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {**shared, **description} if isinstance(description, Mapping) else description
