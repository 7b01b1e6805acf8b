"""A client's JSON schema → one that the grammar compiler enforces completely, or a refusal with the path.

For: compilation.py and structural_tags.py. Does not know: where the schema came from. Invariants: every keyword is
enforced, or says nothing about validity, or is refused by its path; the result is made anew and holds only keywords
that this module wrote, so that no option of the compiler can be smuggled in; each `$ref` has its own definition.
Source: JSON Schema 2020-12, and the spellings of the drafts before that differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NoReturn
from urllib.parse import unquote

from . import regular_expressions
from .bounds import MAX_DEPTH, MAX_MULTIPLE_OF, MAX_PROPERTIES, MAX_SCHEMA_NODES, Place
from .formats import COMPILED, ENFORCED, PATTERNS

Schema = dict[str, Any]

_ANNOTATIONS = frozenset(
    {
        "$anchor", "$comment", "$dynamicAnchor", "$recursiveAnchor", "$schema", "default", "deprecated", "description",
        "discriminator", "enumNames", "example", "examples", "externalDocs", "markdownDescription", "readOnly", "title",
        "writeOnly", "xml",
    }
)  # fmt: skip
"""Say nothing about validity. Anchors: a reference to one is refused where it stands."""
_DEFINITIONS = ("$defs", "definitions")
"""Read where something refers to them."""
_NOT_ENFORCED = frozenset(
    {
        "$dynamicRef", "$recursiveRef", "$vocabulary", "contains", "contentEncoding", "contentMediaType",
        "contentSchema", "dependencies", "dependentRequired", "dependentSchemas", "disallow", "divisibleBy", "else",
        "extends", "if", "maxContains", "minContains", "not", "propertyNames", "then",
    }
)  # fmt: skip
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_MAX_COUNT = 1 << 31
_EXACT = 1 << 53
"""Beyond it the compiler's numbers, which are doubles, are not the client's."""
_SMALLEST = 1e-9
_FINE_EXCLUSIVE, _LARGEST_EXCLUSIVE, _COARSE_STEP = 10**6, 10**12, 1e-3
"""Up to which exclusive limits 1e-9 beside them, or 0.001, are numbers of their own."""


@dataclass(frozen=True, slots=True)
class SchemaOptions:
    disable_additional_properties: bool = False
    """An object that lists properties, and says nothing of others, has no others."""


def parse_schema(value: object, place: Place) -> object:
    """A schema that may come as JSON text. Raises TritonError INVALID_ARG."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        place.wrong(f"the schema is not JSON: {error}")


def enforceable(value: object, place: Place, options: SchemaOptions | None = None) -> Schema:
    """The schema for the compiler. Raises TritonError INVALID_ARG with the path of what is wrong or not enforced."""
    return _Translation(value, place, options or SchemaOptions()).result()


class _Translation:
    def __init__(self, root: object, place: Place, options: SchemaOptions) -> None:
        self._root = root
        self._place = place
        self._options = options
        self._nodes = 0
        self._depth = 0
        self._names: dict[str, str] = {}
        """Definition by the pointer that refers to it."""
        self._waiting: list[tuple[str, Place]] = []
        self._inlined: list[str] = []
        self._steps = Fraction(1)
        """The least common multiple of all multipleOf."""
        self._same_place: dict[str, set[str]] = {}
        """References that apply to the same value, by the definition (root: "#") that makes them."""
        self._owner = "#"

    def result(self) -> Schema:
        if self._root is False:
            self._place.refuse(False, "a schema that something matches")
        if not isinstance(self._root, dict | bool):
            self._place.refuse(self._root, "a JSON schema, which is an object")
        schema = self._schema(self._root, self._place, is_in_place=True)
        result = dict(schema) if isinstance(schema, dict) else {}
        definitions = self._definitions()
        self._check_cycles()
        return {**result, "$defs": definitions} if definitions else result

    def _definitions(self) -> Schema:
        definitions: Schema = {}
        while self._waiting:
            pointer, place = self._waiting.pop()
            self._owner = pointer
            definitions[self._names[pointer]] = self._schema(
                self._target(pointer, place), Place(place.param, pointer[1:]), is_in_place=True
            )
        return definitions

    def _schema(self, value: object, place: Place, *, is_in_place: bool = False) -> Schema | bool:
        """is_in_place: whether it applies to the same value as the definition that holds it."""
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            place.refuse(value, "a schema: an object, true or false")
        self._count(1, place)
        self._depth += 1
        place.check_at_most(self._depth, MAX_DEPTH, "nested schemas")
        schema = _Object(self, value, place, is_in_place).translated()
        self._depth -= 1
        return schema

    def _count(self, nodes: int, place: Place) -> None:
        self._nodes += nodes
        if self._nodes > MAX_SCHEMA_NODES:
            place.wrong(f"the schema has more than {MAX_SCHEMA_NODES} nodes (schemas and enumerated values)")

    # --- what one object needs of the document ------------------------------------------------------------------------

    def member(self, value: object, place: Place) -> Schema | bool:
        """A schema for a part of the value."""
        return self._schema(value, place)

    def applied(self, value: object, place: Place, is_in_place: bool) -> Schema | bool:
        """A schema for the value itself."""
        return self._schema(value, place, is_in_place=is_in_place)

    def alternative(self, value: object, place: Place, is_in_place: bool) -> Schema | bool:
        """One of `oneOf`: a reference is replaced by its target, so that the compiler can see that alternatives exclude
        each other."""
        pointer = value.get("$ref") if isinstance(value, dict) else None
        is_alone = isinstance(value, dict) and all(name == "$ref" or _is_annotation(name) for name in value)
        if not (is_alone and isinstance(pointer, str)) or pointer in self._inlined:
            return self._schema(value, place, is_in_place=is_in_place)
        self._inlined.append(pointer)
        target = self._target(pointer, place / "$ref")
        schema = self._schema(target, Place(place.param, pointer[1:]), is_in_place=is_in_place)
        self._inlined.pop()
        return schema

    def reference(self, pointer: object, place: Place, is_in_place: bool) -> str:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            place.refuse(pointer, "a reference into the same schema: '#' or '#/' and a JSON pointer")
        if is_in_place:
            self._same_place.setdefault(self._owner, set()).add(pointer)
        if pointer not in self._names:
            self._target(pointer, place)
            self._names[pointer] = f"d{len(self._names)}"
            self._waiting.append((pointer, place))
        return f"#/$defs/{self._names[pointer]}"

    def _target(self, pointer: str, place: Place) -> object:
        node: Any = self._root
        for part in pointer.split("/")[1:]:
            name = _unescaped(part)
            if isinstance(node, dict) and name in node:
                node = node[name]
            elif isinstance(node, list) and name.isascii() and name.isdigit() and int(name[:9]) < len(node):
                node = node[int(name)]
            else:
                place.refuse(pointer, "a reference to something that exists in the schema")
        return node

    def _check_cycles(self) -> None:
        """A definition that is nothing but a reference to itself matches nothing."""
        for start in self._same_place:
            seen: set[str] = set()
            waiting = [start]
            while waiting:
                for pointer in self._same_place.get(waiting.pop(), ()):
                    if pointer == start:
                        self._place.wrong(f"'{start}' refers to itself without a value in between")
                    if pointer not in seen:
                        seen.add(pointer)
                        waiting.append(pointer)

    def literal(self, value: object, place: Place, depth: int = 0) -> object:
        """An enumerated value."""
        self._count(1, place)
        place.check_at_most(depth, MAX_DEPTH, "nested values")
        if isinstance(value, dict):
            return {_encodable(name, place): self.literal(item, place, depth + 1) for name, item in value.items()}
        if isinstance(value, list):
            return [self.literal(item, place, depth + 1) for item in value]
        if isinstance(value, str):
            return _encodable(value, place)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return _number(value, place, least=-math.inf, smallest=0.0)
        return value

    def multiple_of(self, value: object, place: Place) -> object:
        number = _number(value, place)
        step = Fraction(str(number))
        if step <= 0:
            place.refuse(value, "a number above 0")
        self._steps = Fraction(
            math.lcm(self._steps.numerator, step.numerator), math.gcd(self._steps.denominator, step.denominator)
        )
        denominator = math.lcm(self._steps.denominator, step.denominator)
        if max(step.numerator, step.denominator, self._steps.numerator, denominator) > MAX_MULTIPLE_OF:
            place.refuse(value, f"a fraction of integers up to {MAX_MULTIPLE_OF}, also as common multiple with others")
        return number

    def options(self) -> SchemaOptions:
        return self._options


class _Object:
    """One schema that is an object."""

    def __init__(self, document: _Translation, source: Mapping[str, Any], place: Place, is_in_place: bool) -> None:
        self._document = document
        self._source = source
        self._place = place
        self._is_in_place = is_in_place
        self._result: Schema = {}

    def translated(self) -> Schema:
        for name, value in self._source.items():
            if name in _DEFINITIONS or _is_annotation(name):
                continue
            handler = _HANDLERS.get(name)
            if handler is None:
                self._refuse_keyword(name)
            handler(self, name, value, self._place / name)
        self._add_items()
        self._add_other_properties()
        self._check_min_properties()
        return self._result

    def _refuse_keyword(self, name: str) -> NoReturn:
        place = self._place / name
        if name in _NOT_ENFORCED:
            place.wrong(f"the keyword '{name}' is not supported: it would not be enforced")
        place.wrong(f"{name[:80]!r} is no keyword that is known here, so it would not be enforced")

    # --- keywords -----------------------------------------------------------------------------------------------------

    def _identifier(self, name: str, value: object, place: Place) -> None:
        """`$id` of the whole schema changes nothing, since references stay inside it."""
        if self._place.path or not isinstance(value, str):
            place.wrong(f"'{name}' is supported at the top of a schema only")

    def _ref(self, name: str, value: object, place: Place) -> None:
        self._result["$ref"] = self._document.reference(value, place, self._is_in_place)

    def _type(self, name: str, value: object, place: Place) -> None:
        types = value if isinstance(value, list) else [value]
        if not types or not all(isinstance(item, str) and item in _TYPES for item in types):
            place.refuse(value, f"one or several of {', '.join(_TYPES)}")
        self._result[name] = value if isinstance(value, str) else list(dict.fromkeys(types))

    def _enum(self, name: str, value: object, place: Place) -> None:
        if not isinstance(value, list) or not value:
            place.refuse(value, "a non-empty list")
        self._result[name] = [self._document.literal(item, place / index) for index, item in enumerate(value)]

    def _const(self, name: str, value: object, place: Place) -> None:
        self._result[name] = self._document.literal(value, place)

    def _alternatives(self, name: str, value: object, place: Place) -> None:
        if not isinstance(value, list) or not value:
            place.refuse(value, "a non-empty list of schemas")
        read = self._document.alternative if name == "oneOf" else self._document.applied
        self._result[name] = [read(item, place / index, self._is_in_place) for index, item in enumerate(value)]

    def _properties(self, name: str, value: object, place: Place) -> None:
        members = _members(value, place)
        self._result[name] = {
            _encodable(key, place): self._document.member(item, place / key) for key, item in members.items()
        }

    def _pattern_properties(self, name: str, value: object, place: Place) -> None:
        members = _members(value, place)
        self._result[name] = {
            regular_expressions.searched(key, place): self._document.member(item, place / key)
            for key, item in members.items()
        }

    def _subschema(self, name: str, value: object, place: Place) -> None:
        self._result[name] = self._document.member(value, place)

    def _required(self, name: str, value: object, place: Place) -> None:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            place.refuse(value, "a list of property names")
        place.check_at_most(len(value), MAX_PROPERTIES, "names")
        self._result[name] = [_encodable(item, place) for item in dict.fromkeys(value)]

    def _count(self, name: str, value: object, place: Place) -> None:
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _MAX_COUNT:
            place.refuse(value, f"an integer from 0 to {_MAX_COUNT}")
        self._result[name] = number

    def _limit(self, name: str, value: object, place: Place) -> None:
        """minimum, maximum and their exclusive forms; in draft 4 the exclusive ones are flags of the others."""
        if isinstance(value, bool) and name.startswith("exclusive"):
            return
        exclusive = "exclusive" + name[0].upper() + name[1:]
        if self._source.get(exclusive) is True:
            name = exclusive
        number = _number(value, place)
        if name.startswith("exclusive") and float(number).is_integer():
            number, name = _beside(number, name, place, is_integer=self._source.get("type") == "integer")
        present = self._result.get(name, number)
        self._result[name] = max(present, number) if name.endswith("inimum") else min(present, number)

    def _multiple_of(self, name: str, value: object, place: Place) -> None:
        self._result[name] = self._document.multiple_of(value, place)

    def _pattern(self, name: str, value: object, place: Place) -> None:
        if not isinstance(value, str):
            place.refuse(value, "a regular expression")
        self._add_pattern(regular_expressions.searched(value, place))

    def _format(self, name: str, value: object, place: Place) -> None:
        if isinstance(value, str) and value in PATTERNS:
            self._add_pattern(PATTERNS[value])
        elif isinstance(value, str) and value in COMPILED:
            self._result[name] = value
        else:
            place.refuse(value, f"a format that is enforced: {', '.join(ENFORCED)}")

    def _unique_items(self, name: str, value: object, place: Place) -> None:
        most = self._source.get("maxItems")
        if value is not False and not (value is True and isinstance(most, int) and most <= 1):
            place.wrong("the keyword 'uniqueItems' is not supported: it would not be enforced")

    def _nullable(self, name: str, value: object, place: Place) -> None:
        if value is not False:
            place.refuse(value, "null as one of the names in 'type'")

    def _unevaluated(self, name: str, value: object, place: Place) -> None:
        """Where nothing else applies to the same value, it is what `additionalProperties` or `items` is."""
        if any(keyword in self._source for keyword in _IN_PLACE):
            place.wrong(
                f"the keyword '{name}' is not supported beside {', '.join(_IN_PLACE)}: it would not be enforced"
            )

    # --- keywords that depend on others -------------------------------------------------------------------------------

    def _add_pattern(self, pattern: str) -> None:
        if "pattern" in self._result:
            self._result.setdefault("allOf", []).append({"pattern": pattern})
        else:
            self._result["pattern"] = pattern

    def _items(self, name: str, value: object, place: Place) -> None:
        """Read by `_add_items`."""

    def _add_items(self) -> None:
        source, place = self._source, self._place
        first_name = "items" if isinstance(source.get("items"), list) else "prefixItems"
        rest_names = (
            ("items", "additionalItems", "unevaluatedItems")
            if first_name != "items"
            else (
                "additionalItems",
                "unevaluatedItems",
            )
        )
        given = [name for name in rest_names if name in source]
        if first_name == "items" and "prefixItems" in source:
            (place / "items").wrong("a list of schemas beside 'prefixItems'")
        if len(given) > 1:
            (place / given[1]).wrong(f"the keyword '{given[1]}' has no effect beside '{given[0]}'")
        if first_name in source:
            self._result["prefixItems"] = self._first_items(source[first_name], place / first_name)
        if given:
            self._result["items"] = self._document.member(source[given[0]], place / given[0])

    def _first_items(self, value: object, place: Place) -> list[Schema | bool]:
        if not isinstance(value, list):
            place.refuse(value, "a list of schemas")
        return [self._document.member(item, place / index) for index, item in enumerate(value)]

    def _add_other_properties(self) -> None:
        if "additionalProperties" in self._result:
            return
        if "unevaluatedProperties" in self._source:
            value = self._source["unevaluatedProperties"]
            self._result["additionalProperties"] = self._document.member(value, self._place / "unevaluatedProperties")
        elif self._document.options().disable_additional_properties and "properties" in self._result:
            self._result["additionalProperties"] = False

    def _check_min_properties(self) -> None:
        """The grammar counts a name that comes twice as two, a parser as one."""
        least = self._result.get("minProperties", 0)
        most = len(self._result.get("required", ())) + 1
        if least > most:
            (self._place / "minProperties").refuse(least, f"at most the number of required properties and one ({most})")


_HANDLERS: dict[str, Callable[[_Object, str, Any, Place], None]] = {
    "$id": _Object._identifier,
    "$ref": _Object._ref,
    "additionalItems": _Object._items,
    "additionalProperties": _Object._subschema,
    "allOf": _Object._alternatives,
    "anyOf": _Object._alternatives,
    "const": _Object._const,
    "enum": _Object._enum,
    "exclusiveMaximum": _Object._limit,
    "exclusiveMinimum": _Object._limit,
    "format": _Object._format,
    "id": _Object._identifier,
    "items": _Object._items,
    "maximum": _Object._limit,
    "minimum": _Object._limit,
    "multipleOf": _Object._multiple_of,
    "nullable": _Object._nullable,
    "oneOf": _Object._alternatives,
    "pattern": _Object._pattern,
    "patternProperties": _Object._pattern_properties,
    "prefixItems": _Object._items,
    "properties": _Object._properties,
    "required": _Object._required,
    "type": _Object._type,
    "unevaluatedItems": _Object._unevaluated,
    "unevaluatedProperties": _Object._unevaluated,
    "uniqueItems": _Object._unique_items,
    **dict.fromkeys(_COUNTS, _Object._count),
}


def _is_annotation(name: str) -> bool:
    return name in _ANNOTATIONS or name.startswith("x-")


def _unescaped(part: str) -> str:
    """A part of a JSON pointer in a URI fragment."""
    return unquote(part).replace("~1", "/").replace("~0", "~")


def _members(value: object, place: Place) -> dict[str, Any]:
    if not isinstance(value, dict):
        place.refuse(value, "an object of schemas")
    place.check_at_most(len(value), MAX_PROPERTIES, "properties")
    return value


def _number(value: object, place: Place, *, least: float = -_EXACT, smallest: float = _SMALLEST) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        place.refuse(value, "a number")
    if abs(value) > _EXACT or 0 < abs(value) < smallest:
        place.refuse(value, f"a number from {-_EXACT} to {_EXACT}, not closer to 0 than {smallest}")
    return value


def _beside(number: float, name: str, place: Place, *, is_integer: bool) -> tuple[float, str]:
    """An exclusive limit that is an integer, as an inclusive one beside it: where both limits have one integer part,
    the compiler's exclusive ones include the integer."""
    if abs(number) > _LARGEST_EXCLUSIVE and not is_integer:
        place.refuse(number, f"an exclusive limit from {-_LARGEST_EXCLUSIVE} to {_LARGEST_EXCLUSIVE}, or a fraction")
    step = 1 if is_integer else _SMALLEST if abs(number) <= _FINE_EXCLUSIVE else _COARSE_STEP
    is_minimum = name == "exclusiveMinimum"
    beside = int(number) if is_integer else number
    return (beside + step if is_minimum else beside - step), ("minimum" if is_minimum else "maximum")


def _encodable(text: str, place: Place) -> str:
    """JSON strings may hold half of a surrogate pair, and names or values with control characters need an escape that
    is not generated."""
    if any(
        "\ud800" <= character < "\ue000" or (character < " " and character not in "\b\t\n\f\r") for character in text
    ):
        place.refuse(text, "text without control characters and halves of surrogate pairs")
    return text
