"""The request bodies of the Messages API, also for /openapi.json.

The types of blocks and tools only document them: content.py reads them, since its errors name the path. Invariant: a
field has its effect, or needs none, or is refused by name; null is the same as an absent field. Source: Anthropic's API
reference; `seed` and `chat_template_kwargs` are vLLM's.
"""

from typing import Annotated, Any, ClassVar, Final, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict  # pydantic accepts typing.TypedDict only from Python 3.12 on

from ..conversation.tools import NAME_PATTERN
from ..generation.validation import AnyObject, ClosedObject, Expected, Flag, Items, NonEmpty, Only, Range
from ..http.routing import DescribedBy

NO_SERVER_TOOLS = "this server has no tools of its own"
_ONE_SPEED = "the server has one speed"
_NO_ACCOUNTS = "this server has no workspaces, only API keys"
_NO_EDITING = "this server does not edit conversations; send what the model should see"
_NO_DIAGNOSTICS = "cache misses are not explained; 'cache_read_input_tokens' counts the cached tokens"
_closed = with_config(extra="forbid")
_NonEmptyText = Annotated[str, Field(min_length=1)]
_MayBe = bool | None


@_closed
class CacheControl(TypedDict):
    type: Literal["ephemeral"]
    ttl: NotRequired[Literal["5m", "1h"] | None]


class _Marked(TypedDict):
    cache_control: NotRequired[CacheControl | None]


@_closed
class TextBlock(_Marked):
    type: Literal["text"]
    text: str
    citations: NotRequired[Annotated[list[Any], Field(max_length=0)] | None]


@_closed
class ToolResultBlock(_Marked):
    type: Literal["tool_result"]
    tool_use_id: _NonEmptyText
    content: NotRequired[str | list[TextBlock] | None]
    is_error: NotRequired[_MayBe]


@_closed
class DirectCaller(TypedDict):
    type: Literal["direct"]


@_closed
class ToolUseBlock(_Marked):
    type: Literal["tool_use"]
    id: _NonEmptyText
    name: _NonEmptyText
    input: dict[str, Any]
    caller: NotRequired[DirectCaller | None]


@_closed
class ThinkingBlock(_Marked):
    type: Literal["thinking"]
    thinking: str
    signature: _NonEmptyText


@_closed
class RedactedThinkingBlock(_Marked):
    type: Literal["redacted_thinking"]
    data: _NonEmptyText


@_closed
class UserTurn(TypedDict):
    role: Literal["user"]
    content: str | Annotated[list[TextBlock | ToolResultBlock], Field(min_length=1)]


@_closed
class AssistantTurn(TypedDict):
    role: Literal["assistant"]
    content: str | list[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock]


@_closed
class SystemTurn(TypedDict):
    role: Literal["system"]
    content: str | list[TextBlock]


@_closed
class Tool(_Marked):
    type: NotRequired[Literal["custom"] | None]
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    description: NotRequired[str | None]
    input_schema: dict[str, Any]
    strict: NotRequired[_MayBe]
    eager_input_streaming: NotRequired[Literal[True] | None]
    defer_loading: NotRequired[Literal[False] | None]
    allowed_callers: NotRequired[Annotated[list[Literal["direct"]], Field(min_length=1)] | None]
    input_examples: NotRequired[Annotated[list[Any], Field(max_length=0)] | None]


@_closed
class AnyToolChoice(TypedDict):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: NotRequired[_MayBe]


@_closed
class NamedToolChoice(TypedDict):
    type: Literal["tool"]
    name: _NonEmptyText
    disable_parallel_tool_use: NotRequired[_MayBe]


class Metadata(ClosedObject):
    user_id: str | None = Field(None, description="A label, for the access log.")


_BUDGET: Final[dict[str, Any]] = {
    "properties": {"type": {"const": "enabled"}, "budget_tokens": {"type": "integer"}},
    "required": ["budget_tokens"],
}
_NO_BUDGET: Final[dict[str, Any]] = {
    "properties": {"type": {"enum": ["adaptive", "disabled"]}, "budget_tokens": {"type": "null"}},
}


class Thinking(ClosedObject):
    model_config = ConfigDict(json_schema_extra={"anyOf": [_BUDGET, _NO_BUDGET]})
    type: Annotated[Literal["enabled", "adaptive", "disabled"], Expected('one of "enabled", "adaptive", "disabled"')]
    budget_tokens: Annotated[int, Range(1)] | None = Field(None, description="With enabled: maximum thinking tokens.")
    display: Annotated[Literal["summarized", "omitted"], Expected('"summarized" or "omitted"')] | None = Field(
        None, description="omitted: only the signature is returned."
    )


class JsonFormat(ClosedObject):
    field_aliases: ClassVar[frozenset[str]] = frozenset(("schema",))
    type: Annotated[Literal["json_schema"], Expected('"json_schema"')]
    schema_: Annotated[AnyObject, Field(alias="schema")]


class OutputConfig(ClosedObject):
    effort: (
        Annotated[
            Literal["low", "medium", "high", "xhigh", "max"],
            Expected('one of "low", "medium", "high", "xhigh", "max"'),
        ]
        | None
    ) = Field(None, description="Passed to the chat template as reasoning_effort.")
    format: JsonFormat | None = None


class UnservedFields(ClosedObject):
    """Refused by name; ignored with an `anthropic-beta` header."""

    container: Annotated[Any, Only(reason="this server has no containers")] = None
    mcp_servers: Annotated[Any, Only([], reason=NO_SERVER_TOOLS)] = None
    context_management: Annotated[Any, Only({}, {"edits": []}, reason=_NO_EDITING)] = None
    compaction: Annotated[Any, Only(reason=_NO_EDITING)] = None
    diagnostics: Annotated[Any, Only(reason=_NO_DIAGNOSTICS)] = None
    inference_geo: Annotated[Any, Only(reason="this server has one region")] = None
    speed: Annotated[Any, Only("standard", reason=_ONE_SPEED)] = None
    fallbacks: Annotated[Any, Only(reason="only the requested model answers")] = None
    fallback_credit_token: Annotated[Any, Only(reason="requests cost nothing")] = None
    billing_policy: Annotated[Any, Only(reason="requests cost nothing")] = None
    thread: Annotated[Any, Only(reason="this server stores no messages")] = None
    user_profile_id: Annotated[Any, Only(reason=_NO_ACCOUNTS)] = None
    workspace_id: Annotated[Any, Only(reason=_NO_ACCOUNTS)] = None
    kv_transfer_params: Annotated[Any, Only(reason="the KV cache of a request stays in one engine")] = None


class PromptFields(UnservedFields):
    model: NonEmpty
    messages: Annotated[Any, DescribedBy(Annotated[list[UserTurn | AssistantTurn | SystemTurn], Field(min_length=1)])]
    system: Annotated[Any, DescribedBy(str | list[TextBlock] | None)] = None
    tools: Annotated[Any, DescribedBy(list[Tool] | None)] = None
    tool_choice: Annotated[Any, DescribedBy(AnyToolChoice | NamedToolChoice | None)] = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="The older form of output_config.format.")
    cache_control: Annotated[Any, DescribedBy(CacheControl | None)] = None
    """No effect: every prefix is cached while memory lasts."""
    chat_template_kwargs: AnyObject | None = Field(None, description="Variables of the chat template (a vLLM extra).")


class CountTokensRequest(PromptFields):
    model_config = ConfigDict(defer_build=False)


class MessagesRequest(PromptFields):
    model_config = ConfigDict(defer_build=False)
    max_tokens: Annotated[int, Range(0)] = Field(description="0: only cache the prompt.")
    stop_sequences: Annotated[list[NonEmpty], Items()] | None = None
    stream: Flag | None = None
    temperature: Annotated[float, Range(0, 2)] | None = None
    top_k: Annotated[int, Range(0)] | None = Field(None, description="0: off.")
    top_p: Annotated[float, Range(0, 1)] | None = Field(None, description="0: only the most likely token.")
    metadata: Metadata | None = None
    service_tier: Annotated[Any, Only("auto", "standard_only", reason="this server has one service tier")] = None
    seed: Annotated[int, Range(-(2**63), 2**63 - 1)] | None = Field(None, description="A vLLM extra.")


NESTED: dict[str, type[ClosedObject]] = {
    "thinking": Thinking,
    "output_config": OutputConfig,
    "metadata": Metadata,
}
"""Fields that are objects with known fields."""
