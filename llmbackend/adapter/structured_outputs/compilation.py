"""Builds the engine's grammar for a constraint, and checks it with the engine's compiler.

Used by request_conversion.py. Independent of requests and the engine. Invariants: a returned grammar compiles; equal
constraints give equal grammars; recent grammars are cached. Whether output can follow a grammar is only tested with the
beginnings of a few random texts. So a later dead end is not found, and neither is a mask that exceeds the limits only
with the model's vocabulary.
"""

from __future__ import annotations

import functools
import json
import random
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from . import regular_expressions
from .constraint import CHECK_LIMITS, MAX_CHOICE_CHARS, MAX_CHOICES, PROBE_MASKS, PROBES, Constraint, RequestPath
from .embedded_grammars import ebnf
from .json_schema import enforceable, parse_schema
from .lark import Rules, is_lark, lark_grammar, literal
from .schema_keywords import SchemaOptions
from .structural_tags import structural_tag

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_ESCAPES: Final = 'nrbtf\\"'
"""JSON escapes that may be generated. Without \\u, each string (and so each property name) has only one spelling."""
DEFAULT_WHITESPACE: Final = r"\x20|\n\x20{0,40}"
"""Between two parts of JSON: one space, or a line break and an indentation. If more whitespace is allowed, a weak model
may write nothing else."""
_WHITESPACE_ONLY = re.compile(r"(?:[ \n\r\t]|\\[nrts]|\\x20|\\u0020|[\[\](){}?*+|,0-9])*")
_CACHED_GRAMMARS_CHARS = 8 << 20
_MAX_ERROR_CHARS = 300
_MAX_PATHS = 4
_ONE_OF: Final = "oneOf constraints are not supported"
"""The compiler's error for alternatives that it cannot prove mutually exclusive."""
_REFUSED_KEYWORDS: Final = (
    (_ONE_OF, ("oneOf",)),
    ("are not disjoint", ("patternProperties",)),
    ("min/maxProperties only supported", ("minProperties", "maxProperties")),
    ("NoExtensionBias", ("pattern",)),
)
"""Substrings of the compiler's errors, and the keywords that cause them."""
_QUOTED_LINES = re.compile(r" \d+ \| ")
_NUM_BYTES: Final = 256
_CLOSING: Final = frozenset(b'"}],:>)\n')
"""Bytes that are chosen often, so that a random text gets out of its first string."""


@dataclass(frozen=True, slots=True)
class Grammar:
    text: str
    """In the engine's notation; "" = any text."""
    not_enforced: tuple[str, ...] = ()
    """Paths of schema keywords that the grammar does not enforce."""


NO_GRAMMAR: Final = Grammar("")


class GrammarCompiler:
    """For one model. Thread-safe; the lock guards the cached grammars."""

    def __init__(self, special_text: Callable[[int], str | None], vocab_size: int) -> None:
        """special_text: the text of a special token, None for any other token; structural tags may name them"""
        self._special_text = special_text
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._kept_chars = 0
        self._tokenizer: LLTokenizer | None = None

    def grammar(self, constraint: Constraint) -> Grammar:
        """Raises TritonError INVALID_ARG that names the parameter and the path within it."""
        try:
            key = _key(constraint)
            with self._lock:
                if key in self._grammars:
                    self._grammars.move_to_end(key)
                    return self._grammars[key]
            grammar = self._compiled(constraint)
        except RecursionError:
            constraint.place.wrong("it is nested too deeply")
        self._keep(key, grammar)
        return grammar

    def _compiled(self, constraint: Constraint) -> Grammar:
        """Keywords that the compiler refuses are left out, unless the request is strict."""
        not_compiled: frozenset[str] = frozenset()
        while True:
            grammar = _translated(constraint, self.special_tokens, not_compiled)
            error = self._error(grammar)
            refused = _refused_keywords(error) - not_compiled
            if not error:
                return grammar
            if constraint.is_strict or not refused:
                _refuse(error, constraint)
            not_compiled |= refused

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """Id by text. Computed for the first constraint, because a vocabulary is large."""
        texts = ((self._special_text(token_id), token_id) for token_id in range(self._vocab_size))
        return {text: token_id for text, token_id in texts if text}

    def _keep(self, key: str, grammar: Grammar) -> None:
        with self._lock:
            if key not in self._grammars:
                self._grammars[key] = grammar
                self._kept_chars += len(key) + len(grammar.text)
            while self._kept_chars > _CACHED_GRAMMARS_CHARS:
                oldest, dropped = self._grammars.popitem(last=False)
                self._kept_chars -= len(oldest) + len(dropped.text)

    def _error(self, grammar: Grammar) -> str:
        """Why the grammar cannot be used; "" if it can."""
        matcher = self.matcher(grammar.text)
        return (matcher.get_error() or "") if matcher.is_error() else why_not_followed(matcher)

    def matcher(self, grammar: str) -> LLMatcher:
        """A byte-level matcher within CHECK_LIMITS. The compiler releases the GIL."""
        from llguidance import LLMatcher

        limits = CHECK_LIMITS.for_library()
        if self._tokenizer is None:
            self._tokenizer = _byte_tokenizer(max(self.special_tokens.values(), default=0))
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)


def _key(constraint: Constraint) -> str:
    value = json.dumps(constraint.value, ensure_ascii=True)
    options = (
        constraint.disable_any_whitespace,
        constraint.disable_additional_properties,
        constraint.is_strict,
        constraint.whitespace_pattern,
    )
    return f"{constraint.kind} {constraint.place} {options} {value}"


def _translated(constraint: Constraint, special_tokens: Mapping[str, int], not_compiled: frozenset[str]) -> Grammar:
    json_options = _json_options(constraint)
    schema_options = SchemaOptions(
        constraint.disable_additional_properties, is_strict=constraint.is_strict, not_compiled=not_compiled
    )
    value, place = constraint.value, constraint.place
    rules = Rules(special_tokens, json_options, place)
    left_out: list[str] = []
    match constraint.kind:
        case "json":
            schema, left_out = enforceable(parse_schema(value, place), place, schema_options)
            start = rules.schema(schema)
        case "regex":
            start = rules.terminal(f"/{regular_expressions.whole(value, place)}/")
        case "choice":
            start = rules.terminal(_choice(value, place))
        case "grammar" if is_lark(value):
            return Grammar(lark_grammar(value, place, json_options, schema_options))
        case "grammar":
            start = ebnf(value, place, rules)
        case _:
            start, left_out = structural_tag(value, place, rules, schema_options)
    return Grammar(rules.grammar(start), tuple(left_out))


def _choice(value: list[str], place: RequestPath) -> str:
    place.check_at_most(len(value), MAX_CHOICES, "choices")
    place.check_at_most(sum(map(len, value)), MAX_CHOICE_CHARS, "characters of choices in all")
    for index, item in enumerate(value):
        (place / index).check_encodable(item)
    return " | ".join(literal(item) for item in dict.fromkeys(value))


def _json_options(constraint: Constraint) -> dict[str, Any]:
    options: dict[str, Any] = {"json_allowed_escapes": _ESCAPES}
    if constraint.disable_any_whitespace:
        return options | {"whitespace_flexible": False}
    pattern = constraint.whitespace_pattern
    if not pattern:
        return options | {"whitespace_pattern": DEFAULT_WHITESPACE}
    place = RequestPath("whitespace_pattern")
    if not _WHITESPACE_ONLY.fullmatch(pattern):
        place.refuse(pattern, "a regular expression of spaces, tabs and line ends")
    spelled = pattern.replace("[\\s]", "[ \\t\\n\\r]").replace("\\s", "[ \\t\\n\\r]")
    return options | {"whitespace_pattern": regular_expressions.whole(spelled, place)}


def _refused_keywords(error: str) -> frozenset[str]:
    return frozenset(keyword for words, keywords in _REFUSED_KEYWORDS if words in error for keyword in keywords)


def _refuse(error: str, constraint: Constraint) -> NoReturn:
    """Raises TritonError with the compiler's error, without the grammar lines quoted in it."""
    place = constraint.place
    if _ONE_OF in error:
        paths = list(islice(_paths_of("oneOf", constraint.value, ""), _MAX_PATHS))
        at = RequestPath(place.param, place.path + paths[0]) if len(paths) == 1 else place
        where = f" (of {', '.join(paths)})" if len(paths) > 1 else ""
        at.wrong(f"alternatives of oneOf{where} may both match: 'oneOf' is enforced where they are mutually exclusive")
    text = " ".join(error.split()).removesuffix("<non-verbose/>").strip()
    text = _QUOTED_LINES.split(text)[0].rpartition("failed to compile JSON schema: ")[2]
    place.wrong(f"the grammar compiler rejects it: {text[:_MAX_ERROR_CHARS]}")


def _paths_of(keyword: str, value: object, path: str) -> Iterator[str]:
    """Paths of the keyword. The value is nested no deeper than its translation permits."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, member in members:
        at = f"{path}/{name}"
        if name == keyword:
            yield at
        yield from _paths_of(keyword, member, at)


def _byte_tokenizer(largest_id: int) -> LLTokenizer:
    """One token per byte, and ids up to the largest that a grammar may name."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes(max(largest_id, 256))))


class _Bytes:
    """A tokenizer in the form that llguidance reads."""

    eos_token_id = bos_token_id = 256
    special_token_ids = (256,)

    def __init__(self, largest_id: int) -> None:
        self.tokens = [*(bytes((byte,)) for byte in range(256)), b"\xff<eos>", *([b""] * (largest_id - 256))]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def why_not_followed(matcher: LLMatcher) -> str:
    """The library's error; "" if none was found. matcher: byte-level, at the start of a text"""
    for probe in range(PROBES):
        if error := _why_stuck(matcher.deep_copy(), random.Random(probe)):
            return error
    return ""


def _why_stuck(matcher: LLMatcher, rng: random.Random) -> str:
    for _ in range(PROBE_MASKS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return str(matcher.get_error())
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8)[: _NUM_BYTES // 8], bitorder="little"))
        if not allowed.size:
            return "" if matcher.is_accepting() or any(mask) else "no text can follow its beginning"
        matcher.consume_token(_next_byte(allowed.tolist(), rng))
        if forced := matcher.compute_ff_tokens():
            matcher.consume_tokens(forced)
        if matcher.is_error():
            return str(matcher.get_error())
    return ""


def _next_byte(allowed: list[int], rng: random.Random) -> int:
    closing = [byte for byte in allowed if byte in _CLOSING]
    return rng.choice(closing if closing and rng.random() < 0.5 else allowed)
