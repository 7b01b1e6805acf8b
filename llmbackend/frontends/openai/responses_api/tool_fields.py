"""The tools of a Responses request and the choice among them: their forms, and which hosted ones are refused.

For: the fields of a request, and items that bring tools. Does not know: what is made of them (tools.py). Invariant:
what OpenAI would run itself is refused by name; only a search of the web is left out, see docs/responses_api.md.
Source: OpenAI's API reference, `Tool`; what Codex sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, PlainValidator, StringConstraints, Tag, WithJsonSchema
from typing_extensions import TypedDict  # pydantic takes typing's only from Python 3.12 on

from ...conversation.tools import MAX_TOOLS, NAME_EXPECTED, NAME_PATTERN, ChosenTool, ToolChoice, ToolKind
from ..errors import OpenAIError, refuse
from ..tool_choice import MODES, closed, read_allowed
from ..validation import AnyObject, ClosedObject, Expected, Flag, Items, NonEmpty, OfTypes, Only, refuse_unknown

_DIRECT_ONLY = "tools are called by the model alone"
_HOSTED = "this server runs no tools itself"
_OTHER_FORM = "the tool's calls have a form of their own; send it as a function or a custom tool"
WEB_SEARCHES = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")
REFUSED_TOOLS: Mapping[str, str] = {
    **dict.fromkeys(
        ("file_search", "computer", "computer_use", "computer_use_preview", "mcp", "code_interpreter",
         "programmatic_tool_calling", "image_generation"),
        _HOSTED,
    ),
    **dict.fromkeys(("local_shell", "shell", "apply_patch"), _OTHER_FORM),
}  # fmt: skip
ToolName = Annotated[str, StringConstraints(pattern=NAME_PATTERN), Expected(NAME_EXPECTED)]


class _Offered(ClosedObject):
    field_aliases: ClassVar[frozenset[str]] = frozenset(("async",))
    name: ToolName
    description: str | None = None
    defer_loading: Flag | None = Field(None, description="Only with tools that a client's search has found.")
    allowed_callers: Annotated[Any, Only(["direct"], reason=_DIRECT_ONLY)] = None
    async_: Annotated[Any, Only(False, reason="the model waits for no calls"), Field(alias="async")] = None


class FunctionToolFields(_Offered):
    type: Literal["function"]
    parameters: AnyObject | None = Field(None, description="A JSON Schema; left out: no arguments.")
    strict: Flag | None = Field(None, description="The arguments follow the schema, whatever the model would write.")
    output_schema: Annotated[Any, Only(reason="outputs go to the model as text")] = None


class TextFormat(ClosedObject):
    type: Literal["text"]


class GrammarFormat(ClosedObject):
    type: Literal["grammar"]
    syntax: Annotated[Literal["lark", "regex"], Expected('"lark" or "regex"')]
    definition: NonEmpty


def _tag(value: object) -> str | None:
    if isinstance(value, ClosedObject):
        return f"({value.__dict__['type']})"
    kind = value.get("type") if isinstance(value, dict) else None
    return "(web_search)" if kind in WEB_SEARCHES else f"({kind})"


InputFormat = Annotated[
    Annotated[TextFormat, Tag("(text)")] | Annotated[GrammarFormat, Tag("(grammar)")],
    Discriminator(_tag),
    OfTypes(("text", "grammar")),
]


class CustomToolFields(_Offered):
    """The model writes its input as it likes, or by a grammar."""

    type: Literal["custom"]
    format: InputFormat | None = None


class ToolSearchFields(ClosedObject):
    """The client looks for further tools."""

    type: Literal["tool_search"]
    execution: Annotated[Any, Only("client", reason=f'{_HOSTED}; with "client" the client searches')]
    description: str | None = None
    parameters: AnyObject | None = None


class WebSearchFields(TypedDict):
    """Left out: nothing of it is looked at."""

    type: Literal["web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"]


NamespacedTool = Annotated[
    Annotated[FunctionToolFields, Tag("(function)")] | Annotated[CustomToolFields, Tag("(custom)")],
    Discriminator(_tag),
    OfTypes(("function", "custom")),
]


class NamespaceFields(ClosedObject):
    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[NamespacedTool], Items(1, MAX_TOOLS)]


Tool = Annotated[
    Annotated[FunctionToolFields, Tag("(function)")]
    | Annotated[CustomToolFields, Tag("(custom)")]
    | Annotated[ToolSearchFields, Tag("(tool_search)")]
    | Annotated[NamespaceFields, Tag("(namespace)")]
    | Annotated[WebSearchFields, Tag("(web_search)")],
    Discriminator(_tag),
    OfTypes(("function", "custom", "tool_search", "namespace", *WEB_SEARCHES), REFUSED_TOOLS),
]
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
        if reason := REFUSED_TOOLS.get(kind, "this server searches nothing" if kind in WEB_SEARCHES else ""):
            message = f"'{param}.type' is \"{kind}\", which is not supported: {reason}"
            raise OpenAIError(message, param=f"{param}.type", code="unsupported_parameter")
        raise refuse(f"{param}.type", "'function' or 'custom'", kind)
    refuse_unknown(value, frozenset(("type", "name")), param, may_be_null=True)
    if not isinstance(name := value.get("name"), str):
        raise refuse(f"{param}.name", "the name of a tool", name)
    return ChosenTool(name, f"{param}.name", f"the name of a {kind} tool of 'tools'", tool_kind)


_CHOICE = "tool_choice"
_KINDS: Mapping[str, ToolKind] = {"function": "function", "custom": "custom"}
"""By the type in a choice."""
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
