"""Groups of fields shared by several bodies: labels, reasoning, structured output, tool choice.

Invariants: labels do not affect answers; at most one field sets a constraint. Sources: OpenAI's API reference, vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from ..conversation.tools import MAX_TOOLS, ChosenTool, ToolChoice
from ..generation.request import FORMER_FIELDS, STRUCTURED_OUTPUTS
from ..generation.validation import AnyObject, ClosedObject, Expected, Flag, Items, NonEmpty, Range, refuse_unknown
from ..http.errors import JsonObject, OpenAIError, missing, refuse

_MAX_PAIRS, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512


def _check_metadata(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise refuse("metadata", "an object", value)
    if len(value) > _MAX_PAIRS:
        raise refuse("metadata", f"at most {_MAX_PAIRS} pairs", value)
    for key, text in value.items():
        if len(key) > _MAX_KEY_CHARS:
            raise refuse("metadata", f"keys of at most {_MAX_KEY_CHARS} characters", key)
        if not isinstance(text, str) or len(text) > _MAX_VALUE_CHARS:
            raise refuse(f"metadata.{key}", f"a string of at most {_MAX_VALUE_CHARS} characters", text)
    return value


_JSON_SCHEMA: JsonObject = {
    "maxProperties": _MAX_PAIRS,
    "propertyNames": {"maxLength": _MAX_KEY_CHARS},
    "additionalProperties": {"type": "string", "maxLength": _MAX_VALUE_CHARS},
}
Metadata = Annotated[
    Annotated[AnyObject, Field(json_schema_extra=_JSON_SCHEMA)] | None, BeforeValidator(_check_metadata)
]


class Labels(ClosedObject):
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    session_id: str | None = None
    metadata: Metadata = None

    def sent_labels(self) -> dict[str, Any]:
        fields = self.__dict__
        return {name: fields[name] for name in Labels.__pydantic_fields__ if fields[name] is not None}


Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    Expected('one of "none", "minimal", "low", "medium", "high", "xhigh", "max"'),
]


ThinkingTokenBudget = Annotated[
    Annotated[int, Range(-1)] | None,
    AfterValidator(lambda tokens: None if tokens == -1 else tokens),
    Field(description="Maximum number of reasoning tokens; -1: no limit."),
]


class ReasoningFields(ClosedObject):
    reasoning_effort: Effort | None = Field(None, description="Passed to the chat template.")
    include_reasoning: Flag | None = Field(None, description="false: the reasoning is left out of the answer.")
    thinking_token_budget: ThinkingTokenBudget = None


RESPONSE_FORMAT = "response_format"
_Schema = Annotated[AnyObject | str, Expected("a JSON schema: an object, or its JSON text")]
_Choices = Annotated[list[str], Items(1)]


class NamedSchema(ClosedObject):
    """A schema in OpenAI's envelope. It is enforced with and without `strict`, which refuses unsupported keywords;
    `name` and `description` are labels."""

    field_aliases: ClassVar[frozenset[str]] = frozenset(("schema",))
    name: NonEmpty
    description: str | None = None
    schema_: Annotated[AnyObject | None, Field(alias="schema")] = None
    strict: Flag | None = None


class ResponseFormat(ClosedObject):
    """Text, a JSON object, JSON that matches a schema, or text with tags."""

    field_aliases: ClassVar[frozenset[str]] = frozenset(("schema",))
    type: Annotated[
        Literal["text", "json_object", "json_schema", "structural_tag"],
        Expected("one of text, json_object, json_schema, structural_tag"),
    ]
    json_schema: NamedSchema | None = Field(None, description="With the type json_schema.")
    schema_: Annotated[
        AnyObject | None,
        Field(alias="schema", description="With the type json_object: a schema, as in llama.cpp and Together."),
    ] = None
    format: AnyObject | None = Field(None, description="With the type structural_tag, in XGrammar's form.")
    structures: Annotated[list[AnyObject], Items(1)] | None = Field(
        None, description="With the type structural_tag, in vLLM's former form with triggers."
    )
    triggers: Annotated[list[NonEmpty], Items(1)] | None = None

    def constraint(self) -> JsonObject | None:
        """The constraint, as vLLM's `structured_outputs`. Raises OpenAIError for a field of another type."""
        fields = {name: value for name, value in self.__dict__.items() if value is not None and name != "type"}
        for name in fields:
            if name not in _FIELDS_OF_TYPE[self.type]:
                param = f"{RESPONSE_FORMAT}.{name.rstrip('_')}"
                raise OpenAIError(f"'{param}' does not belong to the type '{self.type}'", param=param)
        if self.type == "json_schema":
            if self.json_schema is None:
                raise missing(f"{RESPONSE_FORMAT}.json_schema")
            if self.json_schema.schema_ is None:
                raise missing(f"{RESPONSE_FORMAT}.json_schema.schema")
            return constraint_of(self.json_schema.schema_, self.json_schema.strict)
        if self.type == "structural_tag":
            return {"structural_tag": {"type": self.type, **fields}}
        if self.schema_ is not None:
            return constraint_of(self.schema_)
        return {"json_object": True} if self.type == "json_object" else None


def constraint_of(schema: JsonObject, strict: bool | None = None) -> JsonObject:
    """The constraint, as vLLM's `structured_outputs`. strict: unsupported keywords are refused"""
    return {"json": schema, "strict": True} if strict else {"json": schema}


_FIELDS_OF_TYPE: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema_",),
    "json_schema": ("json_schema",),
    "structural_tag": ("format", "structures", "triggers"),
}


class StructuredOutputFields(ClosedObject):
    """Fields of chats and completions."""

    response_format: ResponseFormat | None = None
    structured_outputs: AnyObject | None = Field(
        None, description="One of json, regex, choice, grammar, json_object, structural_tag (a vLLM extra)."
    )
    guided_json: _Schema | None = Field(None, description="As structured_outputs.json.")
    guided_regex: NonEmpty | None = Field(None, description="As structured_outputs.regex.")
    guided_choice: _Choices | None = Field(None, description="As structured_outputs.choice.")
    guided_grammar: NonEmpty | None = Field(None, description="As structured_outputs.grammar.")
    structural_tag: NonEmpty | None = Field(None, description="As structured_outputs.structural_tag, as JSON text.")
    guided_decoding_backend: Annotated[Literal["auto", "guidance"], Expected("auto or guidance")] | None = None
    guided_whitespace_pattern: NonEmpty | None = Field(
        None, description="A regular expression for the whitespace in JSON."
    )

    def chosen_structure(self) -> JsonObject:
        """The sampling parameters of the constraint; empty if there is none. Raises OpenAIError."""
        sent = {name: self.__dict__[name] for name in (STRUCTURED_OUTPUTS, *FORMER_FIELDS)}
        chosen = {name: value for name, value in sent.items() if value is not None}
        constraint = self.response_format.constraint() if self.response_format else None
        if constraint is None:
            return chosen
        if chosen:
            name = next(iter(chosen))
            raise OpenAIError(f"'{RESPONSE_FORMAT}' and '{name}' are mutually exclusive", param=name)
        return {STRUCTURED_OUTPUTS: constraint}

    @property
    def structure_field(self) -> str:
        """The client's field that sets the constraint."""
        return RESPONSE_FORMAT if self.response_format is not None else STRUCTURED_OUTPUTS

    @property
    def schema_field(self) -> str:
        """The path of its schema."""
        is_bare = self.response_format is not None and self.response_format.type == "json_object"
        return f"{RESPONSE_FORMAT}.schema" if is_bare else f"{RESPONSE_FORMAT}.json_schema.schema"


_FIELD: Final = "tool_choice"
_FUNCTION_CALL: Final = "function_call"
MODES: Final = ("none", "auto", "required")


def _read_of_chat(value: object) -> ToolChoice:
    if value in MODES:
        return ToolChoice(value)
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("function", "allowed_tools"):
        expected = '"none", "auto", "required", or an object of type "function" or "allowed_tools"'
        raise refuse(_FIELD, expected, value)
    refuse_unknown(value, frozenset(("type", kind)), _FIELD, may_be_null=True)
    if kind == "function":
        return ToolChoice("required", (_named_in_chat(value, _FIELD),), is_named=True)
    param, allowed = f"{_FIELD}.allowed_tools", value.get("allowed_tools")
    if not isinstance(allowed, dict):
        raise refuse(param, "an object with 'mode' and 'tools'", allowed)
    refuse_unknown(allowed, frozenset(("mode", "tools")), param, may_be_null=True)
    return read_allowed(allowed, param, _named_in_chat)


def _named_in_chat(value: object, param: str) -> ChosenTool:
    """Reads `{"type": "function", "function": {"name": …}}`."""
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise refuse(param, 'an object {"type": "function", "function": {"name": …}}', value)
    return ChosenTool(name, _FIELD, "a function of 'tools'")


def _read_function_call(value: object) -> ToolChoice:
    if value in ("none", "auto"):
        return ToolChoice(value)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str):
        raise refuse(_FUNCTION_CALL, '"none", "auto", or an object with a \'name\'', value)
    refuse_unknown(value, frozenset(("name",)), _FUNCTION_CALL, may_be_null=True)
    return ToolChoice("required", (ChosenTool(name, _FUNCTION_CALL, "a function of 'functions'"),), is_named=True)


def read_allowed(value: JsonObject, param: str, read: Callable[[object, str], ChosenTool]) -> ToolChoice:
    """Reads the object `param`: `{"mode": …, "tools": […]}`. read: reads one tool. Raises OpenAIError."""
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise refuse(f"{param}.mode", '"auto" or "required"', mode)
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        raise refuse(f"{param}.tools", f"a list of 1 to {MAX_TOOLS} tools", tools)
    return ToolChoice(mode, tuple(read(tool, f"{param}.tools[{index}]") for index, tool in enumerate(tools)))


def closed(properties: JsonObject) -> JsonObject:
    """The JSON Schema of an object with exactly these properties."""
    return {"type": "object", "required": [*properties], "properties": properties, "additionalProperties": False}


_NAME: JsonObject = {"name": {"type": "string"}}
_CHAT_NAMED = closed({"type": {"const": "function"}, "function": closed(_NAME)})
_CHAT_ALLOWED = {
    "mode": {"enum": ["auto", "required"]},
    "tools": {"type": "array", "minItems": 1, "items": _CHAT_NAMED},
}
_CHAT_SCHEMA: JsonObject = {
    "anyOf": [
        {"enum": [*MODES]},
        _CHAT_NAMED,
        closed({"type": {"const": "allowed_tools"}, "allowed_tools": closed(_CHAT_ALLOWED)}),
    ]
}
ChatToolChoice = Annotated[Any, PlainValidator(_read_of_chat), WithJsonSchema(_CHAT_SCHEMA)]
FunctionCall = Annotated[
    Any, PlainValidator(_read_function_call), WithJsonSchema({"anyOf": [{"enum": ["none", "auto"]}, closed(_NAME)]})
]
