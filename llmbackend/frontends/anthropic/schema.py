"""The request bodies of the Messages API: their fields beside the content, as models.

For: requests.py, which reads bodies, and openapi.py, which documents them. Does not know: blocks, tools, HTTP.
Invariant: as in the OpenAI frontend, a field reaches the model, or is known to change nothing, or is refused by name;
null is the same as a field left out.
Source: Anthropic's API reference; `seed` and `chat_template_kwargs` are vLLM's.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from ..openai.validation import AnyObject, ClosedObject, Expected, Flag, Items, NonEmpty, Only, Range
from .block_schemas import CACHE_CONTROL, MESSAGES, SYSTEM, TOOL_CHOICE, TOOLS

_NO_SERVER_TOOLS = "this server runs no tools of its own"
_ONE_SPEED = "every request is served as fast as the server can"
_NO_ACCOUNTS = "this server has no workspaces; API keys are its accounts"
_KEPT_WHOLE = "this server changes no conversation; send what the model shall see"


class Metadata(ClosedObject):
    user_id: str | None = Field(None, description="A label, for the access log.")


class Thinking(ClosedObject):
    type: Annotated[Literal["enabled", "adaptive", "disabled"], Expected('one of "enabled", "adaptive", "disabled"')]
    budget_tokens: Annotated[int, Range(1)] | None = Field(None, description="With enabled: the most tokens of it.")
    display: Annotated[Literal["summarized", "omitted"], Expected('"summarized" or "omitted"')] | None = Field(
        None, description="omitted: the answer has its signature alone."
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
    ) = Field(None, description="For chat templates that read reasoning_effort.")
    format: JsonFormat | None = None


class UnservedFields(ClosedObject):
    """Refused by name; under an `anthropic-beta` header passed over."""

    container: Annotated[Any, Only(reason="this server has no containers")] = None
    mcp_servers: Annotated[Any, Only([], reason=_NO_SERVER_TOOLS)] = None
    context_management: Annotated[Any, Only({}, {"edits": []}, reason=_KEPT_WHOLE)] = None
    compaction: Annotated[Any, Only(reason=_KEPT_WHOLE)] = None
    diagnostics: Annotated[Any, Only(reason="'cache_read_input_tokens' says what was cached")] = None
    inference_geo: Annotated[Any, Only(reason="a request is served where this server is")] = None
    speed: Annotated[Any, Only("standard", reason=_ONE_SPEED)] = None
    fallbacks: Annotated[Any, Only(reason="a request is answered by the model that it names")] = None
    fallback_credit_token: Annotated[Any, Only(reason="there is nothing to pay here")] = None
    billing_policy: Annotated[Any, Only(reason="there is nothing to pay here")] = None
    thread: Annotated[Any, Only(reason="this server keeps no messages")] = None
    user_profile_id: Annotated[Any, Only(reason=_NO_ACCOUNTS)] = None
    workspace_id: Annotated[Any, Only(reason=_NO_ACCOUNTS)] = None
    kv_transfer_params: Annotated[Any, Only(reason="the KV memory of a request stays in one engine")] = None


class PromptFields(UnservedFields):
    """What both endpoints take. Blocks and tools are read by content.py, which names the path of what is wrong in
    them."""

    model: NonEmpty
    messages: Annotated[Any, WithJsonSchema(MESSAGES)]
    system: Annotated[Any, WithJsonSchema(SYSTEM)] = None
    tools: Annotated[Any, WithJsonSchema(TOOLS)] = None
    tool_choice: Annotated[Any, WithJsonSchema(TOOL_CHOICE)] = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="As output_config.format, which came later.")
    cache_control: Annotated[Any, WithJsonSchema(CACHE_CONTROL)] = None
    """Every prefix is cached as long as there is room."""
    chat_template_kwargs: AnyObject | None = Field(None, description="Variables of the chat template (a vLLM extra).")


class CountTokensRequest(PromptFields):
    model_config = ConfigDict(defer_build=False)


class MessagesRequest(PromptFields):
    model_config = ConfigDict(defer_build=False)
    max_tokens: Annotated[int, Range(0)] = Field(description="0: the prompt alone, which is cached then.")
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
"""Fields that are objects with fields of their own."""
