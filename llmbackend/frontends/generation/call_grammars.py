"""Grammars of tool calls as structural tags, for required and for optional calls.

Invariants: the format's parser reads all output that a grammar allows as calls of the request's functions whose
arguments satisfy their schemas; keywords that tagged parameters cannot enforce are reported by their location in the
schema. The work and the grammar's size are bounded, because plans are made on the event loop. Source: XGrammar's
documentation of structural tags for the forms of `format`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import orjson

from llmbackend.core.errors import shown

from ..conversation.tools import INPUT, Function, InputGrammar, ToolUse
from ..http.errors import JsonObject, OpenAIError
from .parsers import CallGrammar, MarkedCalls, Messages, ReasoningFormat, ToolCallFormat, is_plain_text
from .parsers.reader import SPACE
from .request import MAX_SAMPLING_JSON_BYTES

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
_IN_PLACE = (
    *("$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "dependencies"),
    "unevaluatedProperties",
)
"""Keywords beside which 'properties' may not describe all members."""
_NOT_NAMES = "'required' must be a list of names of 'properties'"
_NAME = re.compile(r'[^\s<>"](?:[^<>"\n]*[^\s<>"])?')
"""A parameter name that the parser can read."""
_ANY_TAG = r"""[^\x00-\x20\x7f-\xa0<>"'/](?:[^<>"'\n]{0,250}[^\x00-\x20\x7f-\xa0<>"'])?"""
_ANY_WORD = r"""[^\x00-\x20\x7f-\xa0<>"',:=()\[\]{}]{1,250}"""
"""A parameter name in formats whose values are literals. Without a class of Unicode's spaces, which beside a client's
grammar exceeds the compiler's limit of expressions."""


def required_calls(use: ToolUse, grammar: CallGrammar) -> JsonObject:
    """One or more calls and nothing else; the arguments follow the functions' schemas. Raises OpenAIError."""
    _check_size(use.functions, grammar)
    return _section(use, grammar)


def optional_calls(use: ToolUse, format: ToolCallFormat, reasoning: ReasoningFormat | None) -> JsonObject:
    """Free text with calls, wherever the format's parser would read one. A strict function's arguments follow its
    schema, others are any object. reasoning: its markers of content may be written, too. Raises OpenAIError."""
    _check_size([function for function in use.functions if function.is_strict], format.grammar)
    if isinstance(format.body, Messages):
        return _messages(use, format.body, format.grammar)
    return _text_with_calls(use, format.body, format.grammar, _content_markers(reasoning))


def is_marked(format: ToolCallFormat) -> bool:
    """Whether all optional calls begin with a marker, so that their grammar leaves other text entirely free."""
    body = format.body
    return isinstance(body, MarkedCalls) and not _brackets(body)


def calls_or_answer(
    use: ToolUse, format: ToolCallFormat, reasoning: ReasoningFormat | None, answer: JsonObject
) -> JsonObject:
    """Required calls or the answer, which the format's markers of content may enclose. Raises OpenAIError."""
    body, calls = format.body, required_calls(use, format.grammar)
    if isinstance(body, Messages):
        thoughts = _any_number([_message(body, format.grammar, body.reasoning_channel)])
        return _sequence(thoughts, _or([calls, _message(body, format.grammar, body.content_channels[0], answer)]))
    begins, ends = (reasoning.content_begin, reasoning.content_end) if reasoning is not None else ((), ())
    begin = [_optional(_text(begin)) for begin in begins]
    end = [_any_number([_text(end) for end in ends])] if ends else []
    return _or([calls, _sequence(*begin, answer, *end)])


def unenforced_locations(use: ToolUse, grammar: CallGrammar) -> Iterator[str]:
    """Locations of schema keywords that the format cannot enforce. A strict function with such keywords is refused."""
    if grammar.key_end:
        for function in use.functions:
            if function.input_grammar is None and not function.is_strict:
                with contextlib.suppress(_NotTaggedError):  # of a function that is not enforced at all
                    places = islice(_not_tagged(function.parameters, is_strict=False), _MAX_LOCATIONS)
                    yield from (f"{function.param}#{path}" for path, _ in places)


def _check_size(functions: Sequence[Function], grammar: CallGrammar) -> None:
    """Raises OpenAIError naming the function with which tagged parameters exceed a limit: of their number, or of the
    bytes of the definitions, which are repeated for each parameter that refers to them."""
    counts = {"properties": 0, "required": 0}
    num_bytes = 0
    for function in functions if grammar.key_end else ():
        schema = _resolved(function.parameters)
        for keyword in counts:
            value = schema.get(keyword)
            counts[keyword] += len(value) if isinstance(value, Mapping | list) else 0
        if max(counts.values()) > MAX_TAGGED_PARAMETERS:
            message = f"'{function.param}': the functions up to this one have more than {MAX_TAGGED_PARAMETERS} "
            message += "parameters in total, the most that can be enforced in this model's tool-call format"
            raise OpenAIError(message, param=function.param, code="invalid_value")
        num_bytes += _num_repeated_bytes(function.parameters, grammar)
        if num_bytes > MAX_SAMPLING_JSON_BYTES:
            message = f"'{function.param}': this model's tool-call format repeats the definitions for each parameter "
            message += f"that refers to them: the functions up to this one have {num_bytes} bytes of them, expected "
            message += f"at most {MAX_SAMPLING_JSON_BYTES}"
            raise OpenAIError(message, param=function.param, code="invalid_value")


def _section(
    use: ToolUse, grammar: CallGrammar, *, is_required: bool = True, is_single: bool | None = None
) -> JsonObject:
    """is_required: whether the functions that are not strict follow their schemas, too. is_single: None: if the request
    allows only one call"""
    calls = {
        "type": "tags_with_separator",
        "tags": [_call(one, grammar, is_enforced=is_required or one.is_strict) for one in use.functions],
        "separator": grammar.separator,
        "at_least_one": True,
        "stop_after_first": use.max_calls == 1 if is_single is None else is_single,
    }
    if not grammar.begin and not grammar.end:
        return calls
    return _sequence(_text(grammar.begin), calls, _text(grammar.end))


def _call(function: Function, grammar: CallGrammar, *, is_enforced: bool) -> JsonObject:
    """is_enforced: whether the arguments follow the function's schema"""
    content: JsonObject
    if function.input_grammar is not None:
        content = _input(function.input_grammar, grammar)
    elif grammar.key_end:
        content = _tagged(function, grammar) if is_enforced else _any_parameters(grammar)
    else:
        schema = _arguments(function) if is_enforced else _ANY_OBJECT
        content = {"type": "json_schema", "json_schema": schema, "strict": function.is_strict}
    begin = f"{grammar.call_begin}{function.name}{grammar.name_end}"
    tag: JsonObject = {"type": "tag", "begin": begin, "content": content, "end": grammar.call_end}
    if not grammar.number:
        return tag
    begin, _, rest = begin.rpartition(grammar.number)
    return _sequence(_text(begin), {"type": "regex", "pattern": "[0-9]{1,4}"}, {**tag, "begin": rest})


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


def _arguments(function: Function) -> JsonObject:
    """The schema of a function's arguments: always an object, without unknown members, which small models invent."""
    schema = function.parameters
    types = schema.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        message = f"'{function.param}': 'type' is {shown(types)}, expected \"object\""
        raise OpenAIError(message, param=function.param)
    closed = {"additionalProperties": False} if _lists_members(schema) else {}
    return {**closed, **schema, "type": "object"}


def _lists_members(schema: Mapping[str, Any]) -> bool:
    """Whether 'properties' describes all members that a model should write, if the schema does not say otherwise."""
    return "properties" in schema and not any(schema.get(keyword, False) is not False for keyword in _IN_PLACE)


def _tagged(function: Function, grammar: CallGrammar) -> JsonObject:
    try:
        if function.is_strict and (found := next(_not_tagged(function.parameters, is_strict=True), None)) is not None:
            raise _NotTaggedError(found[1])
        return _parameters(function.parameters, grammar, is_strict=function.is_strict)
    except _NotTaggedError as error:
        message = f"'{function.param}': {error}"
        raise OpenAIError(message, param=function.param, code="unsupported_parameter") from None


def _text(value: str) -> JsonObject:
    return {"type": "const_string", "value": value}


def _sequence(*elements: JsonObject) -> JsonObject:
    """Without empty texts."""
    return {"type": "sequence", "elements": [one for one in elements if one.get("value") != ""]}


def _or(elements: list[JsonObject]) -> JsonObject:
    return {"type": "or", "elements": elements}


def _optional(content: JsonObject) -> JsonObject:
    return {"type": "optional", "content": content}


def _any_number(elements: list[JsonObject]) -> JsonObject:
    return {"type": "star", "content": _or(elements)}


# --- optional calls ---------------------------------------------------------------------------------------------------


def _text_with_calls(use: ToolUse, body: MarkedCalls, grammar: CallGrammar, content: tuple[str, ...]) -> JsonObject:
    """Text is free up to a marker of calls. It does not begin as a call without a marker does. content: markers of
    content"""
    markers, brackets = _markers(body), _brackets(body)
    rests = {marker: _after(marker, body, grammar) for marker in (*markers, *brackets)}
    rest = min(rests.values(), key=len)
    begins = [_sequence(_until(one, markers, brackets), _text(rests[one].removesuffix(rest))) for one in markers]
    if brackets:
        begins.append({"type": "regex", "pattern": f"[{SPACE}]*"})
    ends_text = bool(brackets) or not _is_closed(body, grammar)
    is_single = use.max_calls == 1 or not (ends_text or grammar.begin)
    section = _section(use, _beginning_at(rest, grammar), is_required=False, is_single=is_single)
    calls, text = _sequence(_or(begins), section), _plain(markers, brackets)
    parts = [_until(one, markers, brackets) for one in content]
    if ends_text or use.max_calls == 1:
        return _sequence(*([_any_number(parts)] if parts else []), _or([calls, text]))
    return _sequence(_any_number([*parts, calls]), text)


def _markers(body: MarkedCalls) -> tuple[str, ...]:
    """Texts that begin a section anywhere, none of which contains another. Long texts that the parser reads only at the
    beginning of the output are included: ordinary text does not begin with them."""
    texts = (*body.begin, *(text for text in body.bare_begin if len(text) > 1))
    return tuple(text for text in texts if not any(other != text and other in text for other in texts))


def _brackets(body: MarkedCalls) -> str:
    """Those with which a section begins at the output's beginning, without a marker."""
    return "".join(text for text in body.bare_begin if len(text) == 1)


def _content_markers(reasoning: ReasoningFormat | None) -> tuple[str, ...]:
    return () if reasoning is None else (*reasoning.content_begin, *reasoning.content_end)


def _after(marker: str, body: MarkedCalls, grammar: CallGrammar) -> str:
    """What is between a section's marker and the first function's name. For markers that the grammar never writes, it
    is what follows the grammar's own marker, including a list's bracket."""
    written = grammar.begin or grammar.call_begin
    if marker in body.begin and marker in written:
        return written.partition(marker)[2]
    own = next((begin for begin in body.begin if written.startswith(begin)), "")
    return written.removeprefix(own.removesuffix("["))


def _beginning_at(rest: str, grammar: CallGrammar) -> CallGrammar:
    """The grammar of a section from `rest` on, with which its beginning ends."""
    if grammar.begin:
        return replace(grammar, begin=rest)
    return replace(grammar, call_begin=rest, separator=grammar.separator + grammar.call_begin.removesuffix(rest))


def _is_closed(body: MarkedCalls, grammar: CallGrammar) -> bool:
    """Whether the grammar writes the section's end. Otherwise the parser might read text after a call as another."""
    ends = (*body.end, body.list_end) if body.list_begin else body.end
    return any(end in grammar.call_end + grammar.end for end in ends)


def _until(marker: str, markers: tuple[str, ...], brackets: str) -> JsonObject:
    """Free text and the marker."""
    content = _plain(markers, brackets) if brackets else {"type": "any_text"}
    return {"type": "tag", "begin": "", "content": content, "end": marker}


def _plain(markers: tuple[str, ...], brackets: str) -> JsonObject:
    """Free text without calls."""
    if not brackets:
        return {"type": "any_text"}
    escaped = re.escape(brackets)
    pattern = f"[{SPACE}]*([^{escaped}{SPACE}][\\s\\S]*)?"
    return {"type": "regex", "pattern": pattern, "excludes": list(markers)}


def _messages(use: ToolUse, body: Messages, grammar: CallGrammar) -> JsonObject:
    """Messages of text and calls."""
    texts = [_message(body, grammar, channel) for channel in (body.reasoning_channel, *body.content_channels)]
    head = _head(body, grammar)
    begun = replace(grammar, call_begin=grammar.call_begin.removeprefix(head))
    calls = _sequence(_optional(_text(head)), _section(use, begun, is_required=False, is_single=True))
    if use.max_calls == 1:
        return _sequence(_any_number(texts), _optional(calls))
    return _any_number([*texts, calls])


def _message(body: Messages, grammar: CallGrammar, channel: str, content: JsonObject | None = None) -> JsonObject:
    """A message without a recipient. content: None: any text"""
    begin, end = f"{body.channel}{channel}{body.message}", [body.end[0], ""]
    tag = {"type": "tag", "begin": begin, "content": content or {"type": "any_text"}, "end": end}
    return _sequence(_optional(_text(_head(body, grammar))), tag)


def _head(body: Messages, grammar: CallGrammar) -> str:
    """What precedes a message's channel. The prompt ends with it, so the first message has none."""
    return grammar.call_begin.partition(body.channel)[0]


# --- tagged parameters ------------------------------------------------------------------------------------------------


class _NotTaggedError(ValueError):
    """A schema that tagged parameters cannot enforce."""


def _parameters(schema: Mapping[str, Any], grammar: CallGrammar, *, is_strict: bool) -> JsonObject:
    """The parameters in the order of the schema. is_strict: every keyword must be enforced. Raises _NotTaggedError for
    a schema that does not describe parameters."""
    root, required = _checked(schema)
    root = {**_definitions(schema), **root}
    elements: list[JsonObject] = []
    for name in written_properties(schema):
        tag = _parameter(name, root, grammar, is_strict=is_strict)
        elements.append(tag if name in required else {"type": "optional", "content": tag})
    if not is_strict and _is_open(root):
        elements.append(_any_parameters(grammar))
    return {"type": "sequence", "elements": elements}


def _is_open(root: Mapping[str, Any]) -> bool:
    """Whether there may be parameters besides those in 'properties'."""
    return root.get("additionalProperties", not _lists_members(root)) is not False


def _any_parameters(grammar: CallGrammar) -> JsonObject:
    """Any number of parameters of any name, with any values that the parser can read."""
    quote, end = grammar.text_quote, grammar.value_end
    name: JsonObject = {"type": "regex", "pattern": _ANY_WORD if quote != "" else _ANY_TAG}
    text: JsonObject = {"type": "any_text", "excludes": list(grammar.text_excludes)}
    forms: list[tuple[str, JsonObject, str]] = [] if quote is None else [(grammar.key_end + quote, text, quote + end)]
    if grammar.json_key_end:
        forms.append((grammar.json_key_end, text, end))
    if quote != "":
        forms.append((grammar.key_end, {"type": "json_schema", "json_schema": {}}, end))
    values = [{"type": "tag", "begin": begin, "content": content, "end": end} for begin, content, end in forms]
    closing = [name, _text(grammar.name_closes)] if grammar.name_closes else []
    return {"type": "star", "content": _sequence(_text(grammar.key_begin), name, _or(values), *closing)}


def written_properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The properties whose names can be written in this format, in the order of their tags."""
    properties = _resolved(schema).get("properties", {})
    return {name: description for name, description in properties.items() if _NAME.fullmatch(name)}


def property_path(name: str) -> str:
    """The JSON pointer to a property's schema."""
    return f"/properties/{name.replace('~', '~0').replace('/', '~1')}"


def _not_tagged(schema: Mapping[str, Any], *, is_strict: bool) -> Iterator[tuple[str, str]]:
    """(path in the schema, reason) of what tagged parameters cannot enforce. Raises like _parameters."""
    root, required = _checked(schema)
    others = root.get("additionalProperties", False)
    if not is_strict and others is not False and (root.get("properties") or others not in (True, {})):
        yield "/additionalProperties", "other parameters have any values"
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
        described = schema["properties"][name]
        content = {
            "type": "json_schema",
            "json_schema": {**_definitions(schema), **described} if _refers(described) else described,
            "strict": is_strict,
        }
        begin += grammar.json_key_end or grammar.key_end
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def value_end(name: str, grammar: CallGrammar) -> str:
    """The text after a parameter's value."""
    return f"{grammar.value_end}{name}{grammar.name_closes}" if grammar.name_closes else grammar.value_end


def _definitions(schema: Mapping[str, Any]) -> JsonObject:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _refers(description: Any) -> bool:
    """Whether a parameter's schema contains a reference, and therefore needs the definitions."""
    return isinstance(description, Mapping) and b'"$ref"' in orjson.dumps(description)


def _num_repeated_bytes(schema: Mapping[str, Any], grammar: CallGrammar) -> int:
    """The size of the definitions, as often as the grammar has them."""
    root = {**_definitions(schema), **_resolved(schema)}
    definitions, properties = _definitions(root), root.get("properties")
    if not definitions or not isinstance(properties, Mapping):
        return 0
    has_texts = grammar.text_quote is not None
    times = sum(_refers(properties[name]) and not (has_texts and is_plain_text(root, name)) for name in properties)
    return times * len(orjson.dumps(definitions))
