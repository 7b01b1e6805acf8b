"""Structural tags: grammar rules for free text with constrained parts between markers.

Used by compilation.py. Independent of tools and of parsers of model output. Invariants: a marker matches both as
special tokens and as text; after a trigger, one of its tags must follow.
Source: XGrammar's structural tags (`format`), and vLLM's former notation (`structures` and `triggers`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import regular_expressions
from .constraint import MAX_DEPTH, MAX_FORMATS, MAX_GRAMMAR_CHARS, MAX_LEFT_OUT, MAX_TAGS, RequestPath
from .embedded_grammars import IN_JSON_STRING, as_text, ebnf, embedded_lark, embedded_regex
from .json_schema import enforceable, parse_schema
from .lark import NOTHING, TEXT, Rules, is_lark, without
from .schema_keywords import SchemaOptions

MAX_ENDS = 16
"""Of one tag: the text before each of them excludes the others."""
MAX_MARKER_CHARS = 1024
"""Of one end, trigger or excluded text."""
MAX_EXCLUDED_CHARS = 16384
"""Of all excluded texts of a format: each terminal of a recursive grammar excludes them and their beginnings."""


def structural_tag(
    value: dict[str, Any], place: RequestPath, rules: Rules, options: SchemaOptions
) -> tuple[str, list[str]]:
    """The start of the grammar, and the paths of schema keywords that are not enforced. Raises TritonError INVALID_ARG
    with the path."""
    _check_keys(value, place, ("type", "format", "structures", "triggers"))
    if value.get("type", "structural_tag") != "structural_tag":
        (place / "type").refuse(value["type"], "'structural_tag'")
    tags = _Tags(rules, options)
    start = tags.read(value["format"], place / "format") if "format" in value else tags.read_former(value, place)
    return start, tags.left_out[:MAX_LEFT_OUT]


class _Tags:
    def __init__(self, rules: Rules, options: SchemaOptions) -> None:
        self.left_out: list[str] = []
        self._rules = rules
        self._options = options
        self._depth = 0
        self._count = 0

    def read(self, value: object, place: RequestPath) -> str:
        fields = _object(value, place)
        kind = fields.get("type", "tag" if "begin" in fields else None)
        if not isinstance(kind, str) or kind not in _FORMATS:
            (place / "type").refuse(kind, f"one of {', '.join(_FORMATS)}")
        keys, method = _FORMATS[kind]
        _check_keys(fields, place, ("type", *keys))
        self._depth += 1
        self._count += 1
        place.check_at_most(self._depth, MAX_DEPTH, "nested formats")
        place.check_at_most(self._count, MAX_FORMATS, "formats")
        body = method(self, fields, place)
        self._depth -= 1
        return body

    def read_former(self, value: dict[str, Any], place: RequestPath) -> str:
        tags = []
        for index, item in enumerate(_list(value, "structures", place)):
            at = place / "structures" / index
            structure = _object(item, at)
            _check_keys(structure, at, ("begin", "schema", "end"))
            content = {"type": "json_schema", "json_schema": structure.get("schema", True)}
            tags.append({"begin": structure.get("begin"), "content": content, "end": structure.get("end")})
        return self._triggered({"tags": tags, "triggers": value.get("triggers")}, place)

    # --- formats ------------------------------------------------------------------------------------------------------

    def _const_string(self, fields: dict[str, Any], place: RequestPath) -> str:
        return self._rules.marker(_text(fields, "value", place))

    def _json_schema(self, fields: dict[str, Any], place: RequestPath) -> str:
        if fields.get("style", "json") != "json":
            (place / "style").refuse(fields["style"], "'json'")
        at = place / "json_schema"
        schema = parse_schema(fields.get("json_schema"), at)
        options = self._options.strict() if _flag(fields, "strict", place) else self._options
        enforced, left_out = enforceable(schema, at, options)
        self.left_out += left_out
        return self._rules.schema(enforced)

    def _regex(self, fields: dict[str, Any], place: RequestPath) -> str:
        if _is_embedded(fields):
            return self._embedded(fields, "", place)
        at = place / "pattern"
        return self._rules.terminal(f"/{regular_expressions.whole(_text(fields, 'pattern', place), at)}/")

    def _grammar(self, fields: dict[str, Any], place: RequestPath) -> str:
        if _is_embedded(fields):
            return self._embedded(fields, "", place)
        if (syntax := fields.get("syntax", "ebnf")) != "ebnf":
            (place / "syntax").refuse(syntax, "'ebnf' or 'lark'")
        if (name := next((name for name in ("style", *_EXCLUDED) if name in fields), None)) is not None:
            (place / name).wrong("is allowed only with the syntax 'lark'")
        text, at = _text(fields, "grammar", place), place / "grammar"
        at.check_at_most(len(text), MAX_GRAMMAR_CHARS, "characters of a grammar")
        if is_lark(text):
            at.wrong("expected a grammar in EBNF, whose first rule is 'root ::= …'")
        return ebnf(text, at, self._rules)

    def _embedded(self, fields: dict[str, Any], end: str, place: RequestPath) -> str:
        """A text embedded in its surroundings, with its end."""
        style, excluded = fields.get("style", "text"), _excluded(fields, place)
        if style not in ("text", "json_string"):
            (place / "style").refuse(style, "'text' or 'json_string'")
        around = as_text(end, excluded) if style == "text" else IN_JSON_STRING
        if style == "json_string" and excluded:
            why = "because a JSON string ends at its quote"
            (place / _EXCLUDED[0]).wrong(f"is allowed only with the style 'text', {why}")
        if fields["type"] == "regex":
            body = embedded_regex(_text(fields, "pattern", place), place / "pattern", self._rules, around)
        else:
            body = embedded_lark(_text(fields, "grammar", place), place / "grammar", self._rules, around)
        return body if around.end or not end else f"{body} {self._rules.marker(end)}"

    def _any_text(self, fields: dict[str, Any], place: RequestPath) -> str:
        excluded = _excluded(fields, place)
        return self._rules.terminal(without(excluded)) if excluded else TEXT

    def _sequence(self, fields: dict[str, Any], place: RequestPath) -> str:
        elements = _list(fields, "elements", place, MAX_FORMATS)
        bodies = [self.read(item, place / "elements" / index) for index, item in enumerate(elements)]
        return f"({' '.join(bodies) or NOTHING})"

    def _or(self, fields: dict[str, Any], place: RequestPath) -> str:
        elements = _list(fields, "elements", place, MAX_FORMATS)
        if not elements:
            (place / "elements").refuse(elements, "a non-empty list")
        return f"({' | '.join(self.read(item, place / 'elements' / i) for i, item in enumerate(elements))})"

    def _repeated(self, fields: dict[str, Any], place: RequestPath) -> str:
        return f"({self.read(fields.get('content'), place / 'content')}){_REPETITIONS[fields['type']]}"

    def _tag(self, fields: dict[str, Any], place: RequestPath) -> str:
        begin = _text(fields, "begin", place)
        return f"({self._rules.marker(begin)} {self._content_and_end(fields, place)})"

    def _content_and_end(self, fields: dict[str, Any], place: RequestPath) -> str:
        ends = fields.get("end")
        ends = ends if isinstance(ends, list) else [ends]
        (place / "end").check_at_most(len(ends), MAX_ENDS, "ends")
        if not ends or not all(isinstance(end, str) for end in ends):
            (place / "end").refuse(fields.get("end"), "a string, or a list of them")
        _check_lengths(ends, place / "end")
        content = fields.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            return self._text_and_end(content, ends, place / "content")
        if isinstance(content, dict) and _is_embedded(content) and len(ends) == 1 and ends[0]:
            _check_keys(content, place / "content", ("type", *_FORMATS[content["type"]][0]))
            return self._embedded(content, ends[0], place / "content")
        body = self.read(content, place / "content")
        return f"{body} ({' | '.join(self._rules.marker(end) for end in ends)})"

    def _text_and_end(self, content: dict[str, Any], ends: list[str], place: RequestPath) -> str:
        _check_keys(content, place, ("type", *_EXCLUDED))
        excluded = _excluded(content, place)
        if len(ends) > 1:
            others = {end: tuple(other for other in ends if other != end) for end in ends}
            return f"({' | '.join(self._rules.text_until(end, (*excluded, *others[end])) for end in ends)})"
        return self._rules.text_until(ends[0], excluded)

    def _triggered(self, fields: dict[str, Any], place: RequestPath) -> str:
        by_trigger = self._by_trigger(fields, place)
        at_least_one, stops = _flag(fields, "at_least_one", place), _flag(fields, "stop_after_first", place)
        excluded = _excluded(fields, place)
        parts = [
            f"{self._rules.text_until(trigger, excluded)} {remainder}" for trigger, remainder in by_trigger.items()
        ]
        part = self._rules.rule(" | ".join(parts))
        first = [f"{self._rules.marker(trigger)} {remainder}" for trigger, remainder in by_trigger.items()]
        head = self._rules.rule(" | ".join(first)) if at_least_one else ""
        tail = self._rules.rule(self._rules.terminal(without(excluded)) if excluded else TEXT)
        if stops:
            return head or f"({part} | {tail})"
        return f"({head} {part}* {tail})"

    def _by_trigger(self, fields: dict[str, Any], place: RequestPath) -> dict[str, str]:
        """By trigger: the rule for what must follow it."""
        triggers = _list(fields, "triggers", place)
        if not triggers or not all(isinstance(trigger, str) and trigger for trigger in triggers):
            (place / "triggers").refuse(triggers, "a non-empty list of non-empty strings")
        _check_lengths(triggers, place / "triggers")
        remainders: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for index, item in enumerate(_list(fields, "tags", place, MAX_FORMATS)):
            at = place / "tags" / index
            tag = _object(item, at)
            _check_keys(tag, at, ("type", "begin", "content", "end"))
            begin = _text(tag, "begin", at)
            matching = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(matching) != 1:
                (at / "begin").refuse(begin, f"text that begins with exactly one of the triggers, not {len(matching)}")
            self._count += 1
            at.check_at_most(self._count, MAX_FORMATS, "formats")
            rest = begin[len(matching[0]) :]
            marker = self._rules.marker(rest) if rest else ""
            remainders[matching[0]].append(f"{marker} {self._content_and_end(tag, at)}")
        for index, trigger in enumerate(triggers):
            if not remainders[trigger]:
                (place / "triggers" / index).refuse(trigger, "the beginning of one of the tags")
        return {trigger: self._rules.rule(" | ".join(bodies)) for trigger, bodies in remainders.items()}

    def _separated(self, fields: dict[str, Any], place: RequestPath) -> str:
        tags = _list(fields, "tags", place, MAX_FORMATS)
        if not tags:
            (place / "tags").refuse(tags, "a non-empty list")
        one = self._rules.rule(" | ".join(self.read(tag, place / "tags" / index) for index, tag in enumerate(tags)))
        separator = fields.get("separator", "")
        if not isinstance(separator, str):
            (place / "separator").refuse(separator, "a string")
        more = f"({self._rules.marker(separator) if separator else ''} {one})*"
        several = one if _flag(fields, "stop_after_first", place) else f"{one} {more}"
        return f"({several})" if _flag(fields, "at_least_one", place) else f"({several})?"


def _is_embedded(fields: dict[str, Any]) -> bool:
    """Additions of this backend: grammars in Lark's notation, regular expressions combined with excluded texts, and
    both as the content of a JSON string."""
    kind, is_styled = fields.get("type"), "style" in fields or any(name in fields for name in _EXCLUDED)
    return (kind == "grammar" and fields.get("syntax") == "lark") or (kind == "regex" and is_styled)


_EXCLUDED = ("excludes", "excluded_strs", "excluded_str")
_REPETITIONS = {"optional": "?", "star": "*", "plus": "+"}
_FORMATS: dict[str, tuple[tuple[str, ...], Callable[[_Tags, dict[str, Any], RequestPath], str]]] = {
    "const_string": (("value",), _Tags._const_string),
    "json_schema": (("json_schema", "style", "strict"), _Tags._json_schema),
    "regex": (("pattern", "style", *_EXCLUDED), _Tags._regex),
    "grammar": (("grammar", "syntax", "style", *_EXCLUDED), _Tags._grammar),
    "any_text": (_EXCLUDED, _Tags._any_text),
    "sequence": (("elements",), _Tags._sequence),
    "or": (("elements",), _Tags._or),
    **dict.fromkeys(_REPETITIONS, (("content",), _Tags._repeated)),
    "tag": (("begin", "content", "end"), _Tags._tag),
    "triggered_tags": (("triggers", "tags", "at_least_one", "stop_after_first", *_EXCLUDED), _Tags._triggered),
    "tags_with_separator": (("tags", "separator", "at_least_one", "stop_after_first"), _Tags._separated),
}


def _check_keys(fields: dict[str, Any], place: RequestPath, known: tuple[str, ...]) -> None:
    for name in fields:
        if name not in known:
            (place / name).wrong(f"is not known, expected one of: {', '.join(known)}")


def _object(value: object, place: RequestPath) -> dict[str, Any]:
    if not isinstance(value, dict):
        place.refuse(value, "an object")
    return value


def _list(fields: dict[str, Any], name: str, place: RequestPath, most: int = MAX_TAGS) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        (place / name).refuse(value, "a list")
    (place / name).check_at_most(len(value), most, "elements")
    return value


def _text(fields: dict[str, Any], name: str, place: RequestPath) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        (place / name).refuse(value, "a string")
    return value


def _flag(fields: dict[str, Any], name: str, place: RequestPath) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        (place / name).refuse(value, "true or false")
    return value


def _excluded(fields: dict[str, Any], place: RequestPath) -> tuple[str, ...]:
    name = next((name for name in _EXCLUDED if name in fields), "")
    texts = _list(fields, name, place) if name else []
    if not all(isinstance(text, str) and text for text in texts):
        (place / name).refuse(texts, "a list of non-empty strings")
    _check_lengths(texts, place / name)
    (place / name).check_at_most(sum(map(len, texts)), MAX_EXCLUDED_CHARS, "characters in all")
    return tuple(texts)


def _check_lengths(texts: list[str], place: RequestPath) -> None:
    place.check_at_most(max(map(len, texts), default=0), MAX_MARKER_CHARS, "characters in one text")
