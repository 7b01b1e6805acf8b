"""Constraints for structured output, read from sampling parameters under vLLM's present and former names.

Used by schemas/sampling.py, and by compilation.py, which builds grammars from them. Independent of grammars and
tokenizers. Invariants: a constraint has exactly one kind; its value is not checked here, because that may take long.
Within the limits, a constraint takes well under a second on a conversion thread and delays no other request, because
the compiler releases the GIL.
Source: vLLM's StructuredOutputsParams, its former GuidedDecodingParams and guided_* fields.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

from llmbackend.core.backend_api import ErrorCode, TritonError, invalid_argument, shown
from llmbackend.engine.grammars.grammar_compiler import ENGINE_LIMITS, MAX_GRAMMAR_BYTES
from llmbackend.waiting.large_stacks import STACK_BYTES

MAX_DEPTH = 64
"""Nesting depth of schemas, tags, and groups in a regular expression."""
MAX_SCHEMA_NODES = 8192
"""Schemas and enumerated values, including their members, in one constraint."""
MAX_INLINED_NODES = 2048
"""Those of referenced alternatives of `oneOf`, as often as they are written, before further ones become `anyOf`."""
MAX_ADDED_ALTERNATIVES = 600
"""For lists without repetition: enough for five lists of five values, which compile in 0.2 s."""
MAX_LEFT_OUT = 64
"""How many keywords of a constraint are reported as not enforced."""
MAX_PROPERTIES = 480
"""Per object: the parser has four items for each, and at most 2000 at a time."""
MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 65536
"""All choices together."""
MAX_REGEX_CHARS = 8192
MAX_REGEX_LENGTH = 100_000
"""Characters of a regular expression with its repetitions expanded."""
MAX_JOINT_PATTERNS = 8
"""Regular expressions that must all match one value, and `&`s in one terminal: each doubles the compiler's time."""
MAX_MULTIPLE_OF = 10_000
"""Numerator and denominator of multipleOf: the compiler creates a state for each remainder."""
MAX_GRAMMAR_CHARS = 65536
MAX_STACK_KB = STACK_BYTES >> 11
"""Half of what a compiling thread has. The compiler calls itself for what is nested, also through references, without a
limit."""
SCHEMA_KB, DEFINITION_KB, GROUP_KB = 7, 4, 2
"""Stack for a schema, and for a definition and a group in a grammar (measured: up to 6.7, 3.3 and 1.9)."""
MAX_FORMATS = 4096
"""In a structural tag: enough for the calls of 128 functions with 512 tagged parameters."""
MAX_TAGS = 512
"""In one list of a structural tag: triggers, excluded texts."""
CHECK_LIMITS = dataclasses.replace(ENGINE_LIMITS, initial_lexer_fuel=500_000, max_grammar_size=100_000)
"""Limits of the compiler. None exceeds the engine's, so that everything accepted here compiles there."""
PROBES, PROBE_MASKS = 2, 32
"""Number of random texts per grammar, and tokens per text, that test whether output can follow it."""


class NotEnforcedError(TritonError):
    """A keyword of a valid schema that a grammar cannot enforce. Requests that are not strict are served without it.
    Exceeded limits are never reported this way."""


class RequestPath:
    """A request parameter, and a path within its value."""

    __slots__ = ("param", "path")

    def __init__(self, param: str, path: str = "") -> None:
        self.param = param
        self.path = path

    def __truediv__(self, part: str | int) -> RequestPath:
        """The path of a member, as a JSON pointer."""
        text = str(part)[:80].replace("~", "~0").replace("/", "~1")
        return RequestPath(self.param, f"{self.path}/{text}")

    def __str__(self) -> str:
        return f"'{self.param}'" + (f" at {self.path}" if self.path else "")

    def refuse(self, value: object, expected: str) -> NoReturn:
        """Raises TritonError INVALID_ARG with path, value and expectation."""
        raise invalid_argument(f"{self} is {shown(value)}, expected {expected}", param=self.param)

    def wrong(self, why: str) -> NoReturn:
        """Raises TritonError INVALID_ARG."""
        raise invalid_argument(f"{self}: {why}", param=self.param)

    def not_enforced(self, why: str) -> NoReturn:
        """Raises NotEnforcedError."""
        raise NotEnforcedError(f"{self}: {why}", ErrorCode.INVALID_ARG, self.param)

    def value_not_enforced(self, value: object, expected: str) -> NoReturn:
        """Raises NotEnforcedError with the same wording as `refuse`."""
        raise NotEnforcedError(f"{self} is {shown(value)}, expected {expected}", ErrorCode.INVALID_ARG, self.param)

    @property
    def pointer(self) -> str:
        """For example `structured_outputs#/json/not`."""
        return f"{self.param}#{self.path}"

    def check_at_most(self, count: int, limit: int, unit: str) -> None:
        if count > limit:
            self.wrong(f"{count} {unit}, expected at most {limit}")

    def check_size(self, num_chars: int) -> None:
        """Refuses a grammar that the engine would refuse."""
        self.check_at_most(num_chars, MAX_GRAMMAR_BYTES, "characters in the grammar compiled from it")

    def check_encodable(self, text: str) -> None:
        """Refuses half of a surrogate pair, which a JSON string may contain."""
        try:
            text.encode()
        except UnicodeEncodeError:
            self.refuse(text, "text without halves of surrogate pairs")


def check_stack(
    place: RequestPath, each_kb: Mapping[str, int], uses: Mapping[str, Iterable[str]], limit_kb: int = MAX_STACK_KB
) -> None:
    """Refuses definitions that may overflow the compiler's stack. All recursive ones count as a single chain.

    each_kb: by definition: the stack that it needs by itself
    uses: by definition: those that it uses
    """
    used = {name: {one for one in uses[name] if one in each_kb} for name in each_kb}
    below_kb = _acyclic_kb(each_kb, used)
    others = {name: used[name] - below_kb.keys() for name in each_kb if name not in below_kb}
    above_kb = _acyclic_kb(each_kb, _inverted(others))
    recursive_kb = sum(each_kb[name] for name in others if name not in above_kb)
    most_kb = max(below_kb.values(), default=0) + recursive_kb + max(above_kb.values(), default=0)
    place.check_at_most(most_kb, limit_kb, "KB of the compiler's stack for nested definitions")


def _acyclic_kb(each_kb: Mapping[str, int], used: Mapping[str, set[str]]) -> dict[str, int]:
    """The stack for each definition that reaches no recursive one, with those that it reaches."""
    users = _inverted(used)
    num_missing = {name: len(names) for name, names in used.items()}
    ready = [name for name, count in num_missing.items() if not count]
    found_kb: dict[str, int] = {}
    for name in ready:  # which grows
        found_kb[name] = each_kb[name] + max((found_kb[one] for one in used[name]), default=0)
        for user in users[name]:
            num_missing[user] -= 1
            if not num_missing[user]:
                ready.append(user)
    return found_kb


def _inverted(used: Mapping[str, set[str]]) -> dict[str, set[str]]:
    users: dict[str, set[str]] = {name: set() for name in used}
    for name, names in used.items():
        for one in names:
            users[one].add(name)
    return users


KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_FLAGS = ("disable_any_whitespace", "disable_additional_properties", "strict")
_BACKENDS = ("auto", "guidance")
"""vLLM's compiler names that mean the one used here."""
_FORMER_FIELDS: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
_OPTION_FIELDS = ("guided_whitespace_pattern", "guided_decoding_backend")
OBJECT_FIELDS: Final = ("structured_outputs", "guided_decoding")
FIELDS: Final = (*OBJECT_FIELDS, *_FORMER_FIELDS, *_OPTION_FIELDS)
"""The sampling parameters read by `read`."""


@dataclass(frozen=True, slots=True)
class Constraint:
    kind: str
    """One of KINDS except `json_object`, which is represented as a schema."""
    value: Any
    place: RequestPath
    disable_any_whitespace: bool = False
    """Whether JSON has no spaces and line breaks between its parts."""
    disable_additional_properties: bool = False
    is_strict: bool = False
    """Whether keywords that cannot be enforced are refused; otherwise they are left out."""
    whitespace_pattern: str = ""
    """A regular expression for whitespace in JSON; "" = the default."""


def read(parameters: Mapping[str, Any]) -> Constraint | None:
    """The constraint in sampling parameters; None if there is none. Raises TritonError INVALID_ARG."""
    given = [name for name in (*OBJECT_FIELDS, *_FORMER_FIELDS) if parameters.get(name) is not None]
    if len(given) > 1:
        raise invalid_argument(
            f"sampling parameters {' and '.join(repr(name) for name in given)} are mutually exclusive", param=given[1]
        )
    _check_backend(parameters.get("guided_decoding_backend"), RequestPath("guided_decoding_backend"))
    pattern = parameters.get("guided_whitespace_pattern")
    constraint = _read_field(given[0], parameters[given[0]]) if given else None
    if pattern is None or constraint is None:
        if pattern is not None:
            RequestPath("guided_whitespace_pattern").refuse(pattern, "it only together with a constraint")
        return constraint
    return replace(constraint, whitespace_pattern=_text(pattern, RequestPath("guided_whitespace_pattern")))


def of_kind(kind: str, value: object, place: RequestPath) -> Constraint:
    """A constraint of one of KINDS. Raises TritonError INVALID_ARG for a value of the wrong type."""
    return Constraint("json" if kind == "json_object" else kind, _CHECKS[kind](value, place), place)


def _read_field(name: str, value: object) -> Constraint | None:
    if isinstance(value, Constraint):  # from a schema with tensors for constraints
        return value
    place = RequestPath(name)
    if name in _FORMER_FIELDS:
        return of_kind(_FORMER_FIELDS[name], value, place)
    return _read_object(_object(value, place), place)


def _object(value: object, place: RequestPath) -> dict[str, Any]:
    """Request parameters are scalars, so objects are passed as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            place.wrong(f"is not JSON: {error}")
    if not isinstance(value, dict):
        place.refuse(value, "an object")
    return value


def _read_object(fields: dict[str, Any], place: RequestPath) -> Constraint | None:
    known = (*KINDS, *_FLAGS, "whitespace_pattern", "disable_fallback", "backend", "_backend")
    for name in fields:
        if name not in known:
            (place / name).wrong(f"is not known, expected one of: {', '.join(known[:-1])}")
    _check_backend(fields.get("backend") or fields.get("_backend"), place / "backend")
    kinds = [name for name in KINDS if fields.get(name) is not None and fields[name] is not False]
    if not kinds and fields.get("json_object") is False:
        return None
    if len(kinds) != 1:
        place.wrong(f"asks for {' and '.join(kinds) or 'nothing'}, expected exactly one of: {', '.join(KINDS)}")
    kind = kinds[0]
    flags: dict[str, Any] = {name: _flag(fields.get(name), place / name) for name in _FLAGS}
    is_strict = flags.pop("strict")
    _flag(fields.get("disable_fallback"), place / "disable_fallback")  # there is no other compiler to fall back to
    pattern = fields.get("whitespace_pattern")
    return replace(
        of_kind(kind, fields[kind], place / kind),
        is_strict=is_strict,
        whitespace_pattern="" if pattern is None else _text(pattern, place / "whitespace_pattern"),
        **flags,
    )


def _text(value: object, place: RequestPath) -> str:
    if not isinstance(value, str) or not value:
        place.refuse(value, "a non-empty string")
    place.check_at_most(len(value), MAX_GRAMMAR_CHARS, "characters")
    place.check_encodable(value)
    return value


def _flag(value: object, place: RequestPath) -> bool:
    if value is not None and not isinstance(value, bool):
        place.refuse(value, "true or false")
    return bool(value)


def _json(value: object, place: RequestPath) -> object:
    if not isinstance(value, dict | str | bool):
        place.refuse(value, "a JSON schema: an object, or its JSON text")
    return value


def _json_object(value: object, place: RequestPath) -> object:
    if value is not True:
        place.refuse(value, "true or false")
    return {"type": "object"}


def from_json_text(value: object, place: RequestPath, expected: str) -> object:
    """Parses JSON text, in which lists are passed if parameters must be scalars; returns any other value unchanged.
    Raises TritonError INVALID_ARG."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        place.refuse(value, expected)


def _choice(value: object, place: RequestPath) -> object:
    value = from_json_text(value, place, "a list of strings")
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        place.refuse(value, "a non-empty list of strings")
    return value


def _check_backend(value: object, place: RequestPath) -> None:
    if value is not None and value not in _BACKENDS:
        place.refuse(value, f"one of {', '.join(_BACKENDS)}: llguidance is the only compiler")


_CHECKS: dict[str, Callable[[Any, RequestPath], object]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _text,
    "choice": _choice,
    "grammar": _text,
    "structural_tag": _object,
}
