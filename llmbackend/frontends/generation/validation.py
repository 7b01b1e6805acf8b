"""Field types for the models of request bodies, and their errors.

Invariant: an invalid body becomes one OpenAIError with the field's path, its value and the expectation. Validation of a
list stops at its first invalid item, so the number of errors is bounded by the number of known fields.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    InstanceOf,
    Strict,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from ..http.errors import JsonObject, OpenAIError, as_json, missing, refuse

INT32_MAX = 2**31 - 1
_IDS_PER_CALL = 8192
"""Token ids that are checked without releasing the GIL."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Replaces all errors of the annotated type by "expected `text`"."""

    text: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.custom_error_schema(handler(source), "expected", custom_error_message=self.text)


@dataclass(frozen=True, slots=True)
class Range:
    """An int or float from `low` to `high`, both inclusive, or above `low`."""

    low: int
    high: int = INT32_MAX
    is_above: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        low, high = self.low, self.high
        limits: JsonObject = {"gt" if self.is_above else "ge": low, "le": high}
        bounds = f"above {low} and at most {high}" if self.is_above else f"from {low} to {high}"
        schema: CoreSchema
        if source is int:
            schema, text = core_schema.int_schema(strict=True, **limits), f"an integer {bounds}"
        else:
            schema, text = core_schema.float_schema(strict=True, allow_inf_nan=False, **limits), f"a number {bounds}"
        return core_schema.custom_error_schema(schema, "out_of_range", custom_error_message=text)


@dataclass(frozen=True, slots=True)
class Items:
    """A list of `least` to `most` items, validated up to the first invalid one."""

    least: int = 0
    most: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        limits = {"min_length": self.least or None, "max_length": self.most}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        return cast(CoreSchema, {**handler(source), **given, "fail_fast": True})


@dataclass(frozen=True, slots=True)
class IsTokenIds:
    """A list of at least `least` token ids, checked in parts: two million at once would hold the GIL for 0.1 s."""

    least: int = 0

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonObject:
        items = {"type": "integer", "minimum": 0, "maximum": INT32_MAX}
        return {"type": "array", "items": items} | ({"minItems": self.least} if self.least else {})

    def _check(self, value: object) -> object:
        if isinstance(value, list) and len(value) >= self.least:
            parts = (value[start : start + _IDS_PER_CALL] for start in range(0, len(value), _IDS_PER_CALL))
            if all(set(map(type, part)) == {int} and min(part) >= 0 and max(part) <= INT32_MAX for part in parts):
                return value
        raise PydanticCustomError("expected", "a list of token ids")


class Only:
    """A field without an effect: null, or one of `accepted`: values that request what the server does anyway.

    reason: why other values are refused
    """

    def __init__(self, *accepted: Any, reason: str = "") -> None:
        self.accepted = accepted
        self.reason = reason

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonObject:
        return {"enum": [*self.accepted, None]} | ({"description": self.reason} if self.reason else {})

    def _check(self, value: object) -> object:
        if value is None or any(value == item and type(value) is type(item) for item in self.accepted):
            return value
        why = f": {self.reason}" if self.reason else " yet"
        allowed = " or ".join(f"'{item}'" if isinstance(item, str) else as_json(item) for item in self.accepted)
        only = f"; only {allowed} is accepted" if allowed else ""
        raise PydanticCustomError("unsupported", "{hint}", {"hint": why + only})


class OfTypes:
    """An object of one of the served types."""

    def __init__(
        self,
        forms: Mapping[str, Any],
        refused: Mapping[str, str] = MappingProxyType({}),
        type_of: Callable[[Mapping[str, Any]], object] = itemgetter("type"),
    ) -> None:
        """forms: by the served type; refused: known types → why they are refused
        type_of: for objects that may omit `type`
        """
        self._forms = forms
        self._refused = refused
        self._type_of = type_of

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {f"({kind})": handler.generate_schema(form) for kind, form in self._forms.items()}
        only, *others = choices.values()
        union = core_schema.tagged_union_schema(choices, lambda value: f"({self._type_of(value)})")
        return core_schema.no_info_before_validator_function(self._check, union if others else only)

    def _check(self, value: object) -> object:
        if not isinstance(value, dict):
            raise PydanticCustomError("dict_type", "an object")
        try:
            kind = self._type_of(value)
        except KeyError:
            kind = None
        if isinstance(kind, str) and kind in self._forms:
            return value
        reason = self._refused.get(kind) if isinstance(kind, str) else None
        expected = "" if reason else " or ".join(f"'{name}'" for name in sorted(self._forms))
        context = {"kind": kind, "reason": reason or "", "expected": expected}
        raise PydanticCustomError("wrong_type", "wrong type", context)


class ClosedObject(BaseModel):
    """An object without unknown fields. Only models read directly build a validator at import (`defer_build=False`)."""

    model_config = ConfigDict(extra="forbid", defer_build=True)
    field_aliases: ClassVar[frozenset[str]] = frozenset()
    """Names of fields that pydantic reserves."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: object) -> object:
        """Stops at the first unknown field; pydantic would collect an error for each."""
        if isinstance(value, dict):
            for name in value:
                if name not in cls.__pydantic_fields__ and name not in cls.field_aliases:
                    raise PydanticCustomError("unknown_field", "{field}", {"field": name})
        return value


Flag = Annotated[bool, Strict()]
AnyObject = InstanceOf[JsonObject]
"""An object with any content. Unlike pydantic's dicts, it is not copied."""
NonEmpty = Annotated[str, StringConstraints(min_length=1), Expected("a non-empty string")]
TokenIds = Annotated[list[int], IsTokenIds()]
Model = TypeVar("Model", bound=ClosedObject)
_TEXT = "(text)"
"""Tag of content that is a string, whose errors pydantic reports first even for a list of parts."""
_EXPECTED = {
    "string_type": "a string",
    "bool_type": "true or false",
    "dict_type": "an object",
    "is_instance_of": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "list_type": "a list",
    "too_short": "a non-empty list",
}


def read(model: type[Model], body: JsonObject) -> Model:
    """`body` as a `model`. Raises OpenAIError naming the first invalid, unknown or unsupported field."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        if first["loc"][-1:] == (_TEXT,) and isinstance(first["input"], list):
            first = others[0]
        raise _refusal(first) from None


def refuse_unknown(value: Mapping[str, Any], fields: frozenset[str], param: str, *, may_be_null: bool = False) -> None:
    """Raises OpenAIError for a field of the object `param` that is not one of `fields`."""
    if value.keys() <= fields:
        return
    for name in value:
        if name not in fields and not (may_be_null and value[name] is None):
            raise _unknown(f"{param}.{name}")


def _refusal(error: ErrorDetails) -> OpenAIError:
    kind, value, param = error["type"], error["input"], _param(error["loc"])
    if kind == "unknown_field":
        return _unknown(_member(param, error["ctx"]["field"]))
    if kind == "unsupported":
        return _unsupported(f"'{param}' is not supported{error['msg']}", param)
    if kind == "wrong_type":
        return _wrong_type(_member(param, "type"), **error["ctx"])
    if kind == "union_tag_not_found" and error["ctx"]["discriminator"].endswith("()"):
        return _without_role(param, value)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        field = error["ctx"]["discriminator"].strip("'")
        return _unknown_kind(_member(param, field), value.get(field), error["ctx"].get("expected_tags", ""))
    if kind == "missing" or (value is None and isinstance(error["loc"][-1], str)):
        return missing(param)
    if kind == "out_of_range":
        return refuse(param, error["msg"], value)
    if error["loc"][-1:] == (_TEXT,):
        return refuse(param, "a string or a list of text parts", value)
    return refuse(param, error["msg"] if kind == "expected" else _EXPECTED.get(kind, error["msg"]), value)


def _unknown(param: str) -> OpenAIError:
    return OpenAIError(f"unknown field '{param}'", param=param, code="unknown_parameter")


def _unsupported(message: str, param: str) -> OpenAIError:
    return OpenAIError(message, param=param, code="unsupported_parameter")


def _wrong_type(param: str, kind: object, reason: str, expected: str) -> OpenAIError:
    if kind is None:
        return missing(param)
    if not reason:
        return refuse(param, expected, kind)
    return _unsupported(f"'{param}' is {as_json(kind)}, which is not supported: {reason}", param)


def _without_role(param: str, message: object) -> OpenAIError:
    """The error for a message without a role."""
    if not isinstance(message, dict):
        return refuse(param, "an object", message)
    role = message.get("role")
    return missing(f"{param}.role") if role is None else refuse(f"{param}.role", "a non-empty string", role)


def _unknown_kind(param: str, kind: object, expected: str) -> OpenAIError:
    if kind is None:
        return missing(param)
    shown = as_json(kind).strip('"')
    return _unsupported(f"content part type '{shown}' is not supported, expected one of {expected}", param)


def _param(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "tool", "name")` → `messages[0].name`, without pydantic's tags: kinds of messages and parts
    after an index, and those in parentheses."""
    param, array, after_index = "", "", False
    for part in location:
        if isinstance(part, int):
            param += f"[{part}]"
        elif not part.startswith("(") and not (after_index and array in ("messages", "content")):
            param, array = _member(param, part), part
        after_index = isinstance(part, int)
    return param


def _member(param: str, field: str) -> str:
    return f"{param}.{field}" if param else field
