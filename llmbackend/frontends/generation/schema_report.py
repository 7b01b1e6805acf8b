"""Which keywords of a request's schemas are not enforced, and whether the finished answer satisfies the schemas anyway.

Reported in headers and one log line. Invariants: locations are named in the client's fields; if everything is enforced,
nothing is retained or validated; nothing is fetched; a validation that takes too long has no verdict.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final
from urllib.parse import quote

import orjson

from ..http.errors import JsonObject
from .answer import Answer
from .plan import AnswerPlan
from .request import STRUCTURED_OUTPUTS, GenerationRequest
from .tensors import Delta

MAX_CPU_S: Final = 1.0
"""CPU time of the validating thread for one answer; 2,000 tokens take 0.05 s."""
MAX_PATTERN_CHARS: Final = 8192
MAX_PATTERNS_S: Final = 0.5
"""Limit for all patterns of one answer. They are matched without the GIL."""
_UNBOUNDED: Final = ("patternProperties", "dependentSchemas")
"""Keywords that jsonschema's `unevaluatedProperties` follows without bounding the work."""
_DRAFTS: Final = ("Draft3", "Draft4", "Draft6", "Draft7", "Draft201909", "Draft202012")


class NotJudgedError(Exception):
    """Whether a text satisfies a schema is unknown; the argument is the reason."""


class Budget:
    """The time left to validate one answer. Created in the thread that validates."""

    def __init__(self) -> None:
        self._end_s = time.thread_time() + MAX_CPU_S
        self._patterns_s = MAX_PATTERNS_S

    def step(self) -> None:
        if time.thread_time() > self._end_s:
            raise NotJudgedError(f"it takes more than {MAX_CPU_S} s")

    def matches(self, pattern: str, text: str) -> bool:
        import regex

        if len(pattern) > MAX_PATTERN_CHARS:
            raise NotJudgedError(f"a pattern has more than {MAX_PATTERN_CHARS} characters")
        start_s = time.monotonic()
        try:
            found = regex.search(pattern, text, timeout=max(self._patterns_s, 0.001), concurrent=True)
        except TimeoutError:
            raise NotJudgedError(f"its patterns take more than {MAX_PATTERNS_S} s") from None
        except regex.error as error:
            raise NotJudgedError(f"a pattern cannot be read: {error}") from None
        self._patterns_s -= time.monotonic() - start_s
        return found is not None


_BUDGET: ContextVar[Budget] = ContextVar("budget")


def violation(schema: Mapping[str, Any] | bool, text: str, budget: Budget | None = None) -> str:
    """Where `text` violates `schema`, without quoting values of the text; "" if it does not. Raises NotJudgedError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "is not JSON"
    token = _BUDGET.set(budget or Budget())
    try:
        return _violation(schema, value)
    except NotJudgedError:
        raise
    except Exception as error:  # a keyword's value or a reference that jsonschema cannot handle
        raise NotJudgedError(f"the schema cannot be read: {type(error).__name__}") from None
    finally:
        _BUDGET.reset(token)


def _violation(schema: Mapping[str, Any] | bool, value: Any) -> str:
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    _check_bounded(schema)
    drafts = _bounded_drafts()
    named = validator_for(schema) if isinstance(schema, Mapping) else None
    draft = drafts.get(getattr(named, "__name__", "")) or drafts["Draft202012Validator"]
    validator = draft(schema, registry=REGISTRY, format_checker=draft.FORMAT_CHECKER)
    error = next(validator.iter_errors(value), None)
    return "" if error is None else f"{error.json_path} does not satisfy '{error.validator or False}'"


def _check_bounded(schema: Mapping[str, Any] | bool) -> None:
    """Raises NotJudgedError."""
    text = json.dumps(schema)
    found = next((name for name in _UNBOUNDED if f'"{name}":' in text), "")
    if found and '"unevaluatedProperties":' in text:
        raise NotJudgedError(f"'unevaluatedProperties' is not judged in a schema with '{found}'")


@functools.cache
def _bounded_drafts() -> dict[str, Any]:
    """Validators whose keywords check the time. Created on first use: the import takes 0.1 s."""
    import jsonschema
    from jsonschema.validators import extend

    drafts = [getattr(jsonschema, f"{name}Validator") for name in _DRAFTS]
    own = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "uniqueItems": _unique_items,
    }
    return {
        draft.__name__: extend(
            draft, {name: _bounded(own.get(name, check)) for name, check in draft.VALIDATORS.items()}
        )
        for draft in drafts
    }


_Check = Callable[[Any, Any, Any, Any], Any]


def _bounded(check: _Check) -> _Check:
    def bounded(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        _BUDGET.get().step()
        yield from check(validator, value, instance, schema) or ()

    return bounded


def _error(message: str) -> Any:
    from jsonschema import ValidationError

    return ValidationError(message)


def _pattern(validator: Any, pattern: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "string") and not _BUDGET.get().matches(pattern, instance):
        yield _error("no match")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, subschema in patterns.items():
        for name, value in instance.items():
            if _BUDGET.get().matches(pattern, name):
                yield from validator.descend(value, subschema, path=name, schema_path=pattern)


def _additional_properties(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    patterns, listed = schema.get("patternProperties", {}), schema.get("properties", {})
    for name, value in instance.items():
        if name in listed or any(_BUDGET.get().matches(pattern, name) for pattern in patterns):
            continue
        if wanted is False:
            yield _error("is not allowed")
        else:
            yield from validator.descend(value, wanted, path=name)


def _unique_items(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """Replaces jsonschema's own check, which compares all pairs of items."""
    if wanted is True and validator.is_type(instance, "array"):
        seen: set[str] = set()
        for item in instance:
            key = json.dumps(_comparable(item), sort_keys=True)
            if key in seen:
                yield _error("two items are equal")
            seen.add(key)


def _comparable(value: Any) -> Any:
    """The value with a canonical form of each number."""
    if isinstance(value, dict):
        return {name: _comparable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


log = logging.getLogger(__name__)
NOT_ENFORCED: Final = "x-schema-not-enforced"
"""Locations of keywords: `tools[0].function.parameters#/properties/tags/uniqueItems, …`."""
VALID: Final = "x-schema-valid"
"""`true`, `false`, or `unknown`."""
_MAX_HEADER_CHARS: Final = 2048
_MORE: Final = ", ..."


class SchemaReport:
    """The report for one request. Used on the event loop, except `judge`."""

    def __init__(self, request: GenerationRequest, plan: AnswerPlan) -> None:
        self._request = request
        self._plan = plan
        self._places: dict[str, None] = dict.fromkeys(plan.not_enforced)
        self._deltas: dict[int, list[Delta]] = {}
        """The deltas of each choice, if the answer will be validated."""

    @property
    def is_needed(self) -> bool:
        return bool(self._places)

    def add(self, choice: int, delta: Delta) -> None:
        for place in delta.not_enforced:
            self._places.setdefault(self._client_path(place))
        if self._places:
            self._deltas.setdefault(choice, []).append(delta)

    def headers(self) -> dict[str, str]:
        """Headers to send before the answer."""
        if not self._places:
            return {}
        value = ", ".join(quote(place, safe="/#[].$~") for place in self._places)
        if len(value) > _MAX_HEADER_CHARS:
            value = value[:_MAX_HEADER_CHARS].rpartition(", ")[0] + _MORE
        return {NOT_ENFORCED: value}

    def judge(self, response_id: str) -> dict[str, str]:
        """Validates the whole answer, logs the verdict, and returns the headers that include it. To be called in a
        thread: the work grows with the answer."""
        budget = Budget()
        faults: list[str] = []
        unknown: list[str] = []
        for choice, deltas in sorted(self._deltas.items()):
            try:
                faults += [f"choice {choice}: {fault}" for fault in self._faults(response_id, choice, deltas, budget)]
            except NotJudgedError as error:
                unknown.append(f"choice {choice}: {error}")
        verdict = "false" if faults else "unknown" if unknown or not self._deltas else "true"
        result = {
            "true": "the answer satisfies its schema",
            "false": "; ".join(faults[:4]),
            "unknown": f"not judged: {'; '.join(unknown[:4])}",
        }
        level = logging.WARNING if faults else logging.INFO
        places = ", ".join(list(self._places)[:8])
        log.log(level, "%s: not enforced: %s; %s", response_id, places, result[verdict])
        return self.headers() | {VALID: verdict}

    def _faults(self, response_id: str, choice: int, deltas: Sequence[Delta], budget: Budget) -> Iterator[str]:
        if deltas[-1].finish_reason == "length":
            yield "was cut off at the token limit"
            return
        message = self._message(response_id, choice, deltas)
        calls = [call["function"] for call in message.get("tool_calls", ())]
        calls += [message["function_call"]] if "function_call" in message else []
        schemas = self._plan.schemas
        for call in calls:
            if fault := violation(schemas.get(call["name"], True), call["arguments"], budget):
                yield f"the arguments of '{call['name']}': {fault}"
        schema = None if calls else self._schema_of_text()
        if schema is not None and (fault := violation(schema, message["content"] or "", budget)):
            yield fault

    def _message(self, response_id: str, choice: int, deltas: Sequence[Delta]) -> JsonObject:
        answer = Answer(self._plan, response_id, choice)
        for delta in deltas:
            answer.add(delta)
        return answer.message()

    def _schema_of_text(self) -> Any:
        """The request's schema for the answer's text. Raises NotJudgedError for one in structural tags."""
        sampling = self._request.sampling
        wanted = sampling.get(STRUCTURED_OUTPUTS)
        if (isinstance(wanted, dict) and "structural_tag" in wanted) or "structural_tag" in sampling:
            raise NotJudgedError("its schemas are in structural tags")
        schema = sampling.get("guided_json") if wanted is None else wanted.get("json")
        try:
            return orjson.loads(schema) if isinstance(schema, str) else schema
        except orjson.JSONDecodeError:
            raise NotJudgedError("the schema cannot be read") from None

    def _client_path(self, place: str) -> str:
        """A location in the sampling parameters, in the client's fields."""
        param, _, path = place.partition("#")
        if param == STRUCTURED_OUTPUTS and self._plan.has_grammar:
            return self._plan.client_path(path) or self._in_schema_field(path.partition("/json_schema")[2]) or place
        if param == STRUCTURED_OUTPUTS and path.startswith("/json/"):
            return self._in_schema_field(path.removeprefix("/json")) or place
        return place

    def _in_schema_field(self, path: str) -> str:
        field = self._request.schema_field
        return f"{field}#{path}" if field and self._request.structure_field != STRUCTURED_OUTPUTS else ""
