"""The tools of a Responses request, and the functions that the model gets for them.

Invariants: hosted tools are refused by name, except web search, which is dropped (docs/responses_api.md); a custom tool
is a function with one string, `input`; a namespaced tool is called by both names; tools of items follow the request's
own. Each name that the model can call identifies one tool. Sources: OpenAI's API reference, `Tool`; what Codex sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, StringConstraints, WithJsonSchema
from typing_extensions import TypedDict  # pydantic accepts typing.TypedDict only from Python 3.12 on

from ...conversation.tools import (
    INPUT,
    MAX_TOOLS,
    NAME_EXPECTED,
    NAME_PATTERN,
    NO_PARAMETERS,
    ChosenTool,
    Function,
    InputGrammar,
    NamedTool,
    OfferedTool,
    ToolChoice,
    ToolKind,
    ToolUse,
    tool_use,
)
from ...generation.validation import (
    AnyObject,
    ClosedObject,
    Expected,
    Flag,
    Items,
    NonEmpty,
    OfTypes,
    Only,
    refuse_unknown,
)
from ...http.errors import JsonObject, OpenAIError, refuse
from ..fields import MODES, closed, read_allowed

DIRECT_ONLY = "only the model calls tools"
HOSTED = "this server has no tools of its own"
_OTHER_FORM = "the tool has a format of its own; send it as a function or custom tool"
WEB_SEARCHES = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")
REFUSED_TOOLS: Mapping[str, str] = {
    **dict.fromkeys(
        ("file_search", "computer", "computer_use", "computer_use_preview", "mcp", "code_interpreter",
         "programmatic_tool_calling", "image_generation"),
        HOSTED,
    ),
    **dict.fromkeys(("local_shell", "shell", "apply_patch"), _OTHER_FORM),
}  # fmt: skip
ToolName = Annotated[str, StringConstraints(pattern=NAME_PATTERN), Expected(NAME_EXPECTED)]


class _Offered(ClosedObject):
    field_aliases: ClassVar[frozenset[str]] = frozenset(("async",))
    name: ToolName
    description: str | None = None
    defer_loading: Flag | None = Field(None, description="Only for tools that a client's search has found.")
    allowed_callers: Annotated[Any, Only(["direct"], reason=DIRECT_ONLY)] = None
    async_: Annotated[Any, Only(False, reason="calls do not run asynchronously"), Field(alias="async")] = None


class FunctionToolFields(_Offered):
    type: Literal["function"]
    parameters: AnyObject | None = Field(None, description="A JSON Schema; default: no arguments.")
    strict: Flag | None = Field(None, description="Guarantee that the arguments match the schema.")
    output_schema: Annotated[Any, Only(reason="the model reads outputs as text")] = None


class TextFormat(ClosedObject):
    type: Literal["text"]


class GrammarFormat(ClosedObject):
    type: Literal["grammar"]
    syntax: Annotated[Literal["lark", "regex"], Expected('"lark" or "regex"')]
    definition: NonEmpty


class CustomToolFields(_Offered):
    type: Literal["custom"]
    format: Annotated[Any, OfTypes({"text": TextFormat, "grammar": GrammarFormat})] | None = None


class ToolSearchFields(ClosedObject):
    """The client searches for more tools."""

    type: Literal["tool_search"]
    execution: Annotated[Any, Only("client", reason=f'{HOSTED}; use "client" for a search by the client')]
    description: str | None = None
    parameters: AnyObject | None = None


class WebSearchFields(TypedDict):
    """Ignored, including all of its fields."""

    type: Literal["web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"]


_NAMED_FORMS = {"function": FunctionToolFields, "custom": CustomToolFields}


class NamespaceFields(ClosedObject):
    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[Annotated[Any, OfTypes(_NAMED_FORMS)]], Items(1, MAX_TOOLS)]


_FORMS: Mapping[str, type] = {
    **_NAMED_FORMS,
    "tool_search": ToolSearchFields,
    "namespace": NamespaceFields,
    **dict.fromkeys(WEB_SEARCHES, WebSearchFields),
}
Tool = Annotated[Any, OfTypes(_FORMS, REFUSED_TOOLS)]
Tools = Annotated[list[Tool], Items(0, MAX_TOOLS)]


def _read_choice(value: object) -> ToolChoice:
    if value in MODES:
        return ToolChoice(value)
    if not isinstance(value, dict):
        raise refuse(_CHOICE, '"none", "auto", "required", or an object with a \'type\'', value)
    if value.get("type") == "allowed_tools":
        refuse_unknown(value, frozenset(("type", "mode", "tools")), _CHOICE, may_be_null=True)
        return read_allowed(value, _CHOICE, _read_named)
    return ToolChoice("required", (_read_named(value, _CHOICE),), is_named=True)


def _read_named(value: object, param: str) -> ChosenTool:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str):
        raise refuse(param, 'an object {"type": "function", "name": …} or {"type": "custom", "name": …}', value)
    if (tool_kind := _KINDS.get(kind)) is None:
        if reason := REFUSED_TOOLS.get(kind, "this server has no search" if kind in WEB_SEARCHES else ""):
            message = f"'{param}.type' is \"{kind}\", which is not supported: {reason}"
            raise OpenAIError(message, param=f"{param}.type", code="unsupported_parameter")
        raise refuse(f"{param}.type", "'function' or 'custom'", kind)
    refuse_unknown(value, frozenset(("type", "name")), param, may_be_null=True)
    if not isinstance(name := value.get("name"), str):
        raise refuse(f"{param}.name", "the name of a tool", name)
    return ChosenTool(name, f"{param}.name", f"the name of a {kind} tool of 'tools'", tool_kind)


_CHOICE = "tool_choice"
_KINDS: Mapping[str, ToolKind] = {"function": "function", "custom": "custom"}
"""The kind of a tool by the type in a choice."""
_NAMED = [closed({"type": {"const": kind}, "name": {"type": "string"}}) for kind in _KINDS]
_ALLOWED = {
    "type": {"const": "allowed_tools"},
    "mode": {"enum": ["auto", "required"]},
    "tools": {"type": "array", "minItems": 1, "maxItems": MAX_TOOLS, "items": {"anyOf": _NAMED}},
}
ToolChoiceField = Annotated[
    Any,
    PlainValidator(_read_choice),
    WithJsonSchema({"anyOf": [{"enum": [*MODES]}, *_NAMED, closed(_ALLOWED)]}),
]
TOOL_SEARCH = "tool_search"
_MAX_NAME_CHARS = 128
_GRAMMAR_NAMES = {"lark": "Lark grammar", "regex": "regular expression"}
_ANY_SEARCH: JsonObject = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What the tool is for."}},
    "required": ["query"],
}


class OfferedTools:
    """All tools of a request, in the order in which the template shows them."""

    def __init__(self) -> None:
        self._offered: dict[str, OfferedTool] = {}
        """By the names that the model uses."""

    @property
    def named(self) -> dict[str, NamedTool]:
        """The tools by the names that the model uses."""
        return {name: tool.named for name, tool in self._offered.items()}

    def add_own(self, tools: Sequence[Any]) -> None:
        """Adds the tools of the field `tools`. Raises OpenAIError for a duplicate or a deferred tool."""
        for offered, is_deferred in _flat(tools, "tools"):
            if is_deferred:
                reason = f"this server has no tool search; a client's own search is a tool '{TOOL_SEARCH}'"
                path = offered.name_param.removesuffix("name") + "defer_loading"
                raise OpenAIError(f"'{path}' is not supported: {reason}", param=path, code="unsupported_parameter")
            if offered.function.name in self._offered:
                raise refuse(offered.name_param, "a name that is unique among the tools", offered.function.name)
            self._add(offered)

    def add_found(self, tools: Sequence[Any], param: str) -> None:
        """Adds the tools of an item; known ones are ignored."""
        for offered, _ in _flat(tools, param):
            if offered.function.name not in self._offered:
                self._add(offered)

    def use(self, choice: ToolChoice | None, max_calls: int | None) -> ToolUse | None:
        """Raises OpenAIError for a choice of an unknown tool."""
        return tool_use([*self._offered.values()], choice, max_calls)

    def _add(self, offered: OfferedTool) -> None:
        if len(self._offered) == MAX_TOOLS:
            raise OpenAIError(
                f"'{offered.name_param}' exceeds the number of tools, expected at most {MAX_TOOLS}",
                param=offered.name_param,
                code="invalid_value",
            )
        self._offered[offered.function.name] = offered


def called_name(name: str, namespace: str | None) -> str:
    """The model's name of a tool, as in vLLM."""
    return f"{namespace}__{name}" if namespace else name


def shown_tools(tools: Iterable[Mapping[str, Any]]) -> list[JsonObject]:
    """The response's `tools`: with all fields of functions and custom tools, without web searches."""
    return [_shown(tool) for tool in tools if tool["type"] not in WEB_SEARCHES]


def _shown(tool: Mapping[str, Any]) -> JsonObject:
    sent = {name: value for name, value in tool.items() if value is not None}
    if tool["type"] == "function":
        return {"description": None, "parameters": None, "strict": False} | sent
    return {"description": "", "format": {"type": "text"}} | sent if tool["type"] == "custom" else sent


_Flat = tuple[OfferedTool, bool]
"""(tool, whether it is deferred until a search finds it)"""


def _flat(tools: Sequence[Any], param: str) -> Iterator[_Flat]:
    for index, tool in enumerate(tools):
        path = f"{param}[{index}]"
        if isinstance(tool, NamespaceFields):
            for number, inner in enumerate(tool.tools):
                yield _offered(inner, f"{path}.tools[{number}]", tool)
        elif isinstance(tool, ToolSearchFields):
            yield _search(tool, path), False
        elif isinstance(tool, FunctionToolFields | CustomToolFields):
            yield _offered(tool, path, None)


def _offered(tool: FunctionToolFields | CustomToolFields, path: str, namespace: NamespaceFields | None) -> _Flat:
    name = called_name(tool.name, namespace.name if namespace else None)
    if len(name) > _MAX_NAME_CHARS:
        raise refuse(f"{path}.name", f"with its namespace at most {_MAX_NAME_CHARS} characters", name)
    about = [namespace.description if namespace else None, tool.description]
    named = NamedTool(tool.type, tool.name, namespace.name if namespace else None)
    if isinstance(tool, CustomToolFields):
        function = Function(name, _INPUT_ONLY, is_strict=False, param=path)
        if isinstance(tool.format, GrammarFormat):
            grammar = InputGrammar(tool.format.syntax, tool.format.definition)
            about.append(f"The input follows this {_GRAMMAR_NAMES[grammar.syntax]}:\n{grammar.definition}")
            function = replace(function, param=f"{path}.format.definition", input_grammar=grammar)
    else:
        parameters = NO_PARAMETERS if tool.parameters is None else tool.parameters
        function = Function(name, parameters, bool(tool.strict), f"{path}.parameters")
    offered = OfferedTool(function, "\n\n".join(filter(None, about)), f"{path}.name", named)
    return offered, bool(tool.defer_loading)


_INPUT_ONLY: JsonObject = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


def _search(tool: ToolSearchFields, path: str) -> OfferedTool:
    parameters = _ANY_SEARCH if tool.parameters is None else tool.parameters
    function = Function(TOOL_SEARCH, parameters, is_strict=False, param=f"{path}.parameters")
    return OfferedTool(function, tool.description or "", f"{path}.type", NamedTool("tool_search", TOOL_SEARCH))
