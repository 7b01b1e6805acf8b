"""Each kind of constraint: what it accepts and rejects, and which requests are refused, with which path."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from llmbackend.adapter.structured_outputs import constraint
from llmbackend.adapter.structured_outputs.grammar_parser import parse_ebnf
from llmbackend.adapter.structured_outputs.lark import Rules, is_lark, lark_grammar
from llmbackend.adapter.structured_outputs.schema_keywords import SchemaOptions
from llmbackend.core.backend_api import ErrorCode, TritonError
from llmbackend.waiting.large_stacks import LargeStackExecutor
from tests.helpers.byte_grammars import SPECIAL_TOKENS, accepts, compiler, grammar, not_enforced

COMPILER = compiler()
INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def strict(schema: Any) -> dict[str, Any]:
    return {"structured_outputs": {"json": schema, "strict": True}}


def tag(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    return {
        "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema, **more},
        "end": "}\n</tool_call>",
    }


def tools(**options: Any) -> dict[str, Any]:
    tags = [tag("f", INTEGER), tag("g", {"type": "object"})]
    kind = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags}
    return {"structural_tag": {"type": "structural_tag", "format": kind | options}}


def free_text(ends: list[str], count: int = 1) -> dict[str, Any]:
    """So many texts in brackets."""
    text = {"type": "tag", "begin": "[", "content": {"type": "any_text"}, "end": ends}
    return {"structural_tag": {"format": {"type": "sequence", "elements": [text] * count}}}


LONG_ENDS = [letter * 1024 for letter in "abcdefghijklmnop"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 3}}\n</tool_call>'
WRONG_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "3"}}\n</tool_call>'

EXPRESSION = 'root ::= term ("+" term)*  # sums\nterm ::= [0-9]+ |\n  "(" root ")"'

CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"structured_outputs": {"json": INTEGER}}, ['{"a": 3}', '{"a":3}', '{"a":3,"b":[]}'], ['{"a":"3"}', "{}", " {}"]),
    ({"structured_outputs": json.dumps({"json": json.dumps(INTEGER)})}, ['{"a": 3}'], ['{"a": "3"}']),
    ({"structured_outputs": {"json": INTEGER, "disable_any_whitespace": True}}, ['{"a":3}'], ['{"a": 3}']),
    ({"structured_outputs": {"json": INTEGER, "disable_additional_properties": True}}, ['{"a":3}'], ['{"a":3,"b":1}']),
    ({"structured_outputs": {"json": INTEGER, "whitespace_pattern": " ?"}}, ['{"a": 3}'], ['{"a":  3}', '{"a":\n3}']),
    ({"guided_json": INTEGER, "guided_whitespace_pattern": r"\n?"}, ['{"a":\n3}'], ['{"a": 3}']),
    (
        {"structured_outputs": {"json": INTEGER}},
        ['{\n  "a": 3\n}', "{\n" + " " * 40 + '"a": 3}'],
        ['{  "a": 3}', '{\n\n"a": 3}', '{ \n"a": 3}', "{\n" + " " * 41 + '"a": 3}', '{\t"a": 3}'],
    ),
    (
        strict({"type": "string", "pattern": "^2", "format": "date", "allOf": [{"maxLength": 20}]}),
        ['"2024-02-29"'],
        ['"2"', '"1999-01-01"'],
    ),
    (
        strict({"type": "object", "unevaluatedProperties": {"type": "integer"}, "propertyNames": {"enum": ["a"]}}),
        ['{"a": 1}', "{}"],
        ['{"a": "x"}', '{"b": 1}'],
    ),
    ({"structured_outputs": {"json_object": True}}, ["{}", '{"x": [1, "é"]}'], ["[]", "1", ""]),
    ({"structured_outputs": {"regex": r"^[a-z]+@x\.com$"}}, ["ab@x.com"], ["@x.com", "ab@xxcom", "ab@x.com "]),
    ({"guided_regex": "a/b|c"}, ["a/b", "c"], ["a/c", "ab"]),
    ({"structured_outputs": {"choice": ["a", 'b "c"\n']}}, ["a", 'b "c"\n'], ["b", "aa", ""]),
    ({"guided_choice": ["a", "ab", ""]}, ["a", "ab", ""], ["b", "aa"]),
    ({"guided_choice": [f"c{n}" for n in range(4096)]}, ["c1", "c12", "c4095"], ["c", "c4096"]),
    ({"guided_choice": '["x", "y"]'}, ["x"], ["z"]),
    ({"guided_decoding": '{"choice": ["x"]}'}, ["x"], ["y"]),
    ({"guided_grammar": EXPRESSION}, ["1", "1+(2+33)"], ["1+", "(1", "+1"]),
    ({"guided_grammar": 'root ::= [a-z]* "end"'}, ["end", "endend", "bend"], ["en", "endx"]),
    ({"guided_grammar": r'root ::= "\u00e9" [^\]a]{2,3} "x\n"?'}, ["ébc", "ébcdx\n"], ["éab", "éb]", "ébcdx"]),
    ({"guided_grammar": 'root ::= "a" root "b" | ""'}, ["", "aabb"], ["aab", "ba"]),
    ({"guided_grammar": 'start: "a" %json {"type": "integer"} B\nB: /x+/'}, ["a12xx"], ["a1", "ax"]),
    (tools(), ["hi", "", f"hi {CALL}bye {CALL}", "a<tool"], [WRONG_CALL, "<tool_call>x", f"a{CALL}{WRONG_CALL}"]),
    (tools(at_least_one=True), [CALL, f"{CALL} and {CALL}"], ["", "hi", f"hi {CALL}"]),
    (tools(at_least_one=True, stop_after_first=True), [CALL], ["", f"{CALL}{CALL}", f"{CALL} "]),
]


@pytest.mark.parametrize(("parameters", "valid", "invalid"), CASES)
def test_what_a_constraint_accepts(parameters: dict[str, Any], valid: list[str], invalid: list[str]) -> None:
    for special in (False, True):
        assert [text for text in valid if not accepts(COMPILER, text, special=special, **parameters)] == []
        assert [text for text in invalid if accepts(COMPILER, text, special=special, **parameters)] == []


FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"type": "tags_with_separator", "separator": ", ", "at_least_one": True, "tags": [tag("f", INTEGER)]},
        [CALL, f"{CALL}, {CALL}"],
        ["", f"{CALL}, ", f"{CALL}{CALL}"],
    ),
    (
        {"type": "tags_with_separator", "separator": "", "stop_after_first": True, "tags": [tag("f", INTEGER)]},
        ["", CALL],
        [f"{CALL}{CALL}"],
    ),
    (
        {
            "type": "sequence",
            "elements": [
                {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
                {
                    "type": "or",
                    "elements": [{"type": "const_string", "value": "A"}, {"type": "regex", "pattern": "[0-9]"}],
                },
                {"type": "optional", "content": {"type": "grammar", "grammar": 'root ::= "q" root | "z"'}},
            ],
        },
        ["<think>x</thin</think>A", "<think></think>1qqz"],
        ["<think>x</think>", "<think></think>B", "<think></think>Aq"],
    ),
    (
        {"type": "tag", "begin": "[", "content": {"type": "any_text", "excludes": ["!"]}, "end": ["]", "."]},
        ["[a]", "[a b."],
        ["[a!]", "[a"],
    ),
]


@pytest.mark.parametrize(("form", "valid", "invalid"), FORMATS)
def test_formats_of_structural_tags(form: dict[str, Any], valid: list[str], invalid: list[str]) -> None:
    test_what_a_constraint_accepts({"structural_tag": json.dumps({"format": form})}, valid, invalid)


def test_the_former_form_of_structural_tags() -> None:
    structures = [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}]
    former = {"type": "structural_tag", "structures": structures, "triggers": ["<f"]}
    test_what_a_constraint_accepts({"structural_tag": json.dumps(former)}, ["a<f>3</f>b", "x"], ["a<f>x</f>", "<f"])


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "json and regex"),
    ({"structured_outputs": {"jsno": {}}}, "structured_outputs", "/jsno"),
    ({"structured_outputs": {"json": {}}, "guided_regex": "a"}, "guided_regex", "are mutually exclusive"),
    ({"structured_outputs": {"json": {}, "backend": "outlines"}}, "structured_outputs", "llguidance"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": ".*"}}, "whitespace_pattern", "spaces, tabs"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "only together with a constraint"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json": 3}, "guided_json", "a JSON schema"),
    (strict({"items": {"oneOf": [{"type": "string"}, {"minLength": 3}]}}), "structured_outputs", "/items/oneOf"),
    ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 1}}, "guided_json", "(3) is greater than"),
    ({"guided_json": {"$ref": "#"}}, "guided_json", "refers to itself"),
    (
        {
            "guided_json": {
                "$defs": {
                    "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/c"}]},
                    "b": {"type": "null"},
                    "c": {"allOf": [{"$ref": "#/$defs/a"}]},
                },
                "items": {"$ref": "#/$defs/b"},
                "properties": {"p": {"$ref": "#/$defs/a"}},
            }
        },
        "guided_json",
        "refers to itself",
    ),
    (strict({"type": "object", "minProperties": 3}), "structured_outputs", "/minProperties"),
    (strict({"items": {"$id": "x"}}), "structured_outputs", "/items/$id"),
    ({"guided_json": {"enum": list(range(9000))}}, "guided_json", "more than 8192 nodes"),
    ({"guided_json": {"properties": {str(n): {} for n in range(2000)}}}, "guided_json", "at most 480"),
    (strict({"multipleOf": 99991}), "structured_outputs", "/multipleOf"),
    ({"guided_choice": []}, "guided_choice", "non-empty list"),
    ({"guided_choice": ["\ud800"]}, "guided_choice", "surrogate"),
    ({"guided_choice": ["x" * 70000]}, "guided_choice", "at most 65536"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "(?=a"),
    ({"guided_regex": "((a{100}){100}){100}"}, "guided_regex", "repetitions written out"),
    ({"guided_regex": "a" * 9000}, "guided_regex", "at most 8192"),
    ({"guided_regex": "(?<ab"}, "guided_regex", "the name of a group in the regular expression at character 3"),
    ({"guided_grammar": "root ::= other"}, "guided_grammar", "'other', which is not defined"),
    ({"guided_grammar": "rule ::= [a]"}, "guided_grammar", "no rule 'root'"),
    ({"guided_grammar": "root ::= (= [a]) [b]"}, "guided_grammar", "line 1"),
    ({"guided_grammar": 'root ::= ("a"{1000}){1000}'}, "guided_grammar", "repetitions written out"),
    ({"guided_grammar": "start: missing"}, "guided_grammar", "missing"),
    ({"guided_grammar": 'start: a\na[max_tokens=3]: "x"'}, "guided_grammar", "'max_tokens'"),
    ({"guided_grammar": '%llguidance {}\nstart: "x"'}, "guided_grammar", "%llguidance"),
    ({"guided_grammar": 'start: %json {"not": {}}'}, "guided_grammar", "/%json at line 1/not"),
    ({"guided_grammar": 'start: a\na [max_tokens=3]: "x"'}, "guided_grammar", "'max_tokens'"),
    ({"guided_grammar": 'start: a /\n"/ -> y a[max_tokens=3]: "x"\nB: /"/'}, "guided_grammar", "'max_tokens'"),
    ({"guided_grammar": 'start: a <"> -> y a[max_tokens=3]: "x" <">'}, "guided_grammar", "'max_tokens'"),
    ({"guided_grammar": 'start: "a"\n  | "b'}, "guided_grammar", "line 2 of the grammar: a string without its end"),
    ({"guided_grammar": "start: /a"}, "guided_grammar", "line 1 of the grammar: a regular expression without its end"),
    ({"guided_grammar": 'root ::= "a"' + "*" * 2000}, "guided_grammar", "something to repeat or to match, found '*'"),
    ({"guided_grammar": '{"grammars": []}'}, "guided_grammar", "is JSON"),
    ({"structural_tag": '{"type": "x"}'}, "structural_tag", "/type"),
    ({"structural_tag": '{"format": {"type": "x"}}'}, "structural_tag", "/format/type"),
    ({"structural_tag": '{"format": {"type": "any_text", "y": 1}}'}, "structural_tag", "/format/y"),
    (tools(triggers=["<x"]), "structural_tag", "/format/tags/0/begin"),
    (tools(triggers=["<" * 1025]), "structural_tag", "/format/triggers: 1025 characters in one text"),
    (tools(excludes=["<" * 1025]), "structural_tag", "/format/excludes: 1025 characters in one text"),
    (tools(excludes=["<" * 1000] * 17), "structural_tag", "/format/excludes: 17000 characters in all"),
    (free_text(["]"] * 17), "structural_tag", "/format/elements/0/end: 17 ends, expected at most 16"),
    (free_text(["]" * 1025]), "structural_tag", "/format/elements/0/end: 1025 characters in one text"),
    (free_text(LONG_ENDS, count=16), "structural_tag", "characters in the grammar compiled from it, expected at most"),
    (free_text(["\ud800"]), "structural_tag", "text without halves of surrogate pairs"),
    (
        {"structural_tag": {"format": {"type": "grammar", "grammar": "\n" * 70000 + "x ::= y"}}},
        "structural_tag",
        "/format/grammar: 70007 characters of a grammar",
    ),
    (
        tools(tags=[tag("f", {"not": {}}, strict=True)]),
        "structural_tag",
        "/format/tags/0/content/json_schema/not",
    ),
]


def runs(number: int) -> list[dict[str, Any]]:
    """Strings with runs of different lengths."""
    return [{"type": "string", "pattern": f"a{{{length}}}"} for length in range(100, 100 + number)]


def terminal(name: str, number: int) -> str:
    return f"{name}: " + " & ".join(f"/(?s:.*)a{{{length}}}(?s:.*)/" for length in range(100, 100 + number)) + "\n"


REFUSED += [
    (
        {"guided_json": {"allOf": runs(20)}},
        "guided_json",
        "20 regular expressions apply to the value, expected at most 8",
    ),
    (
        {"guided_json": {"allOf": [{"type": "object", "properties": {"p": one}} for one in runs(20)]}},
        *("guided_json", "20 regular expressions apply to the value at /p,"),
    ),
    (
        {"guided_json": {"allOf": [{"type": "array", "items": one} for one in runs(20)]}},
        *("guided_json", "20 regular expressions apply to the value at /*,"),
    ),
    (
        {
            "guided_json": {
                "$defs": {f"d{n}": one | {"$ref": f"#/$defs/d{n + 1}"} for n, one in enumerate(runs(20))} | {"d20": {}},
                "$ref": "#/$defs/d0",
            }
        },
        *("guided_json", "20 regular expressions apply to the value,"),
    ),
    (
        {"guided_json": {"allOf": [{"anyOf": [one, INTEGER]} for one in runs(20)]}},
        "guided_json",
        "too many combinations of schemas",
    ),
    ({"guided_grammar": "start: T\n" + terminal("T", 20)}, "guided_grammar", "the terminal 'T' has more than 8 '&'"),
    (
        {"guided_grammar": "start: T\nT: A & B\n" + terminal("A", 6) + terminal("B", 6)},
        *("guided_grammar", "the terminal 'T' has more than 8 '&', with those that it uses"),
    ),
    ({"guided_grammar": f"start: %json {json.dumps({'allOf': runs(20)})}"}, "guided_grammar", "20 regular expressions"),
]
"""Those of one value or one terminal: the compiler would take minutes."""


@pytest.mark.parametrize(("parameters", "param", "text"), REFUSED)
def test_what_is_refused_by_name(parameters: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(TritonError) as caught:
        grammar(COMPILER, **parameters)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message
    assert text in caught.value.message


def test_any_number_of_regular_expressions_for_different_values() -> None:
    names = {f"p{number}": {"type": "string", "pattern": f"^{number}$"} for number in range(12)}
    node = {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"children": {"items": {"$ref": "#/$defs/node"}}}}]}
    definitions = {"base": {"type": "object", "properties": names}, "node": node}
    schema = {"$defs": definitions, "$ref": "#/$defs/node"}
    assert accepts(COMPILER, '{"p0": "0", "children": [{"p11": "11"}]}', guided_json=schema)
    assert not accepts(COMPILER, '{"p0": "0", "children": [{"p11": "12"}]}', guided_json=schema)
    one_of_them = [{"properties": {"p": one}, "type": "object", "required": ["p"]} for one in names.values()]
    assert accepts(COMPILER, '{"p": "11"}', guided_json={"anyOf": one_of_them})
    terminals = "".join(f"T{number}: /[a-z]+/ & /{number:c}.*/\n" for number in range(97, 109))
    text = "start: " + " ".join(f"T{number}" for number in range(97, 109)) + "\n" + terminals
    assert grammar(COMPILER, guided_grammar=text)


def test_types_that_refer_to_their_union_from_many_places() -> None:
    """As in syntax trees: each type has a regular expression, no value has two."""
    union = {"$ref": "#/$defs/any"}
    types = {
        f"t{number}": {
            "type": "object",
            "properties": {"kind": {"type": "string", "pattern": f"^k{number}$"}, "a": union, "b": union, "c": union},
            "required": ["kind"],
        }
        for number in range(60)
    }
    schema = {"$defs": types | {"any": {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in types]}}, **union}
    assert accepts(COMPILER, '{"kind": "k7", "b": {"kind": "k59"}}', guided_json=schema)
    assert not accepts(COMPILER, '{"kind": "k7", "b": {"kind": "l59"}}', guided_json=schema)


def test_terminals_may_use_each_other_in_a_long_chain() -> None:
    chain = "".join(f"A{number}: A{number + 1}\n" for number in range(600)) + "A600: /[a-z]+/\n"
    joined = "".join(f"T{number}: A0 & /{number:c}.*/\n" for number in range(97, 109))
    assert grammar(COMPILER, guided_grammar=f"start: T97 T98\n{chain}{joined}")


def test_nothing_asked_is_no_constraint() -> None:
    assert constraint.read({"temperature": 1}) is None
    assert constraint.read({"structured_outputs": None, "guided_json": None}) is None
    assert constraint.read({"structured_outputs": {"json_object": False}}) is None


def test_the_same_constraint_is_compiled_once() -> None:
    used = compiler()
    first = grammar(used, guided_json=INTEGER)
    assert grammar(used, guided_json=dict(INTEGER)) is first
    assert grammar(used, guided_json=INTEGER | {"maxProperties": 3}) != first


def test_a_value_between_a_definition_and_itself_ends_the_recursion() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/b"}, "right": {"$ref": "#/$defs/b"}}}
    schema = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": tree}, "$ref": "#/$defs/a"}
    assert accepts(COMPILER, '{"left": {"right": {}}, "right": {}}', guided_json=schema)


PLACE = constraint.RequestPath("x")


@pytest.mark.parametrize(
    "read",
    [
        lambda: is_lark("\n" * 500_000 + "x ::= y"),
        lambda: is_lark("x ::= y\nstart" + "\n" * 500_000),
        lambda: lark_grammar("start: a\n" + "a[" * 200_000, PLACE, {}, SchemaOptions()),
        lambda: lark_grammar('start: "' + '\\"' * 300_000, PLACE, {}, SchemaOptions()),
        lambda: lark_grammar("start: /" + "\\/" * 300_000, PLACE, {}, SchemaOptions()),
        lambda: parse_ebnf('root ::= "a"{1,' + " " * 500_000, PLACE),
        lambda: lark_grammar('start: "a"~' + "1" * 500_000, PLACE, {}, SchemaOptions()),
        lambda: lark_grammar("start: " + "aB" * 300_000, PLACE, {}, SchemaOptions()),
    ],
    ids=["empty lines", "lines after start", "brackets", "quotes", "slashes", "spaces", "digits", "letters"],
)
def test_a_grammar_is_divided_in_a_time_proportional_to_its_length(read: Callable[[], object]) -> None:
    """Otherwise it would take minutes."""
    with contextlib.suppress(TritonError):
        read()


def test_references_are_followed_once() -> None:
    """Otherwise it would take minutes."""
    chain: dict[str, Any] = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(4700)}
    lists = {
        f"p{number}": {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/d0"}} for number in range(480)
    }
    groups = {f"g{number}": {"properties": lists} for number in range(3)}
    with pytest.raises(TritonError, match="KB of the compiler's stack"):
        grammar(COMPILER, guided_json={"$defs": {**chain, "d4700": {"type": "string"}}, "properties": groups})


def chained(link: Callable[[dict[str, Any]], dict[str, Any]], count: int) -> dict[str, Any]:
    """A schema of definitions that refer to each other, one after the other."""
    chain = {f"d{number}": link({"$ref": f"#/$defs/d{number + 1}"}) for number in range(count)}
    return {"guided_json": {"$defs": {**chain, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}}


def nested(member: Callable[[dict[str, Any]], dict[str, Any]], times: int) -> Callable[[Any], dict[str, Any]]:
    return lambda schema: functools.reduce(lambda inner, _: member(inner), range(times), schema)


def rules(body: str, count: int, separator: str = ": ", start: str = "start", name: str = "r") -> dict[str, Any]:
    """A grammar of definitions that use each other, one after the other."""
    lines = [f"{name}{number}{separator}{body.replace('*', f'{name}{number + 1}')}" for number in range(count)]
    return {"guided_grammar": "\n".join((f"{start}{separator}{name}0", *lines, f'{name}{count}{separator}"a"'))}


def on_one_line(asked: dict[str, Any]) -> dict[str, Any]:
    return {"guided_grammar": asked["guided_grammar"].replace("start: r0", "start: r0 -> z").replace("\n", " ")}


DEEP: dict[str, tuple[Callable[[int], dict[str, Any]], int, int]] = {
    # Constraint of a size, a size that is compiled, one that would overflow the compiler's stack (0: others refuse it).
    "references": (lambda size: chained(lambda schema: schema, size), 4600, 4700),
    "properties": (lambda size: chained(nested(lambda schema: {"properties": {"a": schema}}, 60), size), 70, 130),
    "items": (lambda size: chained(nested(lambda schema: {"prefixItems": [schema]}, 60), size), 70, 130),
    "patterns": (lambda size: chained(nested(lambda schema: {"patternProperties": {"^a": schema}}, 60), size), 70, 130),
    "alternatives": (lambda size: chained(nested(lambda schema: {"anyOf": [schema]}, 60), size), 70, 130),
    "rules": (lambda size: rules("*", size), 4500, 0),
    "groups": (lambda size: rules("((((((((((*))))))))))?", size), 1300, 1500),
    "optional parts": (lambda size: rules("[[[[[[[[[[*]]]]]]]]]]", size), 190, 1500),
    "rules on one line": (lambda size: on_one_line(rules("* -> z", size)), 3000, 0),
    "rules with attributes": (lambda size: rules("*", size, '[capture="x"]: '), 1800, 0),
    "terminals": (lambda size: rules("*", size, start="start: R0\nS", name="R"), 4500, 0),
    "EBNF": (lambda size: rules('(("b" * | root "c")+)?', size, " ::= ", "root"), 480, 0),
}


@pytest.fixture
def compiling() -> Iterator[LargeStackExecutor]:
    """A thread like those that compile in a server."""
    with LargeStackExecutor(1) as executor:
        yield executor


@pytest.mark.parametrize("name", DEEP)
def test_the_compilers_stack_does_not_overflow(name: str, compiling: LargeStackExecutor) -> None:
    """An overflow would end the process."""
    make, fits, overflows = DEEP[name]
    compiling.submit(partial(grammar, COMPILER, **make(fits))).result()
    if overflows:
        with pytest.raises(TritonError, match="KB of the compiler's stack for nested definitions"):
            grammar(COMPILER, **make(overflows))


def test_schemas_below_deep_rules_are_shallower(compiling: LargeStackExecutor) -> None:
    schema, deep = chained(lambda one: one, 1000)["guided_json"], rules("*", 500)["guided_grammar"]
    compiling.submit(partial(grammar, COMPILER, guided_grammar=f"{deep} %json {json.dumps(schema)}")).result()
    deep = rules("((((((((((*))))))))))?", 700)["guided_grammar"]
    with pytest.raises(TritonError, match="KB of the compiler's stack"):
        grammar(COMPILER, guided_grammar=f"{deep} %json {json.dumps(schema)}")


def test_definitions_that_only_refer_to_themselves_are_no_chain(compiling: LargeStackExecutor) -> None:
    filters = {
        f"f{number}": {
            "type": "object",
            "properties": {"and": {"anyOf": [{"$ref": f"#/$defs/f{number}"}, {"type": "null"}]}},
        }
        for number in range(160)
    }
    schema = {"$defs": filters, "anyOf": [{"$ref": f"#/$defs/{name}"} for name in filters]}
    compiling.submit(partial(grammar, COMPILER, guided_json=schema)).result()


@pytest.mark.parametrize(
    "repeated",
    [{"const": "x" * 100_000}, {"properties": {"x" * 100_000: True}}, {"pattern": "[a-z]x?" * 1100}],
    ids=["values", "names", "patterns"],
)
def test_alternatives_that_are_written_several_times_are_bounded(repeated: dict[str, Any]) -> None:
    """Otherwise it would take minutes."""
    schema = {"$defs": {"d": repeated}, "oneOf": [{"$ref": "#/$defs/d"}] * 6000}
    with pytest.raises(TritonError, match="characters in the grammar compiled from it, expected at most"):
        grammar(COMPILER, guided_json=schema)


def test_long_lists_without_repetitions_are_left_out() -> None:
    unique = {"type": "array", "items": {"enum": [letter * 1000 for letter in "abcde"]}, "uniqueItems": True}
    assert not_enforced(COMPILER, guided_json=unique) == ()
    unique["items"] = {"enum": [letter * 40_000 for letter in "abcde"]}
    assert not_enforced(COMPILER, guided_json=unique) == ("guided_json#/uniqueItems",)


def test_markers_of_a_model_with_many_special_tokens() -> None:
    """With a regular expression of all of them it would take minutes."""
    many = {1000 + number: f"<unused{number}>" for number in range(10_000)} | SPECIAL_TOKENS
    used = Rules({text: token_id for token_id, text in many.items()}, {}, PLACE)
    rest = "<unused7" + "<" * 200_000
    marker = used.marker(f"a<unused70><tool_call>{rest}")
    assert marker.endswith(f'| "a" (<[1070]> | "<unused70>") (<[300]> | "<tool_call>") "{rest}")')
