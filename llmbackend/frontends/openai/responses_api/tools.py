"""The tools of a Responses request as the model gets them, and the way back from the names that it calls.

For: parsing.py. Does not know: how a model writes calls. Invariants: a custom tool is a function with one string,
`input`; a tool of a namespace is called by both names; the tools that a client's search has found, and those that came
as items, follow the request's own. Each name that the model can call stands for one tool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...conversation.tools import (
    INPUT,
    MAX_TOOLS,
    NO_PARAMETERS,
    Function,
    InputGrammar,
    NamedTool,
    OfferedTool,
    ToolChoice,
    ToolUse,
    tool_use,
)
from ..errors import JsonObject, OpenAIError, refuse
from .tool_fields import (
    WEB_SEARCHES,
    CustomToolFields,
    FunctionToolFields,
    GrammarFormat,
    NamespaceFields,
    ToolSearchFields,
)

TOOL_SEARCH = "tool_search"
_MAX_NAME_CHARS = 128
_GRAMMAR_NAMES = {"lark": "Lark grammar", "regex": "regular expression"}
_ANY_SEARCH: JsonObject = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What the tool is for."}},
    "required": ["query"],
}


class OfferedTools:
    """All tools of a request, in the order in which the template gets them."""

    def __init__(self) -> None:
        self._offered: dict[str, OfferedTool] = {}
        """By the name that the model calls."""

    @property
    def named(self) -> dict[str, NamedTool]:
        """By the name that the model calls."""
        return {name: tool.named for name, tool in self._offered.items()}

    def add_own(self, tools: Sequence[Any], param: str = "tools") -> None:
        """Those of the field `tools`. Raises OpenAIError for a name twice, and for one to be found by the server."""
        for offered, is_deferred in _flat(tools, param):
            if is_deferred:
                reason = f"this server searches no tools; a client's own search is a tool '{TOOL_SEARCH}'"
                path = _sibling(offered.name_param, "defer_loading")
                raise OpenAIError(f"'{path}' is not supported: {reason}", param=path, code="unsupported_parameter")
            if offered.function.name in self._offered:
                raise refuse(offered.name_param, "a name that no other tool has", offered.function.name)
            self._add(offered)

    def add_found(self, tools: Sequence[Any], param: str) -> None:
        """Those of an item. One that is there already may come again."""
        for offered, _ in _flat(tools, param):
            if offered.function.name not in self._offered:
                self._add(offered)

    def use(self, choice: ToolChoice | None, max_calls: int | None) -> ToolUse | None:
        """What may be called. Raises OpenAIError for a choice of tools that are not there."""
        return tool_use([*self._offered.values()], choice, max_calls)

    def _add(self, offered: OfferedTool) -> None:
        if len(self._offered) == MAX_TOOLS:
            raise OpenAIError(
                f"'{offered.name_param}' is one tool too many, expected at most {MAX_TOOLS}",
                param=offered.name_param,
                code="invalid_value",
            )
        self._offered[offered.function.name] = offered


def called_name(name: str, namespace: str | None) -> str:
    """By which the model calls a tool. As vLLM's."""
    return f"{namespace}__{name}" if namespace else name


def shown_tools(tools: Iterable[Mapping[str, Any]]) -> list[JsonObject]:
    """`tools` as the response has them: with all fields of functions and custom tools, and without a search of the web,
    which the model does not get."""
    return [_shown(tool) for tool in tools if tool["type"] not in WEB_SEARCHES]


def _shown(tool: Mapping[str, Any]) -> JsonObject:
    sent = {name: value for name, value in tool.items() if value is not None}
    if tool["type"] == "function":
        return {"description": None, "parameters": None, "strict": False} | sent
    return {"description": "", "format": {"type": "text"}} | sent if tool["type"] == "custom" else sent


_Flat = tuple[OfferedTool, bool]
"""(tool, whether it waits for a search)"""


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


def _sibling(param: str, field: str) -> str:
    return f"{param.rpartition('.')[0]}.{field}"
