"""Chat messages: their schema, and their form for chat templates.

Invariants: an assistant message from this or another server is accepted as input, including the older form of tool
calls; roles and fields unknown to OpenAI are passed to the template. The types are TypedDicts, which pydantic reads in
a fifth of the time of models, because a body may contain thousands of messages.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Discriminator, Field, Tag
from typing_extensions import TypedDict  # pydantic accepts typing.TypedDict only from Python 3.12 on

from ..conversation.turns import Turn, called
from ..generation.validation import AnyObject, Items, NonEmpty, Only, refuse_unknown
from ..http.errors import JsonObject, missing

_NULLS: JsonObject = {"additionalProperties": {"type": "null"}}
"""Unknown fields are accepted if they are null, because clients send whole objects of their own types."""


def _config(json_schema: JsonObject) -> ConfigDict:
    return ConfigDict(extra="allow", json_schema_extra=json_schema)


def _message_config(json_schema: JsonObject) -> ConfigDict:
    """Unknown fields are accepted; fields of other roles only if they are null."""

    def describe(schema: JsonObject) -> None:
        others = _KNOWN_FIELDS - schema["properties"].keys()
        schema["properties"] |= {name: {"type": "null"} for name in sorted(others)}
        schema |= json_schema

    return ConfigDict(extra="allow", json_schema_extra=describe)


class TextPart(TypedDict):
    __pydantic_config__ = _config({"additionalProperties": False})  # type: ignore[misc]
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: NotRequired[Annotated[AnyObject | None, Field(description="Without effect.")]]


class RefusalPart(TypedDict):
    __pydantic_config__ = _config({"additionalProperties": False})  # type: ignore[misc]
    type: Literal["refusal"]
    refusal: str


ContentPart = Annotated[TextPart | RefusalPart, Discriminator("type")]
Content = Annotated[str, Tag("(text)")] | Annotated[list[ContentPart], Items(), Tag("(parts)")]


_OF_HELPERS = "clients' helpers that parse answers leave it in."


class CalledFunction(TypedDict):
    __pydantic_config__ = _config(_NULLS)  # type: ignore[misc]
    name: str
    arguments: Annotated[str, Field(json_schema_extra={"contentMediaType": "application/json"})]
    parsed_arguments: NotRequired[Annotated[Any, Field(description=f"Ignored: {_OF_HELPERS}")]]


class ToolCall(TypedDict):
    __pydantic_config__ = _config(_NULLS)  # type: ignore[misc]
    id: str
    type: NotRequired[Annotated[Any, Only("function")]]
    index: NotRequired[Annotated[Any, Field(description="Ignored: clients that join a stream's deltas leave it in.")]]
    function: CalledFunction


class _Message(TypedDict):
    name: NotRequired[str | None]


class PromptMessage(_Message):
    __pydantic_config__ = _message_config({})  # type: ignore[misc]
    role: Literal["system", "developer", "user"]
    content: Content


class ToolMessage(_Message):
    __pydantic_config__ = _message_config({})  # type: ignore[misc]
    role: Literal["tool"]
    content: Content
    tool_call_id: str


class FunctionMessage(TypedDict):
    """The older form of ToolMessage."""

    __pydantic_config__ = _message_config({})  # type: ignore[misc]
    role: Literal["function"]
    name: str
    content: Content | None


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class OtherMessage(_Message):
    """A message with a role that only the model's chat template knows."""

    __pydantic_config__ = _message_config({})  # type: ignore[misc]
    role: Annotated[NonEmpty, Field(json_schema_extra={"not": {"enum": list(_ROLES)}})]
    content: NotRequired[Content | None]


def _has(field: str, json_schema: JsonObject) -> JsonObject:
    return {"properties": {field: json_schema}, "required": [field]}


_TEXT: JsonObject = {"type": "string", "minLength": 1}


class AssistantMessage(_Message):
    """A message with content or something in its place. Some servers send reasoning as `reasoning` or under both
    names."""

    __pydantic_config__ = _message_config(  # type: ignore[misc]
        {
            "anyOf": [
                _has("content", {"type": ["string", "array"]}),
                *(_has(field, _TEXT) for field in ("refusal", "reasoning_content", "reasoning")),
                _has("tool_calls", {"type": "array", "minItems": 1}),
                _has("function_call", {"type": "object"}),
            ]
        }
    )
    role: Literal["assistant"]
    content: NotRequired[Content | None]
    refusal: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    tool_calls: NotRequired[Annotated[list[ToolCall], Items()] | None]
    function_call: NotRequired[CalledFunction | None]
    audio: NotRequired[Annotated[Any, Only()]]
    annotations: NotRequired[Annotated[Any, Only([])]]
    parsed: NotRequired[Annotated[Any, Field(description=f"Ignored: {_OF_HELPERS}")]]


def _tag(message: object) -> str | None:
    """The message's role; None without one."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or not role:
        return None
    return role if role in _ROLES else "other"


Message = Annotated[
    Annotated[PromptMessage, Tag("system")]
    | Annotated[PromptMessage, Tag("developer")]
    | Annotated[PromptMessage, Tag("user")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[ToolMessage, Tag("tool")]
    | Annotated[FunctionMessage, Tag("function")]
    | Annotated[OtherMessage, Tag("other")],
    Discriminator(_tag),
]

_FIELDS = {
    **dict.fromkeys(("system", "developer", "user"), frozenset(PromptMessage.__annotations__)),
    "assistant": frozenset(AssistantMessage.__annotations__),
    "tool": frozenset(ToolMessage.__annotations__),
    "function": frozenset(FunctionMessage.__annotations__),
}
_OTHER_FIELDS = frozenset(OtherMessage.__annotations__)
_KNOWN_FIELDS = frozenset[str]().union(*_FIELDS.values())
"""Fields that some role has; other fields are passed to the template."""
_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}
LEGACY_CALL_ID = "000000000"
"""Id of calls in the older form, which have none; some templates require ids of nine letters or digits."""
_PART_FIELDS = {"text": frozenset(TextPart.__annotations__), "refusal": frozenset(RefusalPart.__annotations__)}
_CALL_FIELDS = frozenset(ToolCall.__annotations__)
_FUNCTION_FIELDS = frozenset(CalledFunction.__annotations__)


def for_template(message: Mapping[str, Any], param: str) -> JsonObject:
    """A valid Message, the request's field `param`, for chat templates: `content` is a string (text parts are joined by
    newlines, as in vLLM for templates that read strings), "developer" becomes "system", and calls have the current
    form. Raises OpenAIError for an empty assistant message."""
    role, content = message["role"], message.get("content")
    further = message.keys() - _FIELDS.get(role, _OTHER_FIELDS)
    if further:
        known = {field: message[field] for field in further & _KNOWN_FIELDS}
        refuse_unknown(known, frozenset(), param, may_be_null=True)
    turn = Turn(_TEMPLATE_ROLES.get(role, role))
    if role == "assistant":
        turn.reasoning = [message.get("reasoning_content") or message.get("reasoning") or ""]
        turn.calls = _calls(message, param)
        if content is None and (message.get("refusal") or any(turn.reasoning) or turn.calls):
            content = message.get("refusal") or ""
    elif role in ("tool", "function"):
        turn.fields["tool_call_id"] = message.get("tool_call_id", LEGACY_CALL_ID)
    if content is None and (role == "function" or role not in _ROLES):
        content = ""
    turn.texts = [content] if isinstance(content, str) else _texts(content, f"{param}.content")
    form = turn.message()
    if (name := message.get("name")) is not None:
        form["name"] = name
    form |= {field: message[field] for field in further - _KNOWN_FIELDS if message[field] is not None}
    return form


def _calls(message: Mapping[str, Any], param: str) -> list[JsonObject]:
    calls = [
        _tool_call(call, f"{param}.tool_calls[{index}]") for index, call in enumerate(message.get("tool_calls") or ())
    ]
    if (legacy := message.get("function_call")) is not None:
        calls.append(_tool_call({"id": LEGACY_CALL_ID, "function": legacy}, f"{param}.function_call"))
    return calls


def _texts(parts: list[Mapping[str, Any]] | None, param: str) -> list[str]:
    if parts is None:
        raise missing(param)
    for index, part in enumerate(parts):
        refuse_unknown(part, _PART_FIELDS[part["type"]], f"{param}[{index}]")
    return [part[part["type"]] for part in parts]


def _tool_call(call: Mapping[str, Any], param: str) -> JsonObject:
    function = call["function"]
    refuse_unknown(function, _FUNCTION_FIELDS, f"{param}.function", may_be_null=True)
    refuse_unknown(call, _CALL_FIELDS, param, may_be_null=True)
    return called(call["id"], function["name"], function["arguments"])
