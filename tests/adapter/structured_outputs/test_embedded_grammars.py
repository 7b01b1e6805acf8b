"""Grammars in Lark's notation and regular expressions inside something else: as text up to an end, and in JSON."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import pytest

from llmbackend.core.backend_api import ErrorCode, TritonError
from tests.helpers import byte_grammars

COMPILER = byte_grammars.compiler()
PATCH = r"""
// Lines of changes between two marks.
start: begin change+ end
begin: "*** Begin" NL
end: "*** End" NL?

change: file (line)+ -> changed
file: "@@ " /(.+)/ NL
?line: ("+" | "-" | " ") /(.*)/ NL
%import common.LF -> NL
"""
EXPRESSION = """
start: sum
sum: product (SP "+" SP product)*
product: atom (SP "*" SP atom)* | "-" product
atom: INT | "(" sum ")" | "\\"" WORD "\\""
SP: " "
%import common (INT, WORD)
"""
LIST = 'start: "(" item* ")"\nitem: start | /[a-z]/~1..3 | "x"i\n%ignore " "'
PATCHES = [
    '*** Begin\n@@ a/"b".ts\n+type A = Array<\n-  \\n ł\n*** End\n',
    "*** Begin\n@@ x\n+\n@@ y\n hello\tworld\n*** End",
]
WRONG_PATCHES = ["*** Begin\n@@ x\n*** End", "*** Begin\n@@ \n+a\n*** End", "*** Begin\n@@ x\n+a\nb\n*** End", ""]
LANGUAGES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "patch": ({"type": "grammar", "syntax": "lark", "grammar": PATCH}, PATCHES, WRONG_PATCHES),
    "expression": (
        {"type": "grammar", "syntax": "lark", "grammar": EXPRESSION},
        ["1", "1 + 2 * (3 + 4)", '--("a" * 2)'],
        ["", "1+2", "(1", "1 + ", '"1"'],
    ),
    "list": (
        {"type": "grammar", "syntax": "lark", "grammar": LIST},
        ["()", "(a(bc X)def)", " ( ( ) )"],
        ["(", "(abcd1)", "(Y)"],
    ),
    "regex": ({"type": "regex", "pattern": r'"[^a]+\\\n?'}, ['"b\\', '"\n\t"\\\n'], ['"\\', '"b', '"ba\\']),
    "regex of classes": ({"type": "regex", "pattern": r"[\s\S]\S\D\W\p{L}"}, ["\nx\n-é", '""""a'], ["\n 1-é", "abc"]),
}
SPECIAL = {"end": "</tool_call>"}


def structure(form: dict[str, Any]) -> dict[str, Any]:
    return {"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": form}}}


def in_json(form: dict[str, Any]) -> dict[str, Any]:
    around = [{"type": "const_string", "value": text} for text in ('{"input": "', '"}')]
    return structure({"type": "sequence", "elements": [around[0], form | {"style": "json_string"}, around[1]]})


def tagged(form: dict[str, Any], end: str = "\n</p>\n", excludes: tuple[str, ...] = ("</p>", "<p=")) -> dict[str, Any]:
    content = form | {"style": "text", "excludes": list(excludes)}
    return structure({"type": "tag", "begin": "<p>", "content": content, "end": end})


def refusal(parameters: dict[str, Any]) -> str:
    with pytest.raises(TritonError) as raised:
        byte_grammars.grammar(COMPILER, **parameters)
    assert raised.value.code is ErrorCode.INVALID_ARG and raised.value.param == "structured_outputs"
    return raised.value.message


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_text_stands_in_a_json_string_with_its_escapes(name: str) -> None:
    form, right, wrong = LANGUAGES[name]
    for text in (*right, *wrong):
        written = json.dumps({"input": text}, ensure_ascii=False)
        assert byte_grammars.accepts(COMPILER, written, **in_json(form)) == (text in right), written


@pytest.mark.parametrize("name", LANGUAGES)
@pytest.mark.parametrize("end", ["\n</p>\n", "</p>", "</tool_call>"])
def test_a_text_stands_between_tags_as_it_is(name: str, end: str) -> None:
    form, right, wrong = LANGUAGES[name]
    for text in (*right, *wrong):
        assert byte_grammars.accepts(COMPILER, f"<p>{text}{end}", **tagged(form, end)) == (text in right), text


def test_an_end_that_is_a_special_token_ends_a_text_that_may_hold_its_characters() -> None:
    form = {"type": "grammar", "syntax": "lark", "grammar": 'start: "a" start | /<+[^\\n]*/'}
    assert byte_grammars.accepts(COMPILER, "<p>aa<<!</tool_call>", special=True, **tagged(form, "</tool_call>"))
    assert "recursive" in refusal(tagged(form, "</p>"))


@pytest.mark.parametrize("name", LANGUAGES)
def test_what_is_generated_in_json_is_a_text_of_the_grammar(name: str) -> None:
    """By the same grammar between tags, which escapes nothing."""
    form, right, _ = LANGUAGES[name]
    random, grammar = Random(name), byte_grammars.grammar(COMPILER, **in_json(form))
    hints = [json.dumps(text)[1:-1] for text in ("*** End\n", "@@ x\n+", ")", "\n", '"', '"}', *right)]
    texts = [byte_grammars.walk(COMPILER, random, grammar, 300, hints) for _ in range(30)]
    whole = [json.loads(text)["input"] for text in texts if text is not None]
    assert len(whole) > 5
    for text in whole:
        assert byte_grammars.accepts(COMPILER, f"<p>{text}\n</q>\n", **tagged(form, "\n</q>\n", ())), text


@pytest.mark.parametrize("grammar", [PATCH, "start: /(?:.|\\n)+/", 'start: "(" start ")" | /[^()\\n]+/'])
def test_a_text_never_holds_what_would_end_it(grammar: str) -> None:
    """Neither in one part of a grammar nor across several."""
    form = {"type": "grammar", "syntax": "lark", "grammar": grammar}
    random, compiled = Random(7), byte_grammars.grammar(COMPILER, **tagged(form))
    hints = ["</p>", "</", "p>", "<", "<p=", "\n</p>\n", "*** Begin\n@@ <", "\n+", "*** End", "(", ")"]
    texts = [byte_grammars.walk(COMPILER, random, compiled, 200, hints) for _ in range(40)]
    whole = [text for text in texts if text is not None]
    assert len(whole) > 5
    for text in whole:
        content = text.removeprefix("<p>").removesuffix("\n</p>\n")
        assert "</p>" not in content and "<p=" not in content


def test_an_end_across_two_parts_cannot_be_written() -> None:
    """A part that a recursion separates from the next one does not end with what that one could go on with."""
    form = {"type": "grammar", "syntax": "lark", "grammar": "start: A start | B\nA: /[a-z]<*/\nB: /[>\\/pq;]+/"}
    assert "may contain ';'" in refusal(tagged(form, ";;", ("</p>",)))
    parameters = tagged(form, "!!", ("</p>",))
    for text, is_possible in (("ab>", True), ("ab/p>", True), ("a</p>", False), ("a</q>", False)):
        assert byte_grammars.accepts(COMPILER, f"<p>{text}!!", **parameters) == is_possible, text


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ("", "has no rule 'start'"),
        ("start: a", "'start' uses 'a', which is not defined"),
        ("start: A\nA: B\nB: A", "terminal 'A' uses itself"),
        ("start: A\nA: b\nb: /x/", "terminal 'A' uses the rule 'b'"),
        ("start: /a/\nstart: /b/", "defines 'start' twice"),
        ("start.2: /a/", "line 1 of the grammar"),
        ("start: x{y}\n", "line 1"),
        ('start: "a"\n%declare B', "line 2 of the grammar: expected '%import common.…' or '%ignore'"),
        ("start: A\n%import common.NOPE", "line 2 of the grammar: expected one of common's terminals"),
        ("start: A\n%import .other.A", "line 2"),
        ('start: "a" "b', "line 1"),
        ("start: /(?=a)/", "'(?=a' in the regular expression"),
        ("start: /a/x", "no other flags than i and s"),
        ("start: /a{200000}/", "characters with repetitions written out"),
        ('start: "a"~5..2', "largest count is not below"),
        ('start: "b".."a"', "a range of two characters"),
        ("start: (" + "(" * 70 + '"a"' + ")" * 71, "nested groups"),
        ("start: A0\n" + "\n".join(f"A{n}: A{n + 1} A{n + 1}" for n in range(40)) + '\nA40: "a"', "repetitions"),
        ("start: " + " ".join(['"a"'] * 5000), "parts of a grammar"),
        ('start: "\\x01"', "a control character that has no short escape in JSON"),
        ("start: /\\x01/", "has no short escape in JSON"),
        ("start: /[\\p{Greek}]/", "the Unicode property 'Greek'"),
        (
            'start: "(" start ")" | start /[^(]+/',
            "recursive, and both /[^(]+/ and the text after it may contain characters that JSON escapes",
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused(grammar: str, expected: str) -> None:
    message = refusal(in_json({"type": "grammar", "syntax": "lark", "grammar": grammar}))
    assert expected in message, message
    assert "/elements/1/grammar" in message


def test_a_fixed_text_that_would_end_the_text_is_refused() -> None:
    form = {"type": "grammar", "syntax": "lark", "grammar": 'start: "(" start ")" | "a</p>b" | "c"'}
    assert "contains '</p>'" in refusal(tagged(form))
    form["grammar"] = 'start: "(" start ")" | "</" | "p>" start'
    assert byte_grammars.accepts(COMPILER, "<p>p></\n</p>\n", **tagged(form))
    form["grammar"] = 'start: "</" start "." | "p>"'
    assert "ends with '</'" in refusal(tagged(form))


@pytest.mark.parametrize(
    ("form", "path"),
    [
        ({"type": "grammar", "syntax": "yacc", "grammar": "x"}, "/syntax"),
        ({"type": "grammar", "grammar": 'root ::= "a"', "style": "json_string"}, "/style"),
        ({"type": "regex", "pattern": "a", "style": "yaml"}, "/style"),
        ({"type": "regex", "pattern": "a", "style": "json_string", "excludes": ["b"]}, "/excludes"),
        ({"type": "regex", "pattern": "(", "style": "json_string"}, "/pattern"),
    ],
)
def test_the_place_of_a_mistake_is_named(form: dict[str, Any], path: str) -> None:
    assert f"at /structural_tag/format{path}" in refusal(structure(form))


def test_two_grammars_in_one_tag_keep_apart() -> None:
    forms = [LANGUAGES[name][0] for name in ("expression", "list")]
    ebnf = {"type": "grammar", "grammar": 'root ::= "<" root ">" | "!"'}
    dot = {"type": "const_string", "value": "."}
    parameters = structure({"type": "sequence", "elements": [forms[0], dot, forms[1], dot, ebnf, dot, ebnf]})
    assert byte_grammars.accepts(COMPILER, "(1).(a).<!>.!", **parameters)
    assert not byte_grammars.accepts(COMPILER, "(a).(1).<!>.!", **parameters)


def test_common_terminals_are_what_their_names_say() -> None:
    right = {
        "SIGNED_NUMBER": ["-1.5e3", "+7", ".5", "3."], "CNAME": ["_a1"], "ESCAPED_STRING": ['"a\\"b"', '""'],
        "WS": [" \n\t"], "NEWLINE": ["\r\n\n"], "HEXDIGIT": ["f"], "SH_COMMENT": ["# x"], "CPP_COMMENT": ["// x"],
    }  # fmt: skip
    wrong = {"SIGNED_NUMBER": ["1e", "--1"], "CNAME": ["1a"], "ESCAPED_STRING": ['"a"b"'], "WS": ["x"]}
    for name, texts in right.items():
        form = {"type": "grammar", "syntax": "lark", "grammar": f"start: {name}\n%import common.{name}"}
        for text in (*texts, *wrong.get(name, ())):
            assert byte_grammars.accepts(COMPILER, text, **structure(form)) == (text in texts), (name, text)
            assert re.fullmatch(r"[\x00-\x7f]*", text)
