"""Whatever a format's grammar of calls lets through, its parser reads as calls whose arguments fit the schemas."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from random import Random
from typing import Any

import jsonschema
import pytest

from llmbackend.core.errors import TritonError
from llmbackend.frontends.conversation.tools import INPUT, Function, InputGrammar, ToolUse
from llmbackend.frontends.generation.call_grammars import (
    optional_calls,
    required_calls,
    unenforced_locations,
    value_end,
)
from llmbackend.frontends.generation.parsers import TOOL_CALL_FORMATS, CallGrammar
from llmbackend.frontends.generation.plan import AnswerPlan
from llmbackend.frontends.http.errors import OpenAIError
from tests.frontends.parsers.laws import distinct_formats
from tests.frontends.parsers.sample import Sample, cut, parse, seen, tokens
from tests.frontends.parsers.test_call_grammars import written
from tests.helpers import byte_grammars
from trials.agents import codex_form

NUM_WALKS = 6
"""Per format, with one call and with any number."""
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"$ref": "#/$defs/Unit"},
            "days": {"type": "integer"},
            "detail": {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 2},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
        "$defs": {"Unit": {"type": "string", "enum": ["C", "°F"]}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
MARKERS = {"openai": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>")}
"""Those that are read only as special tokens."""
READ_AS_TOKENS = {"minimax_m3"}
"""Formats whose section's end and next call begin with the same text: where `</tool_call>` is a special token of the
vocabulary, a grammar of several calls has the model write it as that token only."""
ENFORCED = sorted(name for name in distinct_formats() if name in TOOL_CALL_FORMATS)
TAGGED = [name for name in ENFORCED if (grammar := TOOL_CALL_FORMATS[name].grammar) and grammar.key_begin]
COMPILER = byte_grammars.compiler()


def use(schemas: dict[str, dict[str, Any]], max_calls: int | None = None, *, is_strict: bool = False) -> ToolUse:
    return ToolUse(
        tools=[{"type": "function", "function": {"name": name}} for name in schemas],
        functions=tuple(
            Function(name, schema, is_strict=is_strict, param=f"tools[{index}].function.parameters")
            for index, (name, schema) in enumerate(schemas.items())
        ),
        is_required=True,
        max_calls=max_calls,
        is_legacy=False,
    )


def grammar_of(name: str) -> CallGrammar:
    grammar = TOOL_CALL_FORMATS[name].grammar
    assert grammar
    return grammar


def structure(name: str, max_calls: int | None = None) -> dict[str, Any]:
    form = required_calls(use(SCHEMAS, max_calls), grammar_of(name))
    return {"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": form}}}


@pytest.mark.parametrize("name", ENFORCED)
def test_what_the_grammar_lets_through_is_read(name: str) -> None:
    random = Random(name)
    grammars = [byte_grammars.grammar(COMPILER, **structure(name, max_calls)) for max_calls in (1, None)]
    texts = [byte_grammars.walk(COMPILER, random, grammar) for grammar in grammars for _ in range(NUM_WALKS)]
    complete = [text for text in texts if text is not None]
    assert complete
    for text in complete:
        sample = Sample(text=text, tools=name, special=MARKERS.get(name, ()), schemas=SCHEMAS)
        visible = seen(parse(sample, cut(tokens(sample), random, 5)))
        assert visible.calls and not visible.content, (text, visible)
        for call in visible.calls:
            assert call.is_complete, (text, visible)
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("name", TAGGED)
def test_a_text_cannot_hold_what_would_end_it(name: str) -> None:
    grammar = grammar_of(name)
    for text, is_possible in (("Zürich <b>\n", True), *((f"a{end}b", False) for end in grammar.text_excludes)):
        values = (("city", grammar.key_end, text), ("unit", grammar.json_key_end or grammar.key_end, '"C"'))
        written = "".join(
            f"{grammar.key_begin}{key}{key_end}{value}{value_end(key, grammar)}" for key, key_end, value in values
        )
        call = f"{grammar.call_begin}get_weather{grammar.name_end}{written}{grammar.call_end}"
        whole = f"{grammar.begin}{call}{grammar.end}"
        accepted = byte_grammars.accepts(COMPILER, whole, special=name in READ_AS_TOKENS, **structure(name))
        assert accepted == is_possible, whole


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {}, "minProperties": 1}, "'minProperties'"),
        ({"anyOf": [{"required": ["a"]}]}, "'anyOf'"),
        ({"properties": ["a"]}, "'properties'"),
        ({"properties": {"a": {}}, "required": ["b"]}, "'required'"),
        ({"properties": {"a<b": {}}}, "a<b"),
    ],
)
def test_what_tags_cannot_enforce_is_refused_by_name(schema: dict[str, Any], expected: str) -> None:
    with pytest.raises(OpenAIError, match=expected) as raised:
        required_calls(use({"now": {}, "f": schema}, is_strict=True), grammar_of("qwen3_coder"))
    assert raised.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize("is_strict", [False, True])
def test_required_properties_that_are_no_names_are_refused(is_strict: bool) -> None:
    asked = use({"f": {"properties": {"a": {}}, "required": [["a"]]}}, is_strict=is_strict)
    with pytest.raises(OpenAIError, match="'required' must be a list of names"):
        required_calls(asked, grammar_of("qwen3_coder"))


@pytest.mark.parametrize("definitions", [None, [], "a"])
def test_a_reference_into_definitions_that_are_no_object_is_not_followed(definitions: Any) -> None:
    asked, grammar = use({"f": {"$ref": "#/$defs/a", "$defs": definitions}}), grammar_of("qwen3_coder")
    assert required_calls(asked, grammar)
    assert list(unenforced_locations(asked, grammar)) == ["tools[0].function.parameters#/$ref"]


def test_parameters_of_tagged_calls_are_bounded() -> None:
    """The model's grammar has room for no more, and plans are made on the event loop."""
    many: dict[str, dict[str, Any]] = {
        "f": {"properties": {str(index): {} for index in range(300)}},
        "g": {"required": ["a"] * 600},
    }
    with pytest.raises(OpenAIError, match="more than 512") as raised:
        required_calls(use(many), grammar_of("qwen3_coder"))
    assert raised.value.param == "tools[1].function.parameters"
    assert required_calls(use(many), grammar_of("hermes"))


@pytest.mark.parametrize("is_required", [True, False])
def test_definitions_that_parameters_repeat_are_bounded(is_required: bool) -> None:
    """Before they are written: otherwise, a body of some megabytes becomes a grammar of gigabytes."""
    long = {"$ref": "#/$defs/Long"}
    definitions = {"Long": {"type": "array", "description": "a" * 10_000}, "Name": {"type": "string"}}
    schema = {"properties": {f"a{index}": long for index in range(30)}, "$defs": definitions}
    asked = replace(use({"now": {}, "f": schema}, is_strict=True), is_required=is_required)
    for name in ("qwen3_coder", "minimax_m3"):
        with pytest.raises(OpenAIError, match=r"have 30\d{4} bytes of them, expected at most 262144") as raised:
            if is_required:
                required_calls(asked, grammar_of(name))
            else:
                optional_calls(asked, TOOL_CALL_FORMATS[name], None)
        assert raised.value.param == "tools[1].function.parameters"
    assert required_calls(asked, grammar_of("hermes"))


def test_only_parameters_that_refer_to_definitions_have_them() -> None:
    definitions = {"Long": {"type": "array", "description": "a" * 10_000}, "Name": {"type": "string"}}
    others = {f"a{index}": {"type": "integer"} for index in range(30)}
    texts = {f"b{index}": {"$ref": "#/$defs/Name"} for index in range(30)}
    schema = {"properties": {**others, **texts, "long": {"$ref": "#/$defs/Long"}}, "$defs": definitions}
    form = required_calls(use({"f": schema}, is_strict=True), grammar_of("qwen3_coder"))
    assert 10_000 < len(json.dumps(form)) < 30_000


LEFT_OUT: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a": {"type": "integer"}}, "minProperties": 1}, "/minProperties"),
    ({"properties": {"a": {"type": "integer"}}, "strict": True}, "/strict"),
    ({"properties": {"a": {"type": "integer"}}, "required": ["b"]}, "/required"),
    ({"properties": {"a<b": {}, "a": {"type": "integer"}}}, "/properties/a<b"),
    ({"properties": {"a<b/c": {}, "a": {"type": "integer"}}}, "/properties/a<b~1c"),
    ({"$defs": {"d": {"properties": {"a": {"type": "integer"}}, "not": {}}}, "$ref": "#/$defs/d"}, "/not"),
]


@pytest.mark.parametrize(("schema", "path"), LEFT_OUT)
def test_what_tags_cannot_enforce_is_left_out_where_the_function_is_not_strict(
    schema: dict[str, Any], path: str
) -> None:
    asked, grammar = use({"f": schema}), grammar_of("qwen3_coder")
    form = required_calls(asked, grammar)
    assert list(unenforced_locations(asked, grammar)) == [f"tools[0].function.parameters#{path}"]
    parameters: dict[str, Any] = {"structured_outputs": {"structural_tag": {"format": form}}}
    for value, is_right in (("3", True), ('"x"', False)):
        written = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
        assert byte_grammars.accepts(COMPILER, written, **parameters) == is_right, written


@pytest.mark.parametrize("name", ENFORCED)
def test_places_in_a_grammar_are_told_in_the_functions_schema(name: str) -> None:
    schemas = {
        "now": {"type": "object", "properties": {}},
        "f": {"type": "object", "properties": {"x": {"type": "string"}, "a/b": {"type": "integer", "not": {}}}},
    }
    asked = use(schemas)
    form = required_calls(asked, grammar_of(name))
    sampling: dict[str, Any] = {"structured_outputs": {"structural_tag": {"format": form}}}
    plan = AnswerPlan(
        tool_use=asked, tool_format=TOOL_CALL_FORMATS[name], reasoning_format=None, includes_reasoning=True,
        shows_special_tokens=False, sampling=sampling,
    )  # fmt: skip
    places = [place.removeprefix("structured_outputs#") for place in byte_grammars.not_enforced(COMPILER, **sampling)]
    assert [plan.client_path(place) for place in places] == ["tools[1].function.parameters#/properties/a~1b/not"]


PATCH = r"""
start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?
hunk: "*** Update File: " /(.+)/ LF ("@@" LF)? line+
line: ("+" | "-" | " ") /(.*)/ LF -> changed
%import common.LF
"""
PATCHED = re.compile(r"\*\*\* Begin Patch\n(\*\*\* Update File: [^\n]+\n(@@\n)?([-+ ][^\n]*\n)+)+\*\*\* End Patch\n?")
INPUT_SCHEMA = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
REAL_PATCH = (
    '*** Begin Patch\n*** Update File: a "b".ts\n@@\n-const a = Array<\n+\tif (a && "\\\\n") { ł\n \n*** End Patch'
)
HINTS = ("*** Begin Patch\n*** Update File: a\n+<", "</", "\n+x", "\n*** End Patch", "\n", '"', "\\\\")


def custom_use(*, syntax: str = "lark", definition: str = PATCH, is_required: bool = True) -> ToolUse:
    grammar = InputGrammar("regex" if syntax == "regex" else "lark", definition)
    function = Function("patch", INPUT_SCHEMA, is_strict=False, param="tools[0].format", input_grammar=grammar)
    return ToolUse(tools=(), functions=(function,), is_required=is_required, max_calls=1, is_legacy=False)


def custom_structure(name: str, use: ToolUse) -> dict[str, Any]:
    table, grammar = TOOL_CALL_FORMATS[name], grammar_of(name)
    form = required_calls(use, grammar) if use.is_required else optional_calls(use, table, None)
    return {"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": form}}}


def inputs_read(name: str, text: str) -> list[str]:
    sample = Sample(text=text, tools=name, special=MARKERS.get(name, ()), schemas={"patch": INPUT_SCHEMA})
    visible = seen(parse(sample, tokens(sample)))
    assert all(call.is_complete for call in visible.calls) and not visible.content, (text, visible)
    return [json.loads(call.arguments)[INPUT] for call in visible.calls]


def call_text(name: str, text: str) -> str:
    grammar = grammar_of(name)
    arguments = json.dumps({INPUT: text}, ensure_ascii=False)
    if grammar.key_end:
        quoted = json.dumps(text, ensure_ascii=False)
        value = quoted if grammar.text_quote is None else grammar.text_quote + text + grammar.text_quote
        arguments = f"{grammar.key_begin}{INPUT}{grammar.key_end}{value}{value_end(INPUT, grammar)}"
    return f"{grammar.begin}{grammar.call_begin}patch{grammar.name_end}{arguments}{grammar.call_end}{grammar.end}"


@pytest.mark.parametrize("name", ENFORCED)
def test_the_input_of_a_custom_tool_follows_its_grammar(name: str) -> None:
    """What the grammar lets through is read as such an input, and a patch that a person would write is let through."""
    random, parameters = Random(name), custom_structure(name, custom_use())
    compiled = byte_grammars.grammar(COMPILER, **parameters)
    hints = [*HINTS, *(json.dumps(hint)[1:-1] for hint in HINTS), value_end(INPUT, grammar_of(name)) or '"']
    texts = [byte_grammars.walk(COMPILER, random, compiled, 600, hints) for _ in range(12)]
    whole = [text for text in texts if text is not None]
    assert len(whole) > 2
    for text in whole:
        (found,) = inputs_read(name, text)
        assert PATCHED.fullmatch(found), (text, found)
    written = call_text(name, REAL_PATCH)
    assert byte_grammars.accepts(COMPILER, written, **parameters)
    assert inputs_read(name, written) == [REAL_PATCH]
    assert not byte_grammars.accepts(COMPILER, call_text(name, REAL_PATCH.replace("+", "=")), **parameters)


@pytest.mark.parametrize("name", ENFORCED)
def test_the_input_of_a_custom_tool_follows_its_regular_expression(name: str) -> None:
    parameters = custom_structure(name, custom_use(syntax="regex", definition=r'^"[a-z]+"\n\d{4}(?:-\d\d)?$'))
    for text, is_right in (('"a"\n2025', True), ('"a"\n2025-08', True), ('"a" 2025', False), ('"a"\n2025-8', False)):
        written = call_text(name, text)
        assert byte_grammars.accepts(COMPILER, written, **parameters) == is_right, written
        assert inputs_read(name, written) == [text]


@pytest.mark.parametrize("name", [name for name in ENFORCED if not TOOL_CALL_FORMATS[name].only_required])
def test_a_voluntary_call_of_a_custom_tool_follows_its_grammar(name: str) -> None:
    parameters = custom_structure(name, custom_use(is_required=False))
    header = "<|channel|>final<|message|>" if name == "openai" else ""
    assert byte_grammars.accepts(COMPILER, f"{header}No patch is needed.", **parameters)
    assert byte_grammars.accepts(COMPILER, call_text(name, REAL_PATCH), **parameters)
    assert not byte_grammars.accepts(COMPILER, call_text(name, "*** Begin Patch\n"), **parameters)


@pytest.mark.parametrize("name", ["qwen3_coder", "hermes"])
def test_a_schema_that_forbids_other_members_stays_closed(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "unevaluatedProperties": False}
    form = required_calls(use({"f": schema}), grammar_of(name))
    parameters: dict[str, Any] = {"structured_outputs": {"structural_tag": {"format": form}}}
    for member, is_right in (("a", True), ("b", False)):
        text = written([("f", {member: "x"})], grammar_of(name))
        assert byte_grammars.accepts(COMPILER, text, **parameters) == is_right, text


@pytest.mark.parametrize("name", TAGGED)
def test_the_masks_of_a_clients_grammar_beside_another_function_can_be_computed(name: str) -> None:
    """The compiler has a limit of expressions, which a class of all Unicode spaces in a parameter's name exceeds."""
    other = Function("run", {"type": "object", "properties": {"cmd": {"type": "string"}}}, is_strict=False)
    asked = custom_use(definition=codex_form.PATCH_GRAMMAR, is_required=False)
    asked = replace(asked, functions=(other, *asked.functions))
    matcher = COMPILER.matcher(byte_grammars.grammar(COMPILER, **custom_structure(name, asked)))
    for byte in call_text(name, REAL_PATCH).encode():
        matcher.compute_bitmask()
        assert matcher.try_consume_tokens([byte]) == 1, matcher.get_error()


@pytest.mark.parametrize("is_required", [True, False])
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "kimi_k2", "granite", "openai"])
@pytest.mark.parametrize(("syntax", "definition"), [("lark", "start: missing"), ("regex", "(a")])
def test_a_mistake_in_a_grammar_is_told_of_the_tool(name: str, syntax: str, definition: str, is_required: bool) -> None:
    use = custom_use(syntax=syntax, definition=definition, is_required=is_required)
    parameters = custom_structure(name, use)
    with pytest.raises(TritonError) as raised:
        byte_grammars.grammar(COMPILER, **parameters)
    plan = AnswerPlan(
        tool_use=use, tool_format=TOOL_CALL_FORMATS[name], reasoning_format=None, includes_reasoning=True,
        shows_special_tokens=False, sampling=parameters,
    )  # fmt: skip
    error = OpenAIError.of(raised.value)
    assert plan.is_about_calls(error)
    shown = plan.in_client_fields(error)
    assert shown.param == "tools[0].format" and shown.message.startswith("'tools[0].format': ")


@pytest.mark.parametrize(
    "schema", [{}, {"type": ["object", "null"]}, {"anyOf": [{"required": ["a"]}, {"type": "null"}]}]
)
def test_arguments_are_an_object_whatever_the_schema_says(schema: dict[str, Any]) -> None:
    form = required_calls(use({"f": schema}), grammar_of("hermes"))
    parameters: dict[str, Any] = {"structured_outputs": {"structural_tag": {"format": form}}}
    for arguments, is_right in (('{"a": 1}', True), ("false", False), ('"t"', False), ("null", False), ("[]", False)):
        written = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert byte_grammars.accepts(COMPILER, written, **parameters) == is_right, written


def test_a_schema_of_something_else_than_an_object_is_refused() -> None:
    with pytest.raises(OpenAIError, match="'type' is 'string', expected \"object\"") as raised:
        required_calls(use({"now": {}, "f": {"type": "string"}}), grammar_of("hermes"))
    assert raised.value.param == "tools[1].function.parameters"


def mixed_use(schema: dict[str, Any], num_others: int = 1) -> ToolUse:
    """An optional call of one strict function and of others that are not strict."""
    strict = Function("now", SCHEMAS["now"], is_strict=True, param="tools[0].function.parameters")
    others = (Function(f"f{index}", schema, is_strict=False) for index in range(num_others))
    return ToolUse(tools=(), functions=(strict, *others), is_required=False, max_calls=None, is_legacy=False)


@pytest.mark.parametrize("name", [name for name in TAGGED if not TOOL_CALL_FORMATS[name].only_required])
def test_a_strict_function_does_not_bind_the_others(name: str) -> None:
    """A call of a function that is not strict may have any parameters."""
    schema = {"properties": {"b": {"type": "integer"}}, "required": ["b"], "minProperties": 1}
    form, grammar = optional_calls(mixed_use(schema), TOOL_CALL_FORMATS[name], None), grammar_of(name)
    values = {"x-y": f"{grammar.json_key_end or grammar.key_end}7"}
    if (quote := grammar.text_quote) is not None:
        values |= dict.fromkeys(("z", "b"), f"{grammar.key_end}{quote}a 7{quote}")
    written = "".join(f"{grammar.key_begin}{key}{value}{value_end(key, grammar)}" for key, value in values.items())
    text = f"{grammar.begin}{grammar.call_begin}f0{grammar.name_end}{written}{grammar.call_end}{grammar.end}"
    assert byte_grammars.accepts(COMPILER, text, structured_outputs={"structural_tag": {"format": form}}), text


@pytest.mark.parametrize("name", TAGGED)
def test_any_parameters_that_the_grammar_lets_through_are_read(name: str) -> None:
    random, grammar = Random(name), grammar_of(name)
    form = required_calls(use({"f": {"type": "object"}}), grammar)
    compiled = byte_grammars.grammar(COMPILER, structured_outputs={"structural_tag": {"format": form}})
    ends = (grammar.key_end, grammar.json_key_end, grammar.value_end, grammar.name_closes, grammar.call_end)
    hints = [hint for hint in (grammar.key_begin, "b", "x-y", "7", '"', *ends) if hint]
    num_calls = 0
    for _ in range(40):
        text = byte_grammars.walk(COMPILER, random, compiled, 800, hints)
        if text is not None:
            visible = seen(parse(Sample(text=text, tools=name, schemas={"f": {}}), [(text, False)]))
            assert visible.calls and not visible.content, (text, visible)
            for call in visible.calls:
                assert call.is_complete and isinstance(json.loads(call.arguments), dict), (text, call)
                num_calls += call.arguments != "{}"
    assert num_calls


def test_schemas_of_functions_that_are_not_strict_are_not_checked_under_auto() -> None:
    many: dict[str, Any] = {str(number): {} for number in range(600)}
    schemas: list[dict[str, Any]] = [{"type": "array"}, {"properties": ["a"]}, {"properties": many}]
    for schema in schemas:
        asked = mixed_use(schema)
        assert optional_calls(asked, TOOL_CALL_FORMATS["qwen3_coder"], None)
        assert len(list(unenforced_locations(asked, grammar_of("qwen3_coder")))) == 0


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m3", "pythonic", "hermes"])
@pytest.mark.parametrize("is_required", [True, False])
def test_many_functions_have_a_grammar(name: str, is_required: bool) -> None:
    """With the usual number of parameters, of which most are optional."""
    one = {"type": "string", "enum": ["a", "b"]}
    schema = {"type": "object", "properties": {f"p{n}": one for n in range(4)}, "required": ["p0"]}
    asked = replace(mixed_use(schema, 127), is_required=is_required)
    table = TOOL_CALL_FORMATS[name]
    form = required_calls(asked, table.grammar) if is_required else optional_calls(asked, table, None)
    assert byte_grammars.grammar(COMPILER, structured_outputs={"structural_tag": {"format": form}})


CITY = {"properties": {"city": {"type": "string"}}, "required": ["city"]}
DAYS = {"properties": {"days": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "is_open", "left_out"),
    [
        ({"type": "object"}, True, []),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, True, ["/additionalProperties"]),
        ({**CITY, "additionalProperties": True}, True, ["/additionalProperties"]),
        ({**CITY, "anyOf": [DAYS, {}]}, True, ["/anyOf"]),
        (CITY, False, []),
        ({**CITY, "additionalProperties": False}, False, []),
        ({"type": "object", "properties": {}}, False, []),
        ({"type": "object", "additionalProperties": False}, False, []),
    ],
)
def test_a_required_call_may_have_other_parameters_if_the_schema_does_not_name_all(
    schema: dict[str, Any], is_open: bool, left_out: list[str]
) -> None:
    asked = use({"f": schema})
    city = "city" in schema.get("properties", {})
    for name in ("qwen3_coder", "hermes"):
        form = required_calls(asked, grammar_of(name))
        parameters: dict[str, Any] = {"structured_outputs": {"structural_tag": {"format": form}}}
        for with_days in (True, False):
            values = ({"city": "Zürich"} if city else {}) | ({"days": 3} if with_days else {})
            tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
            arguments = json.dumps(values, ensure_ascii=False)
            text = {
                "qwen3_coder": f"<tool_call>\n<function=f>\n{tags}</function>\n</tool_call>",
                "hermes": f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>',
            }[name]
            assert byte_grammars.accepts(COMPILER, text, **parameters) == (is_open or not with_days), text
    locations = unenforced_locations(asked, grammar_of("qwen3_coder"))
    assert [place.partition("#")[2] for place in locations] == left_out


@pytest.mark.parametrize(
    "beside", [{"allOf": [DAYS]}, {"anyOf": [DAYS]}, {"oneOf": [DAYS]}, {"$ref": "#/$defs/d", "$defs": {"d": DAYS}}]
)
def test_members_that_the_schema_describes_beside_properties_are_arguments(beside: dict[str, Any]) -> None:
    form = required_calls(use({"f": {**CITY, **beside}}), grammar_of("hermes"))
    parameters: dict[str, Any] = {"structured_outputs": {"structural_tag": {"format": form}}}
    for days, is_right in (("3", True), ('"x"', False)):
        arguments = f'{{"city": "Zürich", "days": {days}}}'
        written = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert byte_grammars.accepts(COMPILER, written, **parameters) == is_right, written


def test_calls_of_kimi_are_numbered_by_the_model() -> None:
    parameters = structure("kimi_k2")
    calls = "".join(
        f"<|tool_call_begin|>functions.now:{number}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        for number in (0, 17)
    )
    text = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"
    assert byte_grammars.accepts(COMPILER, text, **parameters)
    assert not byte_grammars.accepts(COMPILER, text.replace(":17", ":x"), **parameters)


def test_functions_that_no_grammar_enforces_are_free() -> None:
    plan = AnswerPlan(
        tool_use=mixed_use({"type": "object"}, 2), tool_format=TOOL_CALL_FORMATS["qwen3_coder"], reasoning_format=None,
        includes_reasoning=True, shows_special_tokens=False,
    )  # fmt: skip
    constrained = replace(plan, sampling={"structured_outputs": {}})
    assert plan.free_functions == {"now", "f0", "f1"}
    assert replace(constrained, enforces_all=False).free_functions == {"f0", "f1"}
    assert constrained.free_functions == set()
