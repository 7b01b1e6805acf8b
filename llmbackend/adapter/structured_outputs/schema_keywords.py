"""Translates the keywords of one object schema for the grammar compiler.

Used by json_schema.py. Independent of references and of the rest of the document. Invariant: a keyword is enforced, or
does not affect validity, or raises; one that raises NotEnforcedError does not affect the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

from llmbackend.core.backend_api import TritonError

from . import regular_expressions
from .constraint import MAX_PROPERTIES, NotEnforcedError, RequestPath
from .schema_values import (
    ANY_TEXT,
    COMPILED,
    ENFORCED,
    PATTERNS,
    WITHOUT_LOOKING_AROUND,
    adjacent_limit,
    exact_limit,
    finite_values,
    lists_without_repetition,
    number_of,
)

Schema = dict[str, Any]

_ANNOTATIONS = frozenset(
    {
        "$anchor", "$comment", "$dynamicAnchor", "$recursiveAnchor", "$schema", "default", "deprecated", "description",
        "discriminator", "enumNames", "example", "examples", "externalDocs", "markdownDescription", "readOnly", "title",
        "writeOnly", "xml",
    }
)  # fmt: skip
"""Keywords without effect on validity. References to anchors are refused."""
_DEFINITIONS = ("$defs", "definitions")
"""Read where they are referenced."""
_NOT_ENFORCED = frozenset(
    {
        "$dynamicRef", "$recursiveRef", "$vocabulary", "contains", "contentEncoding", "contentMediaType",
        "contentSchema", "dependencies", "dependentRequired", "dependentSchemas", "disallow", "divisibleBy", "else",
        "extends", "if", "maxContains", "minContains", "not", "then",
    }
)  # fmt: skip
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_IN_PLACE = ("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
"""Keywords with schemas for the same value."""
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_MAX_COUNT = 1 << 31


@dataclass(frozen=True, slots=True)
class SchemaOptions:
    disable_additional_properties: bool = False
    """An object schema with `properties` and no keyword about others permits no others."""
    is_strict: bool = True
    """Whether a keyword that cannot be enforced is refused. Otherwise it is left out and its path is reported."""
    not_compiled: frozenset[str] = frozenset()
    """Keywords refused by the compiler: they are not enforced anywhere in the schema."""

    def strict(self) -> SchemaOptions:
        """For a schema that is strict by itself: what the compiler refuses in it is refused."""
        return replace(self, is_strict=True, not_compiled=frozenset())


class Document(Protocol):
    """The whole schema, as needed for translating one object in it."""

    options: SchemaOptions
    root_path: str
    patterns: dict[str, str]
    """Translated, by pattern."""

    def leave_out(self, place: RequestPath) -> None: ...
    def has_room_for(self, alternatives: int) -> bool: ...
    def resolved(self, value: object, place: RequestPath) -> object: ...
    def schema(self, value: object, place: RequestPath, is_in_place: bool = False) -> Schema | bool: ...
    @property
    def may_inline(self) -> bool: ...
    def exclude_each_other(self, alternatives: list[object], place: RequestPath) -> bool: ...
    def alternative(self, value: object, place: RequestPath, is_in_place: bool) -> Schema | bool: ...
    def reference(self, pointer: object, place: RequestPath, is_in_place: bool) -> str: ...
    def literal(self, value: object, place: RequestPath) -> object: ...
    def text(self, text: str, place: RequestPath) -> str: ...
    def count_chars(self, text: str) -> None: ...
    def multiple_of(self, value: object, place: RequestPath) -> object: ...


class Keywords:
    def __init__(self, document: Document, source: Mapping[str, Any], place: RequestPath, is_in_place: bool) -> None:
        self._document = document
        self._source = source
        self._place = place
        self._is_in_place = is_in_place
        self._unnamed: list[Schema | bool] = []
        """Schemas of `patternProperties` whose patterns are not enforced: other properties must satisfy one of them."""
        self._result: Schema = {}

    def translated(self) -> Schema:
        for name, value in self._source.items():
            if name in _DEFINITIONS or is_annotation(name):
                continue
            self._enforce(_HANDLERS.get(name, Keywords._unknown), name, value)
        self._add_items()
        self._add_other_properties()
        for name, handler in _AFTER_OTHERS.items():
            if name in self._source:
                self._enforce(handler, name, self._source[name])
        if self._document.options.disable_additional_properties and "properties" in self._result:
            self._result.setdefault("additionalProperties", False)
        return self._result

    def _enforce(self, handler: _Handler, name: str, value: Any) -> None:
        place = self._place / name
        try:
            if name in self._document.options.not_compiled - _IN_PART:
                place.not_enforced("the compiler rejects it")
            handler(self, name, value, place)
        except NotEnforcedError:
            if self._document.options.is_strict:
                raise
            self._document.leave_out(place)

    def _unknown(self, name: str, value: object, place: RequestPath) -> NoReturn:
        if name in _NOT_ENFORCED:
            place.not_enforced(f"the keyword '{name}' is not supported: it would not be enforced")
        place.not_enforced(f"{name[:80]!r} is not a known keyword, so it would not be enforced")

    def _later(self, name: str, value: object, place: RequestPath) -> None:
        """Read after all the others."""

    # --- keywords -----------------------------------------------------------------------------------------------------

    def _identifier(self, name: str, value: object, place: RequestPath) -> None:
        """`$id` of the whole schema has no effect, because references stay within it."""
        if self._place.path != self._document.root_path or not isinstance(value, str):
            place.not_enforced(f"'{name}' is supported at the top of a schema only")

    def _ref(self, name: str, value: object, place: RequestPath) -> None:
        self._result["$ref"] = self._document.reference(value, place, self._is_in_place)

    def _type(self, name: str, value: object, place: RequestPath) -> None:
        types = value if isinstance(value, list) else [value]
        if not types or not all(isinstance(item, str) and item in _TYPES for item in types):
            place.refuse(value, f"one or several of {', '.join(_TYPES)}")
        self._result[name] = value if isinstance(value, str) else list(dict.fromkeys(types))

    def _enum(self, name: str, value: object, place: RequestPath) -> None:
        if not isinstance(value, list) or not value:
            place.refuse(value, "a non-empty list")
        self._result[name] = [self._document.literal(item, place / index) for index, item in enumerate(value)]

    def _const(self, name: str, value: object, place: RequestPath) -> None:
        self._result[name] = self._document.literal(value, place)

    def _alternatives(self, name: str, value: object, place: RequestPath) -> None:
        if not isinstance(value, list) or not value:
            place.refuse(value, "a non-empty list of schemas")
        is_any_of = name == "oneOf" and self._is_any_of(value, place)
        read = self._document.alternative if name == "oneOf" and not is_any_of else self._document.schema
        alternatives = [read(item, place / index, self._is_in_place) for index, item in enumerate(value)]
        if not is_any_of:
            self._result.setdefault(name, []).extend(alternatives)  # `allOf` may have another keyword's schemas
        elif "anyOf" in self._source:
            self._result.setdefault("allOf", []).append({"anyOf": alternatives})
        else:
            self._result["anyOf"] = alternatives

    @property
    def _has_only_one_of(self) -> bool:
        """The compiler joins other keywords with each alternative, and cannot do so with one that refers to itself."""
        return all(name == "oneOf" or name in _DEFINITIONS or is_annotation(name) for name in self._source)

    def _is_any_of(self, alternatives: list[object], place: RequestPath) -> bool:
        """Whether `oneOf` is written as `anyOf`, because they are equivalent or it is not enforced."""
        document = self._document
        if self._has_only_one_of and document.exclude_each_other(alternatives, place):
            return True
        is_compiled = "oneOf" not in document.options.not_compiled or len(alternatives) == 1
        if is_compiled and document.may_inline:
            return False
        if len(alternatives) > 1:
            if document.options.is_strict:
                place.not_enforced("the alternatives refer to each other too often to be told apart")
            document.leave_out(place)
        return True

    def _properties(self, name: str, value: object, place: RequestPath) -> None:
        members = _members(value, place)
        self._result[name] = {
            self._document.text(key, place): self._document.schema(item, place / key) for key, item in members.items()
        }

    def _pattern_properties(self, name: str, value: object, place: RequestPath) -> None:
        members = {key: self._document.schema(item, place / key) for key, item in _members(value, place).items()}
        self._unnamed = [*members.values()]
        if name in self._document.options.not_compiled:
            place.not_enforced("the compiler rejects it")
        self._result[name] = {self._searched(key, place): member for key, member in members.items()}
        self._unnamed = []

    def _subschema(self, name: str, value: object, place: RequestPath) -> None:
        self._result[name] = self._document.schema(value, place)

    def _required(self, name: str, value: object, place: RequestPath) -> None:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            place.refuse(value, "a list of property names")
        place.check_at_most(len(value), MAX_PROPERTIES, "names")
        self._result[name] = [self._document.text(item, place) for item in dict.fromkeys(value)]

    def _count(self, name: str, value: object, place: RequestPath) -> None:
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        most = _MAX_COUNT if name.startswith("min") else math.inf
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= most:
            place.refuse(value, f"an integer from 0 to {_MAX_COUNT}")
        self._result[name] = min(number, _MAX_COUNT)

    def _limit(self, name: str, value: object, place: RequestPath) -> None:
        """minimum, maximum and their exclusive forms; in draft 4 the exclusive forms are flags on the others."""
        if isinstance(value, bool) and name.startswith("exclusive"):
            return
        exclusive = "exclusive" + name[0].upper() + name[1:]
        if self._source.get(exclusive) is True:
            name = exclusive
        number = number_of(exact_limit(value, name), place)
        if name.startswith("exclusive") and float(number).is_integer():
            number, name = adjacent_limit(number, name, place, is_integer=self._source.get("type") == "integer")
        present = self._result.get(name, number)
        self._result[name] = max(present, number) if name.endswith("inimum") else min(present, number)

    def _multiple_of(self, name: str, value: object, place: RequestPath) -> None:
        self._result[name] = self._document.multiple_of(value, place)

    def _pattern(self, name: str, value: object, place: RequestPath) -> None:
        if not isinstance(value, str):
            place.refuse(value, "a regular expression")
        self._add_pattern(self._searched(value, place))

    def _searched(self, pattern: str, place: RequestPath) -> str:
        """Raises NotEnforcedError for a regular expression that the compiler cannot express."""
        self._document.count_chars(pattern)
        known = self._document.patterns
        try:
            if pattern not in known:
                known[pattern] = regular_expressions.searched(WITHOUT_LOOKING_AROUND.get(pattern, pattern), place)
        except TritonError as error:
            raise NotEnforcedError(error.message, error.code, error.param) from None
        return known[pattern]

    def _format(self, name: str, value: object, place: RequestPath) -> None:
        if isinstance(value, str) and value in PATTERNS:
            self._add_pattern(PATTERNS[value])
        elif isinstance(value, str) and value in COMPILED:
            self._result[name] = value
        elif not isinstance(value, str):
            place.refuse(value, "the name of a format")
        elif value not in ANY_TEXT:
            place.value_not_enforced(value, f"a format that is enforced: {', '.join(ENFORCED)}")

    def _nullable(self, name: str, value: object, place: RequestPath) -> None:
        if value is not False:
            place.value_not_enforced(value, "null as one of the names in 'type'")

    def _unevaluated(self, name: str, value: object, place: RequestPath) -> None:
        """If nothing else applies to the same value, it is equivalent to `additionalProperties` or `items`."""
        if not self._is_alone:
            place.not_enforced(
                f"the keyword '{name}' is not supported together with {', '.join(_IN_PLACE)}: it would not be enforced"
            )

    # --- keywords that depend on others -------------------------------------------------------------------------------

    @property
    def _is_alone(self) -> bool:
        """Whether no schema in another keyword applies to the same value."""
        return not any(keyword in self._source for keyword in _IN_PLACE)

    def _add_pattern(self, pattern: str) -> None:
        if "pattern" in self._result:
            self._result.setdefault("allOf", []).append({"pattern": pattern})
        else:
            self._result["pattern"] = pattern

    def _add_items(self) -> None:
        source, place = self._source, self._place
        first_name = "items" if isinstance(source.get("items"), list) else "prefixItems"
        rest_names = ("items", "additionalItems", *(("unevaluatedItems",) if self._is_alone else ()))
        given = [name for name in rest_names if name in source and name != first_name]
        if first_name == "items" and "prefixItems" in source:
            (place / "items").wrong("a list of schemas together with 'prefixItems'")
        for name in given[1:]:
            self._enforce(Keywords._without_effect, name, given[0])
        if first_name in source:
            self._result["prefixItems"] = self._first_items(source[first_name], place / first_name)
        if given:
            self._result["items"] = self._document.schema(source[given[0]], place / given[0])

    def _without_effect(self, name: str, value: object, place: RequestPath) -> None:
        place.not_enforced(f"the keyword '{name}' has no effect together with '{value}'")

    def _first_items(self, value: object, place: RequestPath) -> list[Schema | bool]:
        if not isinstance(value, list):
            place.refuse(value, "a list of schemas")
        return [self._document.schema(item, place / index) for index, item in enumerate(value)]

    def _add_other_properties(self) -> None:
        name, result = "unevaluatedProperties", self._result
        if name in self._source and "additionalProperties" not in result and self._is_alone:
            result["additionalProperties"] = self._document.schema(self._source[name], self._place / name)
        if self._unnamed and result.get("additionalProperties") is False:
            result["additionalProperties"] = {"anyOf": self._unnamed}

    def _min_properties(self, name: str, value: object, place: RequestPath) -> None:
        """The grammar counts a repeated name twice, a parser once."""
        most = len(self._result.get("required", ())) + 1
        if self._result.get(name, 0) > most:
            self._result[name] = most
            expected = f"at most the number of required properties and one ({most})"
            place.value_not_enforced(value, expected)

    def _unique_items(self, name: str, value: object, place: RequestPath) -> None:
        """For a list of few values: one of its orders is generated."""
        if not isinstance(value, bool):
            place.refuse(value, "true or false")
        result, most = self._result, self._result.get("maxItems", MAX_PROPERTIES)
        if not value or most <= 1:
            return
        items = self._document.resolved(self._source.get("items"), place)
        bare = {key: item for key, item in items.items() if not is_annotation(key)} if isinstance(items, dict) else {}
        values = finite_values(bare) if result.get("type") == "array" and "prefixItems" not in result else None
        lists = None
        if values is not None:
            known = [self._document.literal(one, place) for one in values]
            lists = lists_without_repetition(known, result.get("minItems", 0), most)
        weight = 1 + sum(len(one) for one in values or () if isinstance(one, str)) // 1024  # each list has all values
        if lists is None or "anyOf" in result or not self._document.has_room_for(len(lists) * weight):
            place.not_enforced("the keyword 'uniqueItems' is not supported: it would not be enforced")
        for replaced in ("items", "minItems", "maxItems"):
            result.pop(replaced, None)
        result["anyOf"] = lists

    def _property_names(self, name: str, value: object, place: RequestPath) -> None:
        """A list of names, or a pattern for them."""
        names = self._document.resolved(value, place)
        bare = {key: item for key, item in names.items() if not is_annotation(key)} if isinstance(names, dict) else None
        if names is True or bare == {} or bare == {"type": "string"}:
            return
        others = self._result.get("additionalProperties", True)
        listed = finite_values(bare) if bare is not None else None
        if bare is None or "patternProperties" in self._result:
            self._unknown_names(place)
        if listed is not None:
            place.check_at_most(len(listed), MAX_PROPERTIES, "names")
            properties = self._result.get("properties", {})
            self._result["properties"] = {
                self._document.text(one, place): properties.get(one, others) for one in listed if isinstance(one, str)
            }
        else:
            pattern = _pattern_of_names(bare)
            if pattern is None or "properties" in self._result:
                self._unknown_names(place)
            self._result["patternProperties"] = {self._searched(pattern, place): others}
        self._result["additionalProperties"] = False

    def _unknown_names(self, place: RequestPath) -> NoReturn:
        place.not_enforced("'propertyNames' is enforced where it lists names, or has a pattern of all names")


_Handler = Callable[[Keywords, str, Any, RequestPath], None]
_HANDLERS: dict[str, _Handler] = {
    "$id": Keywords._identifier,
    "$ref": Keywords._ref,
    "additionalItems": Keywords._later,
    "additionalProperties": Keywords._subschema,
    "allOf": Keywords._alternatives,
    "anyOf": Keywords._alternatives,
    "const": Keywords._const,
    "enum": Keywords._enum,
    "exclusiveMaximum": Keywords._limit,
    "exclusiveMinimum": Keywords._limit,
    "format": Keywords._format,
    "id": Keywords._identifier,
    "items": Keywords._later,
    "maximum": Keywords._limit,
    "minimum": Keywords._limit,
    "multipleOf": Keywords._multiple_of,
    "nullable": Keywords._nullable,
    "oneOf": Keywords._alternatives,
    "pattern": Keywords._pattern,
    "patternProperties": Keywords._pattern_properties,
    "prefixItems": Keywords._later,
    "properties": Keywords._properties,
    "propertyNames": Keywords._later,
    "required": Keywords._required,
    "type": Keywords._type,
    "unevaluatedItems": Keywords._unevaluated,
    "unevaluatedProperties": Keywords._unevaluated,
    "uniqueItems": Keywords._later,
    **dict.fromkeys(_COUNTS, Keywords._count),
}
_IN_PART = frozenset(("oneOf", "patternProperties"))
"""Their handlers enforce as much as the compiler accepts."""
_AFTER_OTHERS: dict[str, _Handler] = {
    "propertyNames": Keywords._property_names,
    "minProperties": Keywords._min_properties,
    "uniqueItems": Keywords._unique_items,
}
"""They depend on the results of other keywords."""


def is_annotation(name: str) -> bool:
    return name in _ANNOTATIONS or name.startswith("x-")


def _pattern_of_names(names: Mapping[str, Any]) -> str | None:
    """The pattern, or that of a format; None if the names are restricted in any other way."""
    limits = {name: value for name, value in names.items() if (name, value) != ("type", "string")}
    pattern, form = limits.get("pattern"), limits.get("format")
    if len(limits) != 1:
        return None
    return pattern if isinstance(pattern, str) else PATTERNS.get(form) if isinstance(form, str) else None


def _members(value: object, place: RequestPath) -> dict[str, Any]:
    if not isinstance(value, dict):
        place.refuse(value, "an object of schemas")
    place.check_at_most(len(value), MAX_PROPERTIES, "properties")
    return value
