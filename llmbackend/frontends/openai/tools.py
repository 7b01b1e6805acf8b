"""Tools: what a chat may hold of them, and what it asks for with them.

For: schema.py, whose chat request has these fields, and requests.py. Does not know: how a model writes calls.
Invariant: a ToolUse is complete and without contradictions: its callable functions are among its tools, and the older
fields `functions` and `function_call` say the same in another form.
Source: OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, StringConstraints, WithJsonSchema

from .errors import JsonObject, OpenAIError, missing, refuse
from .validation import AnyObject, ClosedObject, Expected, Flag, Items, Only, refuse_unknown

MAX_TOOLS = 128
_NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}}
_NAME_PATTERN = "^[a-zA-Z0-9_.-]{1,128}$"
ToolName = Annotated[
    str,
    StringConstraints(pattern=_NAME_PATTERN),
    Expected("1 to 128 letters, digits, underscores, dashes or dots"),
]


class FunctionDefinition(ClosedObject):
    name: ToolName
    description: str | None = None
    parameters: AnyObject | None = Field(None, description="A JSON Schema; left out: no arguments.")
    strict: Flag | None = Field(None, description="The arguments follow the schema, whatever the model would write.")

    def for_template(self) -> JsonObject:
        """As chat templates read it: without `strict`, and with all that they may name."""
        return {
            "name": self.name,
            "description": self.description or "",
            "parameters": _NO_PARAMETERS if self.parameters is None else self.parameters,
        }


class FunctionTool(ClosedObject):
    type: Annotated[Any, Only("function")]
    function: FunctionDefinition
    custom: Annotated[Any, Only()] = None


def _named_schema(field: str) -> JsonObject:
    named: JsonObject = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
    return {
        "type": "object",
        "required": ["type", field],
        "properties": {"type": {"const": field}, field: named | {"additionalProperties": False}},
        "additionalProperties": False,
    }


_ALLOWED_SCHEMA: JsonObject = {
    "type": "object",
    "required": ["type", "allowed_tools"],
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "required": ["mode", "tools"],
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "minItems": 1, "items": _named_schema("function")},
            },
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}
Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Mode
    names: tuple[str, ...] | None = None
    """The functions that may be called; None: all of them."""
    is_named: bool = False
    """One function, which is called once."""


def _read_tool_choice(value: object) -> ToolChoice:
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("function", "allowed_tools"):
        expected = '"none", "auto", "required", or an object of type "function" or "allowed_tools"'
        raise refuse("tool_choice", expected, value)
    refuse_unknown(value, frozenset(("type", kind)), "tool_choice", may_be_null=True)
    if kind == "function":
        return ToolChoice("required", (_function_name(value, "tool_choice"),), is_named=True)
    return _read_allowed_tools(value.get("allowed_tools"), "tool_choice.allowed_tools")


def _read_allowed_tools(value: object, param: str) -> ToolChoice:
    if not isinstance(value, dict):
        raise refuse(param, "an object with 'mode' and 'tools'", value)
    refuse_unknown(value, frozenset(("mode", "tools")), param, may_be_null=True)
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise refuse(f"{param}.mode", '"auto" or "required"', mode)
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        raise refuse(f"{param}.tools", f"a list of 1 to {MAX_TOOLS} tools", tools)
    names = [_function_name(tool, f"{param}.tools[{index}]") for index, tool in enumerate(tools)]
    return ToolChoice(mode, tuple(names))


def _function_name(value: object, param: str) -> str:
    """Of `{"type": "function", "function": {"name": …}}`."""
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise refuse(param, 'an object {"type": "function", "function": {"name": …}}', value)
    return name


def _read_function_call(value: object) -> ToolChoice:
    """The older form of `tool_choice`."""
    if value in ("none", "auto"):
        return ToolChoice(value)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str):
        raise refuse("function_call", '"none", "auto", or an object with a \'name\'', value)
    refuse_unknown(value, frozenset(("name",)), "function_call", may_be_null=True)
    return ToolChoice("required", (name,), is_named=True)


def _check_count(field: str) -> BeforeValidator:
    def check(value: object) -> object:
        if isinstance(value, list) and len(value) > MAX_TOOLS:
            message = f"'{field}' holds {len(value)} tools, expected at most {MAX_TOOLS}"
            raise OpenAIError(message, param=field, code="invalid_value")
        return value

    return BeforeValidator(check)


_TOOL_CHOICE_SCHEMA: JsonObject = {
    "anyOf": [{"enum": ["none", "auto", "required"]}, _named_schema("function"), _ALLOWED_SCHEMA]
}
_FUNCTION_CALL_SCHEMA: JsonObject = {
    "anyOf": [{"enum": ["none", "auto"]}, _named_schema("function")["properties"]["function"]]
}


class ToolFields(ClosedObject):
    """The fields of a chat that are about tools. A named tool must be one of `tools`."""

    tools: Annotated[list[FunctionTool], Items(0, MAX_TOOLS), _check_count("tools")] | None = None
    tool_choice: Annotated[Any, PlainValidator(_read_tool_choice), WithJsonSchema(_TOOL_CHOICE_SCHEMA)] | None = None
    parallel_tool_calls: Flag | None = Field(None, description="false: at most one call.")
    functions: Annotated[list[FunctionDefinition], Items(0, MAX_TOOLS), _check_count("functions")] | None = Field(
        None, description="The older form of tools, answered in the older form."
    )
    function_call: Annotated[Any, PlainValidator(_read_function_call), WithJsonSchema(_FUNCTION_CALL_SCHEMA)] | None = (
        None
    )

    def tool_use(self) -> ToolUse | None:
        """None where no tool may be called. Raises OpenAIError naming what contradicts what."""
        is_legacy = bool(self.functions) or self.function_call is not None
        if is_legacy and (self.tools or self.tool_choice is not None):
            raise OpenAIError("'functions' and 'function_call' can not be sent with 'tools'", param="functions")
        max_calls = 1 if self.parallel_tool_calls is False else None
        if is_legacy:
            functions = [
                OfferedTool.of(function, f"functions[{index}].parameters", f"functions[{index}].name")
                for index, function in enumerate(self.functions or [])
            ]
            return tool_use(functions, self.function_call, max_calls, LEGACY_FIELD_NAMES)
        tools = [
            OfferedTool.of(tool.function, f"tools[{index}].function.parameters", f"tools[{index}].function.name")
            for index, tool in enumerate(self.tools or [])
        ]
        return tool_use(tools, self.tool_choice, max_calls)


INPUT = "input"
"""The parameter of a custom tool: templates and models know it as a function with this one string."""


@dataclass(frozen=True, slots=True)
class InputGrammar:
    """What the input of a custom tool is held to."""

    syntax: Literal["lark", "regex"]
    definition: str


@dataclass(frozen=True, slots=True)
class Function:
    """One that may be called."""

    name: str
    parameters: JsonObject
    """JSON Schema."""
    is_strict: bool
    param: str = "tools"
    """Where in the request its schema stands (`tools[1].function.parameters`)."""
    input_grammar: InputGrammar | None = None
    """Of a custom tool: its only parameter, the string INPUT, follows it."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a chat asks for with its tools."""

    tools: Sequence[JsonObject]
    """All of them, for the chat template."""
    functions: tuple[Function, ...]
    """Those that may be called."""
    is_required: bool
    """Whether one of them must be called."""
    max_calls: int | None
    """None: any number."""
    is_legacy: bool
    """Whether the answer has the older form, `function_call`."""

    @property
    def field(self) -> str:
        return "functions" if self.is_legacy else "tools"

    @property
    def is_restricted(self) -> bool:
        """Whether some calls are wrong which the model may know how to write."""
        is_held = any(function.is_strict or function.input_grammar is not None for function in self.functions)
        return is_held or len(self.functions) < len(self.tools)

    @property
    def needs_grammar(self) -> bool:
        """Whether the answer is to be held to what was asked for, whatever the model would write."""
        return self.is_required or self.is_restricted


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool of a request."""

    function: Function
    for_template: JsonObject
    """As chat templates read it: `name`, `description`, `parameters`."""
    name_param: str
    """Where in the request its name stands."""

    @classmethod
    def of(cls, definition: FunctionDefinition, param: str, name_param: str) -> OfferedTool:
        """param: where its schema stands"""
        parameters: Mapping[str, Any] = _NO_PARAMETERS if definition.parameters is None else definition.parameters
        function = Function(definition.name, dict(parameters), bool(definition.strict), param)
        return cls(function, definition.for_template(), name_param)


@dataclass(frozen=True, slots=True)
class ToolFieldNames:
    """What an API calls its fields."""

    tools: str = "tools"
    choice: str = "tool_choice"


FIELD_NAMES = ToolFieldNames()
LEGACY_FIELD_NAMES = ToolFieldNames("functions", "function_call")


def tool_use(
    offered: Sequence[OfferedTool],
    choice: ToolChoice | None,
    max_calls: int | None = None,
    fields: ToolFieldNames = FIELD_NAMES,
) -> ToolUse | None:
    """None where no tool may be called. Raises OpenAIError naming what contradicts what."""
    known: dict[str, OfferedTool] = {}
    for tool in offered:
        if known.setdefault(tool.function.name, tool) is not tool:
            raise refuse(tool.name_param, "a name that no other tool has", tool.function.name)
    choice = choice or ToolChoice("auto" if offered else "none")
    if choice.mode != "none" and not offered and (choice.mode == "required" or choice.names):
        raise missing(fields.tools)
    for name in choice.names or ():
        if name not in known:
            raise refuse(fields.choice, f"a function of '{fields.tools}'", name)
    if choice.mode == "none" or not offered:
        return None
    names = known if choice.names is None else choice.names
    is_legacy = fields == LEGACY_FIELD_NAMES
    return ToolUse(
        tools=[{"type": "function", "function": tool.for_template} for tool in offered],
        functions=tuple(tool.function for tool in offered if tool.function.name in names),
        is_required=choice.mode == "required",
        max_calls=1 if choice.is_named or is_legacy else max_calls,
        is_legacy=is_legacy,
    )
