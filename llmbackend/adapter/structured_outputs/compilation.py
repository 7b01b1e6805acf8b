"""From a constraint to the grammar that the engine enforces, checked by the same compiler.

For: request_conversion.py. Does not know: requests, the engine. Invariants: a grammar that is returned compiles; the
same constraint gives the same grammar; the last ones are kept, so that a client's next request costs a look-up.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NoReturn

from . import regular_expressions
from .bounds import CHECK_LIMITS, MAX_CHOICE_CHARS, MAX_CHOICES, Place
from .constraint import Constraint
from .ebnf import ebnf
from .followability import why_not_followed
from .json_schema import SchemaOptions, enforceable, parse_schema
from .lark import Rules, literal
from .lark_grammar import is_lark, lark_grammar
from .structural_tags import structural_tag

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_ESCAPES: Final = 'nrbtf\\"'
"""Those of JSON that are generated: without \\u a string has one spelling, so that a property's name has one, too."""
DEFAULT_WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,64}"
"""Bounded, so that a model that likes line ends comes to an end."""
_WHITESPACE_ONLY = re.compile(r"(?:[ \n\r\t]|\\[nrts]|\\x20|\\u0020|[\[\](){}?*+|,0-9])*")
_CACHED_GRAMMARS_CHARS = 8 << 20
_MAX_ERROR_CHARS = 300
_MAX_PATHS = 4
_QUOTED_LINES = re.compile(r" \d+ \| ")


class GrammarCompiler:
    """Of one model. Any thread uses it; the lock guards the grammars that are kept."""

    def __init__(self, special_text: Callable[[int], str | None], vocab_size: int) -> None:
        """special_text: the text of a special token, None for any other; structural tags may name special tokens"""
        self._special_text = special_text
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._grammars: OrderedDict[str, str] = OrderedDict()
        self._kept_chars = 0
        self._tokenizer: LLTokenizer | None = None

    def grammar(self, constraint: Constraint) -> str:
        """In the engine's form. Raises TritonError INVALID_ARG naming the parameter and, inside it, the path."""
        key = _key(constraint)
        with self._lock:
            if key in self._grammars:
                self._grammars.move_to_end(key)
                return self._grammars[key]
        grammar = _translated(constraint, self.special_tokens)
        self._check(grammar, constraint)
        self._keep(key, grammar)
        return grammar

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """Id by text; read with the first constraint, since a vocabulary is large."""
        texts = ((self._special_text(token_id), token_id) for token_id in range(self._vocab_size))
        return {text: token_id for text, token_id in texts if text}

    def _keep(self, key: str, grammar: str) -> None:
        with self._lock:
            if key not in self._grammars:
                self._grammars[key] = grammar
                self._kept_chars += len(key) + len(grammar)
            while self._kept_chars > _CACHED_GRAMMARS_CHARS:
                oldest, dropped = self._grammars.popitem(last=False)
                self._kept_chars -= len(oldest) + len(dropped)

    def _check(self, grammar: str, constraint: Constraint) -> None:
        matcher = self.matcher(grammar)
        error = matcher.get_error() if matcher.is_error() else why_not_followed(matcher)
        if error:
            _refuse(error, constraint)

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher of bytes within the bounds; the compiler works without the GIL."""
        from llguidance import LLMatcher

        limits = CHECK_LIMITS.for_library()
        if self._tokenizer is None:
            self._tokenizer = _byte_tokenizer(max(self.special_tokens.values(), default=0))
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)


def _key(constraint: Constraint) -> str:
    value = json.dumps(constraint.value, ensure_ascii=True)
    options = constraint.disable_any_whitespace, constraint.disable_additional_properties, constraint.whitespace_pattern
    return f"{constraint.kind} {constraint.place} {options} {value}"


def _translated(constraint: Constraint, special_tokens: Mapping[str, int]) -> str:
    json_options = _json_options(constraint)
    schema_options = SchemaOptions(constraint.disable_additional_properties)
    rules = Rules(special_tokens, json_options)
    value, place = constraint.value, constraint.place
    match constraint.kind:
        case "json":
            return rules.grammar(rules.schema(enforceable(parse_schema(value, place), place, schema_options)))
        case "regex":
            return rules.grammar(rules.terminal(f"/{regular_expressions.whole(value, place)}/"))
        case "choice":
            return rules.grammar(rules.terminal(_choice(value, place)))
        case "grammar" if is_lark(value):
            return lark_grammar(value, place, json_options, schema_options)
        case "grammar":
            return rules.grammar(ebnf(value, place, rules))
        case _:
            read = partial(_embedded_grammar, json_options=json_options, options=schema_options)
            return rules.grammar(structural_tag(value, place, rules, schema_options, read))


def _embedded_grammar(
    text: str, place: Place, rules: Rules, *, json_options: Mapping[str, Any], options: SchemaOptions
) -> str:
    if is_lark(text):
        place.wrong("expected a grammar in EBNF, whose first rule is 'root ::= …'")
    return ebnf(text, place, rules)


def _choice(value: list[str], place: Place) -> str:
    place.check_at_most(len(value), MAX_CHOICES, "choices")
    place.check_at_most(sum(map(len, value)), MAX_CHOICE_CHARS, "characters of choices in all")
    for index, item in enumerate(value):
        if any("\ud800" <= character < "\ue000" for character in item):
            (place / index).refuse(item, "text without halves of surrogate pairs")
    return " | ".join(literal(item) for item in dict.fromkeys(value))


def _json_options(constraint: Constraint) -> dict[str, Any]:
    options: dict[str, Any] = {"json_allowed_escapes": _ESCAPES}
    if constraint.disable_any_whitespace:
        return options | {"whitespace_flexible": False}
    pattern = constraint.whitespace_pattern
    if not pattern:
        return options | {"whitespace_pattern": DEFAULT_WHITESPACE}
    place = Place("whitespace_pattern")
    if not _WHITESPACE_ONLY.fullmatch(pattern):
        place.refuse(pattern, "a regular expression of spaces, tabs and line ends")
    spelled = pattern.replace("[\\s]", "[ \\t\\n\\r]").replace("\\s", "[ \\t\\n\\r]")
    return options | {"whitespace_pattern": regular_expressions.whole(spelled, place)}


def _refuse(error: str, constraint: Constraint) -> NoReturn:
    """Without the lines of the grammar that the compiler quotes."""
    place = constraint.place
    if "oneOf constraints are not supported" in error:
        paths = list(islice(_paths_of("oneOf", constraint.value, ""), _MAX_PATHS))
        at = Place(place.param, place.path + paths[0]) if len(paths) == 1 else place
        where = "" if len(paths) == 1 else f" (of {', '.join(paths)})"
        at.wrong(f"alternatives of oneOf{where} may both match: 'oneOf' is enforced where they exclude each other")
    text = " ".join(error.split()).removesuffix("<non-verbose/>").strip()
    text = _QUOTED_LINES.split(text)[0].rpartition("failed to compile JSON schema: ")[2]
    place.wrong(f"the grammar compiler refuses it: {text[:_MAX_ERROR_CHARS]}")


def _paths_of(keyword: str, value: object, path: str) -> Iterator[str]:
    """Where the keyword stands; the value is no deeper than its translation allowed."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, member in members:
        at = f"{path}/{name}"
        if name == keyword:
            yield at
        yield from _paths_of(keyword, member, at)


def _byte_tokenizer(largest_id: int) -> LLTokenizer:
    """For checking: a token for each byte, and ids up to the largest that a grammar may name."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes(max(largest_id, 256))))


class _Bytes:
    """As llguidance asks for a tokenizer."""

    eos_token_id = bos_token_id = 256
    special_token_ids = (256,)

    def __init__(self, largest_id: int) -> None:
        self.tokens = [*(bytes((byte,)) for byte in range(256)), b"\xff<eos>", *([b""] * (largest_id - 256))]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
