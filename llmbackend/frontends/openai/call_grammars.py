"""Grammars of tool calls, as structural tags: calls that must be made, and calls that are right if they are made.

For: answer plans. Does not know: which model, how a tag becomes a mask. Invariant: whatever a grammar lets through, the
parser of the same format reads as calls of the request's functions with arguments by their schemas.
Source: XGrammar's documentation of structural tags for the forms of `format`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmbackend.core.errors import shown

from .errors import JsonObject, OpenAIError
from .parsers import CallGrammar
from .tagged_parameters import NotTaggedError, not_tagged, tagged_parameters, value_end
from .tools import INPUT, Function, InputGrammar, ToolUse

_ANY_OBJECT: JsonObject = {"type": "object"}


def required_calls(use: ToolUse, grammar: CallGrammar) -> JsonObject:
    """Nothing but calls, at least one, with arguments by the functions' schemas."""
    tags = [_call(function, grammar, _arguments(function)) for function in use.functions]
    return _section(_calls(tags, use, grammar), grammar)


def voluntary_calls(use: ToolUse, grammar: CallGrammar, trigger: str) -> JsonObject:
    """Free text, in which a call that begins follows the schema of a strict function, or is any object of another."""
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


def places_not_enforced(use: ToolUse, grammar: CallGrammar) -> Iterator[str]:
    """Where the schemas of functions have keywords that the format of calls cannot enforce. A strict function has none
    for which there is a grammar."""
    if grammar.key_end:
        for function in use.functions:
            if function.input_grammar is None and not function.is_strict:
                yield from (f"{function.param}#{path}" for path in not_tagged(function.parameters))


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
    """The arguments of a custom tool: its one string, by its own grammar, spelled as the format has strings."""
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
    """The schema of a function's arguments, which are an object whatever the schema says, and have no members that the
    function does not know, which a small model would go on inventing."""
    schema = function.parameters
    types = schema.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        message = f"'{function.param}': 'type' is {shown(types)}, expected \"object\", as the arguments of a call are"
        raise OpenAIError(message, param=function.param)
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {**closed, **schema, "type": "object"}


def _tagged(function: Function, grammar: CallGrammar) -> JsonObject:
    try:
        if function.is_strict and (reasons := not_tagged(function.parameters)):
            raise NotTaggedError(next(iter(reasons.values())))
        return tagged_parameters(function.parameters, grammar, is_strict=function.is_strict)
    except NotTaggedError as error:
        message = f"'{function.param}': {error}"
        raise OpenAIError(message, param=function.param, code="unsupported_parameter") from None


def _text(value: str) -> JsonObject:
    return {"type": "const_string", "value": value}
