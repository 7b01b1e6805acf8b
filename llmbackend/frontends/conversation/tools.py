"""Tools of a conversation: which ones the model sees, and which it may or must call.

Independent of API formats and of how models write calls. Invariant: a ToolUse's callable functions are among its tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ..http.errors import JsonObject, OpenAIError, missing, refuse

MAX_TOOLS: Final = 128
NAME_PATTERN: Final = "^[a-zA-Z0-9_.-]{1,128}$"
NAME_EXPECTED: Final = "1 to 128 letters, digits, underscores, dashes or dots"
INPUT: Final = "input"
"""The only parameter of a custom tool, which templates and models see as a function."""
NO_PARAMETERS: Final[JsonObject] = {"type": "object", "properties": {}}
Mode = Literal["none", "auto", "required"]
ToolKind = Literal["function", "custom", "tool_search"]
"""The input of `custom` is a text; with `tool_search` the client finds more tools."""


@dataclass(frozen=True, slots=True)
class ChosenTool:
    """A tool named by a client's choice, whether or not it is among the request's tools."""

    name: str
    param: str
    """The field that names the tool."""
    expected: str
    """The expectation shown in the error if no tool has this name."""
    kind: ToolKind = "function"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Mode
    tools: tuple[ChosenTool, ...] | None = None
    """The tools that may be called; None: all."""
    is_named: bool = False
    """Whether it is a single tool, which must be called once."""


@dataclass(frozen=True, slots=True)
class InputGrammar:
    """Constrains the input of a custom tool."""

    syntax: Literal["lark", "regex"]
    definition: str


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    parameters: JsonObject
    """JSON Schema."""
    is_strict: bool
    param: str = "tools"
    """Field of its schema (`tools[1].function.parameters`)."""
    input_grammar: InputGrammar | None = None
    """The grammar of a custom tool's INPUT."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    kind: ToolKind
    name: str
    namespace: str | None = None
    """The model calls a tool of a namespace by both names."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool of a request, callable or not."""

    function: Function
    description: str
    name_param: str
    """The field that contains its name."""
    named: NamedTool

    @classmethod
    def of(
        cls, name: str, description: str | None, parameters: JsonObject | None, is_strict: bool, param: str, at: str
    ) -> OfferedTool:
        """A function tool. param: field of its schema; at: field of its name"""
        function = Function(name, NO_PARAMETERS if parameters is None else parameters, is_strict, param)
        return cls(function, description or "", at, NamedTool("function", name))

    def for_template(self) -> JsonObject:
        """The tool with every field that chat templates may read."""
        function = self.function
        fields = {"name": function.name, "description": self.description, "parameters": function.parameters}
        return {"type": "function", "function": fields}

    def is_chosen_by(self, chosen: ChosenTool) -> bool:
        return chosen.kind == self.named.kind and chosen.name in (self.function.name, self.named.name)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a chat may use its tools."""

    tools: Sequence[JsonObject]
    """All tools, for the chat template."""
    functions: tuple[Function, ...]
    """The callable functions."""
    is_required: bool
    """Whether the model must call one."""
    max_calls: int | None
    """None: any number."""
    is_legacy: bool
    """Whether the answer has `function_call`, the older format."""

    @property
    def field(self) -> str:
        return "functions" if self.is_legacy else "tools"

    @property
    def needs_grammar(self) -> bool:
        """Whether decoding must be constrained by a grammar."""
        is_strict = any(function.is_strict or function.input_grammar is not None for function in self.functions)
        return self.is_required or is_strict or len(self.functions) < len(self.tools)


def check_tool_count(tools: Sequence[object], field: str) -> None:
    """Raises OpenAIError if there are more than MAX_TOOLS. field: of the request"""
    if len(tools) > MAX_TOOLS:
        message = f"'{field}' holds {len(tools)} tools, expected at most {MAX_TOOLS}"
        raise OpenAIError(message, param=field, code="invalid_value")


def tool_use(
    offered: Sequence[OfferedTool], choice: ToolChoice | None, max_calls: int | None = None, *, is_legacy: bool = False
) -> ToolUse | None:
    """None if no tool may be called. is_legacy: the fields are chat's older ones. Raises OpenAIError on conflict."""
    known: dict[str, OfferedTool] = {}
    for tool in offered:
        if known.setdefault(tool.function.name, tool) is not tool:
            raise refuse(tool.name_param, "a name that is unique among the tools", tool.function.name)
    choice = choice or ToolChoice("auto" if offered else "none")
    if choice.mode != "none" and not offered and (choice.mode == "required" or choice.tools):
        raise missing("functions" if is_legacy else "tools")
    names = known.keys() if choice.tools is None else {_called_name(one, offered) for one in choice.tools}
    if choice.mode == "none" or not offered:
        return None
    return ToolUse(
        tools=[tool.for_template() for tool in offered],
        functions=tuple(tool.function for tool in offered if tool.function.name in names),
        is_required=choice.mode == "required",
        max_calls=1 if choice.is_named or is_legacy else max_calls,
        is_legacy=is_legacy,
    )


def _called_name(chosen: ChosenTool, offered: Sequence[OfferedTool]) -> str:
    """The name by which the model calls the tool."""
    for tool in offered:
        if tool.is_chosen_by(chosen):
            return tool.function.name
    raise refuse(chosen.param, chosen.expected, chosen.name)
