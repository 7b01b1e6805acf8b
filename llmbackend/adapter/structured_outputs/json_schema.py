"""Translates a client's JSON schema to one that the grammar compiler enforces completely.

Used by compilation.py and structural_tags.py. Independent of where the schema came from. Invariants: every keyword is
enforced, or does not affect validity, or its path is reported: in a refusal if the request is strict, otherwise among
the keywords left out. The result contains only keywords written by this module, so that a client cannot set compiler
options. Each `$ref` has its own definition.
Source: JSON Schema 2020-12, and spellings of earlier drafts.
"""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from .constraint import (
    MAX_ADDED_ALTERNATIVES,
    MAX_DEPTH,
    MAX_INLINED_NODES,
    MAX_LEFT_OUT,
    MAX_MULTIPLE_OF,
    MAX_SCHEMA_NODES,
    SCHEMA_KB,
    RequestPath,
    check_stack,
)
from .joint_patterns import check_joint_patterns
from .schema_keywords import Keywords, Schema, SchemaOptions, is_annotation
from .schema_values import encodable, number_of


def parse_schema(value: object, place: RequestPath) -> object:
    """Parses a schema, which may be given as JSON text. Raises TritonError INVALID_ARG."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        place.wrong(f"the schema is not JSON: {error}")


def enforceable(value: object, place: RequestPath, options: SchemaOptions) -> tuple[Schema, list[str]]:
    """The schema for the compiler, and the paths of keywords that are not enforced. Raises TritonError INVALID_ARG with
    the path of an invalid keyword or, if the request is strict, of one that is not enforced."""
    translation = _Translation(value, place, options)
    return translation.result(), translation.left_out


class _Translation:
    def __init__(self, root: object, place: RequestPath, options: SchemaOptions) -> None:
        self._root = root
        self._place = place
        self.root_path = place.path
        self.options = options
        self.left_out: list[str] = []
        self.patterns: dict[str, str] = {}
        self._nodes = 0
        self._num_chars = 0
        self._depth = 0
        self._added_alternatives = 0
        self._names: dict[str, str] = {}
        """Definition by the pointer that refers to it."""
        self._waiting: list[tuple[str, RequestPath]] = []
        self._inlined: list[str] = []
        self._num_inlined_nodes = 0
        self._num_compared = 0
        """Members by which alternatives were compared."""
        self._steps = Fraction(1)
        """Least common multiple of all multipleOf."""
        self._references: dict[str, dict[str, bool]] = {"#": {}}
        """By definition (root: "#"): the references in it, and whether they apply to the same value."""
        self._depths: dict[str, int] = {"#": 0}
        """By definition: how deep it nests."""
        self._resolved: dict[str, object] = {}
        """By pointer: the end of the chain of schemas that consist only of a reference."""
        self._owner = "#"

    def result(self) -> Schema:
        if self._root is False:
            self._place.refuse(False, "a schema that at least one value satisfies")
        if not isinstance(self._root, dict | bool):
            self._place.refuse(self._root, "a JSON schema, which is an object")
        schema = self.schema(self._root, self._place, is_in_place=True)
        result = dict(schema) if isinstance(schema, dict) else {}
        definitions = self._definitions()
        self._check_cycles()
        check_stack(self._place, {name: SCHEMA_KB * depth for name, depth in self._depths.items()}, self._references)
        whole = {**result, "$defs": definitions} if definitions else result
        check_joint_patterns(whole, self._place)
        return whole

    def _definitions(self) -> Schema:
        definitions: Schema = {}
        while self._waiting:
            pointer, place = self._waiting.pop()
            self._owner = pointer
            self._depths.setdefault(pointer, 0)
            self._references.setdefault(pointer, {})
            definitions[self._names[pointer]] = self.schema(
                self._target(pointer, place), self._place_of(pointer), is_in_place=True
            )
        return definitions

    def schema(self, value: object, place: RequestPath, is_in_place: bool = False) -> Schema | bool:
        """is_in_place: whether it applies to the same value as the enclosing definition"""
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            place.refuse(value, "a schema: an object, true or false")
        self._count(1, place)
        self._depth += 1
        place.check_at_most(self._depth, MAX_DEPTH, "nested schemas")
        self._depths[self._owner] = max(self._depths[self._owner], self._depth)
        schema = Keywords(self, value, place, is_in_place).translated()
        self._depth -= 1
        return schema

    def _count(self, nodes: int, place: RequestPath) -> None:
        self._nodes += nodes
        self._num_inlined_nodes += nodes if self._inlined else 0
        if self._nodes > MAX_SCHEMA_NODES:
            place.wrong(f"the schema has more than {MAX_SCHEMA_NODES} nodes (schemas and enumerated values)")

    # --- for Keywords -------------------------------------------------------------------------------------------------

    def text(self, text: str, place: RequestPath) -> str:
        """A property name or an enumerated text."""
        self.count_chars(text)
        return encodable(text, place)

    def count_chars(self, text: str) -> None:
        """An alternative of `oneOf` that is written several times counts each time."""
        self._num_chars += len(text)
        self._place.check_size(self._num_chars)

    def leave_out(self, place: RequestPath) -> None:
        """Reports that the keyword at that path is not enforced."""
        if len(self.left_out) < MAX_LEFT_OUT and place.pointer not in self.left_out:
            self.left_out.append(place.pointer)

    def has_room_for(self, alternatives: int) -> bool:
        """Counts alternatives that no client wrote; returns False if there are too many."""
        self._added_alternatives += alternatives
        return self._added_alternatives <= MAX_ADDED_ALTERNATIVES

    def resolved(self, value: object, place: RequestPath) -> object:
        """The target of a schema that consists only of a reference; other schemas unchanged."""
        passed: dict[str, None] = {}
        while (pointer := _only_reference(value)) is not None and pointer not in passed:
            passed[pointer] = None
            value = self._resolved[pointer] if pointer in self._resolved else self._target(pointer, place)
        self._resolved.update(dict.fromkeys(passed, value))
        return value

    @property
    def may_inline(self) -> bool:
        return self._num_inlined_nodes <= MAX_INLINED_NODES

    def exclude_each_other(self, alternatives: list[object], place: RequestPath) -> bool:
        """Whether the alternatives are objects that one required member tells apart by its text. False also after much
        comparing, which no other limit bounds."""
        if self._num_compared > MAX_SCHEMA_NODES:
            return False
        targets = [self.resolved(one, place / index / "$ref") for index, one in enumerate(alternatives)]
        objects = [target for target in targets if isinstance(target, dict) and target.get("type") == "object"]
        names = [set(filter(_is_text, _list(target, "required"))) for target in objects]
        self._num_compared += sum(map(len, names))
        if len(objects) < len(targets):
            return False
        return any(self._distinguishes(name, objects, place) for name in set.intersection(*names))

    def _distinguishes(self, name: str, objects: list[dict[str, Any]], place: RequestPath) -> bool:
        known: set[str] = set()
        for one in objects:
            members = one.get("properties")
            member = self.resolved(members.get(name), place) if isinstance(members, dict) else None
            values = [member["const"]] if isinstance(member, dict) and "const" in member else _list(member, "enum")
            if not values or not all(map(_is_text, values)) or not known.isdisjoint(values):
                return False
            known.update(values)
        return True

    def alternative(self, value: object, place: RequestPath, is_in_place: bool) -> Schema | bool:
        """One alternative of `oneOf`. A reference is replaced by its target, so that the compiler can tell that
        alternatives are mutually exclusive."""
        pointer = _only_reference(value)
        if pointer is None or pointer in self._inlined:
            return self.schema(value, place, is_in_place=is_in_place)
        self._inlined.append(pointer)
        target = self._target(pointer, place / "$ref")
        schema = self.schema(target, self._place_of(pointer), is_in_place=is_in_place)
        self._inlined.pop()
        return schema

    def reference(self, pointer: object, place: RequestPath, is_in_place: bool) -> str:
        if not isinstance(pointer, str):
            place.refuse(pointer, "a string")
        if not _is_local(pointer):
            place.value_not_enforced(pointer, "a reference into the same schema: '#' or '#/…'")
        references = self._references[self._owner]
        references[pointer] = references.get(pointer, False) or is_in_place
        if pointer not in self._names:
            self._target(pointer, place)
            self._names[pointer] = f"d{len(self._names)}"
            self._waiting.append((pointer, place))
        return f"#/$defs/{self._names[pointer]}"

    def _place_of(self, pointer: str) -> RequestPath:
        return RequestPath(self._place.param, self.root_path + pointer[1:])

    def _target(self, pointer: str, place: RequestPath) -> object:
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
        """A definition that consists only of a reference to itself matches nothing."""
        finished: set[str] = set()
        same_place = {
            owner: [pointer for pointer, is_in_place in references.items() if is_in_place]
            for owner, references in self._references.items()
        }
        for start in same_place:
            path = {start: iter(same_place[start])}
            while path:
                definition, references = path.popitem()
                pointer = next(references, None)
                if pointer is None:
                    finished.add(definition)
                    continue
                path[definition] = references
                if pointer in path:
                    self._place.wrong(f"'{pointer}' refers to itself without a value in between")
                if pointer not in finished:
                    path[pointer] = iter(same_place.get(pointer, ()))

    def literal(self, value: object, place: RequestPath, depth: int = 0) -> object:
        """An enumerated value."""
        self._count(1, place)
        place.check_at_most(depth, MAX_DEPTH, "nested values")
        if isinstance(value, dict):
            return {self.text(name, place): self.literal(item, place, depth + 1) for name, item in value.items()}
        if isinstance(value, list):
            return [self.literal(item, place, depth + 1) for item in value]
        if isinstance(value, str):
            return self.text(value, place)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return number_of(value, place, smallest=0.0)
        return value

    def multiple_of(self, value: object, place: RequestPath) -> object:
        number = number_of(value, place)
        step = Fraction(str(number))
        if step <= 0:
            place.refuse(value, "a number above 0")
        before = self._steps
        self._steps = Fraction(
            math.lcm(self._steps.numerator, step.numerator), math.gcd(self._steps.denominator, step.denominator)
        )
        denominator = math.lcm(self._steps.denominator, step.denominator)
        if max(step.numerator, step.denominator, self._steps.numerator, denominator) > MAX_MULTIPLE_OF:
            self._steps = before
            expected = f"a fraction of integers up to {MAX_MULTIPLE_OF}, also as common multiple with others"
            place.value_not_enforced(value, expected)
        return number


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _list(schema: object, keyword: str) -> list[Any]:
    value = schema.get(keyword) if isinstance(schema, dict) else None
    return value if isinstance(value, list) else []


def _only_reference(value: object) -> str | None:
    """The pointer of a schema that consists only of a reference into the same schema; None for any other."""
    pointer = value.get("$ref") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(pointer, str) or not _is_local(pointer):
        return None
    return pointer if all(name == "$ref" or is_annotation(name) for name in value) else None


def _is_local(pointer: str) -> bool:
    return pointer == "#" or pointer.startswith("#/")


def _unescaped(part: str) -> str:
    """A part of a JSON pointer in a URI fragment."""
    return unquote(part).replace("~1", "/").replace("~0", "~")
