"""Grammars of tool calls as structural tags, for required and for optional calls.

Invariants: the format's parser reads all output that a grammar allows as calls of the request's functions whose
arguments satisfy their schemas; keywords that tagged parameters cannot enforce are reported by their location in the
schema. The work is bounded by MAX_TAGGED_PARAMETERS, because plans are made on the event loop. Source: XGrammar's
documentation of structural tags for the forms of `format`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from llmbackend.core.errors import shown

from ..conversation.tools import INPUT, Function, InputGrammar, ToolUse
from ..http.errors import JsonObject, OpenAIError
from .parsers import CallGrammar, is_plain_text

_ANY_OBJECT: JsonObject = {"type": "object"}
MAX_TAGGED_PARAMETERS: Final = 512
"""Limit over all functions of a request, set by the model's grammar."""
_MAX_LOCATIONS: Final = 64
"""How many unenforced locations are reported per function."""
_ENFORCED = frozenset(("type", "properties", "required", "additionalProperties"))
_ANNOTATIONS = frozenset(
    ("$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated")
)
_KNOWN = _ENFORCED | _ANNOTATIONS
_NOT_NAMES = "'required' must be a list of names of 'properties'"
_NAME = re.compile(r'[^\s<>"](?:[^<>"\n]*[^\s<>"])?')
"""A parameter name that the parser can read."""


def required_calls(use: ToolUse, grammar: CallGrammar) -> JsonObject:
    """One or more calls and nothing else; the arguments follow the functions' schemas. Raises OpenAIError."""
    _check_count(use, grammar)
    tags = [_call(function, grammar, _arguments(function)) for function in use.functions]
    return _section(_calls(tags, use, grammar), grammar)


def optional_calls(use: ToolUse, grammar: CallGrammar, trigger: str) -> JsonObject:
    """Free text with calls. A strict function's arguments follow its schema, others are any object. Raises
    OpenAIError."""
    _check_count(use, grammar)
    tags = [
        _call(function, grammar, _arguments(function) if function.is_strict else _ANY_OBJECT)
        for function in use.functions
    ]
    if grammar.begin:
        content = _calls(tags, use, grammar)
        tags = [{"type": "tag", "begin": grammar.begin, "content": content, "end": grammar.end}]
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": use.max_calls == 1,
    }


def unenforced_locations(use: ToolUse, grammar: CallGrammar) -> Iterator[str]:
    """Locations of schema keywords that the format cannot enforce. A strict function with such keywords is refused."""
    if grammar.key_end:
        for function in use.functions:
            if function.input_grammar is None and not function.is_strict:
                places = islice(_not_tagged(function.parameters), _MAX_LOCATIONS)
                yield from (f"{function.param}#{path}" for path, _ in places)


def _check_count(use: ToolUse, grammar: CallGrammar) -> None:
    """Raises OpenAIError naming the function that exceeds the limit."""
    counts = {"properties": 0, "required": 0}
    for function in use.functions if grammar.key_end else ():
        schema = _resolved(function.parameters)
        for keyword in counts:
            value = schema.get(keyword)
            counts[keyword] += len(value) if isinstance(value, Mapping | list) else 0
        if max(counts.values()) > MAX_TAGGED_PARAMETERS:
            message = f"'{function.param}': its parameters and those of the functions before it are more than "
            message += f"{MAX_TAGGED_PARAMETERS}, which this model's tool-call format cannot enforce"
            raise OpenAIError(message, param=function.param, code="invalid_value")


def _calls(tags: list[JsonObject], use: ToolUse, grammar: CallGrammar) -> JsonObject:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": grammar.separator,
        "at_least_one": True,
        "stop_after_first": use.max_calls == 1,
    }


def _section(calls: JsonObject, grammar: CallGrammar) -> JsonObject:
    if not grammar.begin and not grammar.end:
        return calls
    around = [_text(grammar.begin), calls, _text(grammar.end)]
    return {"type": "sequence", "elements": [part for part in around if part.get("value") != ""]}


def _call(function: Function, grammar: CallGrammar, schema: Mapping[str, Any]) -> JsonObject:
    begin = f"{grammar.call_begin}{function.name}{grammar.name_end}"
    content: JsonObject
    if function.input_grammar is not None:
        content = _input(function.input_grammar, grammar)
    elif grammar.key_end:
        content = _tagged(function, grammar)
    else:
        content = {"type": "json_schema", "json_schema": schema, "strict": function.is_strict}
    return {"type": "tag", "begin": begin, "content": content, "end": grammar.call_end}


def _input(wanted: InputGrammar, grammar: CallGrammar) -> JsonObject:
    """The arguments of a custom tool: its single string, constrained by its own grammar, in the format's notation."""
    form: JsonObject = {"type": "grammar", "syntax": "lark", "grammar": wanted.definition}
    if wanted.syntax == "regex":
        form = {"type": "regex", "pattern": wanted.definition}
    if not grammar.key_end:
        return _sequence(_text(f'{{"{INPUT}": "'), form | {"style": "json_string"}, _text('"}'))
    begin, end = f"{grammar.key_begin}{INPUT}{grammar.key_end}", value_end(INPUT, grammar)
    if grammar.text_quote is None:
        return _sequence(_text(f'{begin}"'), form | {"style": "json_string"}, _text(f'"{end}'))
    content = form | {"style": "text", "excludes": list(grammar.text_excludes)}
    quote = grammar.text_quote
    return {"type": "tag", "begin": begin + quote, "content": content, "end": quote + end}


def _sequence(*elements: JsonObject) -> JsonObject:
    return {"type": "sequence", "elements": list(elements)}


def _arguments(function: Function) -> JsonObject:
    """The schema of a function's arguments: always an object, without unknown members, which small models invent."""
    schema = function.parameters
    types = schema.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        message = f"'{function.param}': 'type' is {shown(types)}, expected \"object\""
        raise OpenAIError(message, param=function.param)
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {**closed, **schema, "type": "object"}


def _tagged(function: Function, grammar: CallGrammar) -> JsonObject:
    try:
        if function.is_strict and (found := next(_not_tagged(function.parameters), None)) is not None:
            raise _NotTaggedError(found[1])
        return _parameters(function.parameters, grammar, is_strict=function.is_strict)
    except _NotTaggedError as error:
        message = f"'{function.param}': {error}"
        raise OpenAIError(message, param=function.param, code="unsupported_parameter") from None


def _text(value: str) -> JsonObject:
    return {"type": "const_string", "value": value}


# --- tagged parameters ------------------------------------------------------------------------------------------------


class _NotTaggedError(ValueError):
    """A schema that tagged parameters cannot enforce."""


def _parameters(schema: Mapping[str, Any], grammar: CallGrammar, *, is_strict: bool) -> JsonObject:
    """The parameters in the order of the schema. is_strict: every keyword must be enforced. Raises _NotTaggedError for
    a schema that does not describe parameters."""
    root, required = _checked(schema)
    root = _with_definitions(root, schema)
    elements: list[JsonObject] = []
    for name in written_properties(schema):
        tag = _parameter(name, root, grammar, is_strict=is_strict)
        elements.append(tag if name in required else {"type": "optional", "content": tag})
    return {"type": "sequence", "elements": elements}


def written_properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The properties whose names can be written in this format, in the order of their tags."""
    properties = _resolved(schema).get("properties", {})
    return {name: description for name, description in properties.items() if _NAME.fullmatch(name)}


def property_path(name: str) -> str:
    """The JSON pointer to a property's schema."""
    return f"/properties/{name.replace('~', '~0').replace('/', '~1')}"


def _not_tagged(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(path in the schema, reason) of what tagged parameters cannot enforce. Raises like _parameters."""
    root, required = _checked(schema)
    for key in root:
        if key not in _KNOWN:
            yield f"/{key}", f"'{key}' at the root is not enforced in this model's tool-call format"
    properties = root.get("properties", {})
    if any(name not in properties for name in required):
        yield "/required", _NOT_NAMES
    for name in properties:
        if not _NAME.fullmatch(name):
            yield (
                property_path(name),
                f"the property name '{name}' cannot be written in this model's tool-call format",
            )


def _checked(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The root and its required names. Raises _NotTaggedError."""
    root = _resolved(schema)
    if root.get("type", "object") != "object":
        raise _NotTaggedError("'type' must be \"object\"")
    if not isinstance(root.get("properties", {}), Mapping):
        raise _NotTaggedError("'properties' must be an object")
    required = root.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _NotTaggedError(_NOT_NAMES)
    return root, required


def _resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The target of a root that is only a reference to one of its own definitions; otherwise the root."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or any(key not in _ANNOTATIONS and key not in ("$ref", "type") for key in schema):
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
    """The text after a parameter's value."""
    return f"{grammar.value_end}{name}{grammar.name_closes}" if grammar.name_closes else grammar.value_end


def _with_definitions(description: Any, schema: Mapping[str, Any]) -> Any:
    """The description with the definitions that it may refer to."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {**shared, **description} if isinstance(description, Mapping) else description
