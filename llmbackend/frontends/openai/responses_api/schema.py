"""The body of create-response requests, and the types of answers of responses and conversations.

Invariants: a field has an effect, is a label, or is refused by name with the reason; an answer has exactly these
members (`make fuzz` compares). Sources: OpenAI's API reference; vLLM's ResponsesRequest for the extras; what Codex
sends.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, with_config
from typing_extensions import TypedDict  # pydantic accepts typing.TypedDict only from Python 3.12 on

from ...generation.request import STRUCTURED_OUTPUTS
from ...generation.validation import AnyObject, ClosedObject, Expected, Flag, Items, NonEmpty, Only, Range
from ...http.errors import JsonObject, OpenAIError, missing, refuse, requires
from ...http.routing import Count
from ..fields import Effort, Labels, ThinkingTokenBudget, constraint_of
from ..schema import (
    TEMPLATE_NAMES,
    TEXT_ONLY,
    Sampling,
    UnservedEverywhere,
    UnservedInConversations,
    check_template_variables,
    is_true,
    needs,
)
from .items import Input
from .response_state import Status
from .tools import ToolChoiceField, Tools

_NO_SUMMARIES = "models do not summarize reasoning, which is returned whole"
_NO_PLACE = "it is available in chat completions only"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
OUTPUT_LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    ENCRYPTED_REASONING,
    OUTPUT_LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""The last six concern item types that responses here never contain."""
TEXT_FORMAT = "text.format"


class TextFormat(ClosedObject):
    """A schema is enforced with and without `strict`, which refuses unsupported keywords."""

    field_aliases: ClassVar[frozenset[str]] = frozenset(("schema",))
    type: Annotated[Literal["text", "json_object", "json_schema"], Expected("one of text, json_object, json_schema")]
    name: NonEmpty | None = None
    description: str | None = None
    schema_: Annotated[AnyObject | None, Field(alias="schema")] = None
    strict: Flag | None = None

    def constraint(self) -> JsonObject | None:
        """The constraint, as vLLM's `structured_outputs`. Raises OpenAIError for a field of another type."""
        if self.type == "json_schema":
            for field, value in (("name", self.name), ("schema", self.schema_)):
                if value is None:
                    raise missing(f"{TEXT_FORMAT}.{field}")
            return constraint_of(self.schema_ or {}, self.strict)
        for field in ("name", "schema_", "strict"):
            if self.__dict__[field] is not None:
                param = f"{TEXT_FORMAT}.{field.rstrip('_')}"
                raise OpenAIError(f"'{param}' does not belong to the type '{self.type}'", param=param)
        return {"json_object": True} if self.type == "json_object" else None


class TextConfig(ClosedObject):
    format: TextFormat | None = None
    verbosity: Annotated[Literal["low", "medium", "high"], Expected('one of "low", "medium", "high"')] | None = Field(
        None, description="Passed to the chat template."
    )


class Reasoning(ClosedObject):
    effort: Effort | None = Field(None, description="Passed to the chat template; also turns reasoning on or off.")
    summary: Annotated[Any, Only("auto", reason=_NO_SUMMARIES)] = None
    generate_summary: Annotated[Any, Only("auto", reason=_NO_SUMMARIES)] = None
    context: (
        Annotated[Literal["auto", "current_turn", "all_turns"], Expected('"auto", "current_turn" or "all_turns"')]
        | None
    ) = Field(None, description="current_turn: reasoning before the last user message is not sent to the model.")
    mode: Annotated[Any, Only("standard", reason="models have one mode")] = None


class StreamOptions(ClosedObject):
    include_obfuscation: Annotated[Any, Only(False, reason="events are not padded")] = None


class ConversationReference(ClosedObject):
    id: NonEmpty


def _conversation(value: object) -> object:
    return {"id": value} if isinstance(value, str) else value


class UnservedByResponses(UnservedEverywhere, UnservedInConversations):
    """Refused by name, except for values that request nothing."""

    prompt: Annotated[Any, Only(reason="this server stores no prompts")] = None
    context_management: Annotated[Any, Only([], reason="compact with POST /v1/responses/compact")] = None
    access_programs: Annotated[Any, Only(reason="this server has none")] = None
    image: Annotated[Any, Only({}, reason=TEXT_ONLY)] = None
    personality: Annotated[Any, Only(reason="use the instructions")] = None
    previous_input_messages: Annotated[Any, Only(reason="put items of earlier turns into 'input'")] = None
    request_id: Annotated[Any, Only(reason="the server chooses the ids of responses")] = None


_CONVERSATION_SCHEMA: JsonObject = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "object",
            "properties": {"id": {"type": "string", "minLength": 1}},
            "required": ["id"],
            "additionalProperties": False,
        },
    ]
}
_HAS_INPUT: JsonObject = {"required": ["input"], "properties": {"input": {"not": {"enum": [None, []]}}}}
_HAS_HISTORY: list[JsonObject] = [
    {"required": [field], "properties": {field: {"not": {"type": "null"}}}}
    for field in ("previous_response_id", "conversation")
]
_NEEDS_LOGPROBS: JsonObject = {
    "anyOf": [
        {"properties": {"top_logprobs": {"enum": [0, None]}}},
        {"required": ["include"], "properties": {"include": {"type": "array", "contains": {"const": OUTPUT_LOGPROBS}}}},
    ]
}


class ResponsesBody(Sampling, Labels, UnservedByResponses):
    model_config = ConfigDict(
        defer_build=False,
        json_schema_extra={
            "anyOf": [_HAS_INPUT, *_HAS_HISTORY],
            "dependentSchemas": needs("stream_options", is_true("stream")) | {"top_logprobs": _NEEDS_LOGPROBS},
        },
    )
    model: str | None = Field(None, description="Default: the server's only model.")
    input: Input | None = Field(None, description="Optional after a stored response or conversation.")
    instructions: str | None = Field(None, description="The first system message; not stored for later responses.")
    previous_response_id: NonEmpty | None = Field(None, description="Not beside conversation.")
    conversation: (
        Annotated[ConversationReference, BeforeValidator(_conversation), WithJsonSchema(_CONVERSATION_SCHEMA)] | None
    ) = None
    store: Flag | None = Field(None, description="Default: true. The response can be retrieved later.")
    background: Flag | None = Field(None, description="Generate without a connected client; requires store.")
    include: Annotated[list[str], Items()] | None = Field(None, json_schema_extra={"items": {"enum": [*INCLUDABLE]}})
    max_output_tokens: Annotated[int, Range(1)] | None = Field(None, description="Reasoning included.")
    max_tool_calls: Annotated[int, Range(1)] | None = Field(None, description="Further calls are dropped.")
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: Flag | None = Field(None, description="false: no more than one call.")
    top_logprobs: Annotated[int, Range(0, 20)] | None = Field(None, description=f"With {OUTPUT_LOGPROBS} in include.")
    truncation: Annotated[Literal["auto", "disabled"], Expected('"auto" or "disabled"')] | None = Field(
        None, description="auto: keep the end of a prompt that is too long."
    )
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: AnyObject | None = Field(
        None, description="One of json, regex, choice, grammar, json_object, structural_tag (a vLLM extra)."
    )
    prompt_logprobs: Annotated[Any, Only(reason=_NO_PLACE)] = None
    thinking_token_budget: ThinkingTokenBudget = None
    chat_template_kwargs: AnyObject | None = Field(
        None, json_schema_extra={"propertyNames": {"not": {"enum": [*sorted(TEMPLATE_NAMES)]}}}
    )
    client_metadata: AnyObject | None = Field(None, description="A label of the client.")
    enable_response_messages: Flag | None = Field(
        None, description="Return prompt and answer as text and tokens, without background (a vLLM extra)."
    )

    def check(self) -> None:
        """Raises OpenAIError for contradictory fields."""
        for index, name in enumerate(self.include or ()):
            if name not in INCLUDABLE:
                raise refuse(f"include[{index}]", f"one of {', '.join(INCLUDABLE)}", name)
        if self.top_logprobs and OUTPUT_LOGPROBS not in (self.include or ()):
            raise requires("top_logprobs", f"'{OUTPUT_LOGPROBS}' in 'include'")
        if self.stream_options is not None and not self.stream:
            raise requires("stream_options", "'stream': true")
        if self.background and self.store is False:
            raise requires("background", "'store': true, because the response is read from the store")
        if self.background and self.enable_response_messages:
            raise _excluded("enable_response_messages", "background")
        if self.previous_response_id is not None and self.conversation is not None:
            raise _excluded("conversation", "previous_response_id")
        if self.truncation == "auto" and self.truncate_prompt_tokens is not None:
            raise _excluded("truncate_prompt_tokens", "truncation")
        check_template_variables(self.chat_template_kwargs)

    def chosen_structure(self) -> tuple[JsonObject, str]:
        """The sampling parameters of the constraint, and the field that sets it."""
        format = self.text.format if self.text is not None else None
        constraint = format.constraint() if format is not None else None
        if self.structured_outputs is None:
            return ({STRUCTURED_OUTPUTS: constraint}, TEXT_FORMAT) if constraint is not None else ({}, TEXT_FORMAT)
        if constraint is not None:
            raise _excluded(STRUCTURED_OUTPUTS, TEXT_FORMAT)
        return {STRUCTURED_OUTPUTS: self.structured_outputs}, STRUCTURED_OUTPUTS


def _excluded(field: str, other: str) -> OpenAIError:
    return OpenAIError(f"'{other}' and '{field}' are mutually exclusive", param=field)


class OutputTextPart(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[dict[str, Any]]


class ReasoningTextPart(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class _Output(TypedDict):
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class MessageOutput(_Output):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputTextPart]


class ReasoningOutput(_Output):
    type: Literal["reasoning"]
    summary: list[dict[str, Any]]
    content: list[ReasoningTextPart]
    encrypted_content: NotRequired[str | None]


class _Call(_Output):
    call_id: str
    name: str
    namespace: NotRequired[str]


class FunctionCallOutput(_Call):
    type: Literal["function_call"]
    arguments: str


class CustomToolCallOutput(_Call):
    type: Literal["custom_tool_call"]
    input: str


class ToolSearchCallOutput(_Output):
    type: Literal["tool_search_call"]
    call_id: str
    execution: Literal["client"]
    arguments: Any


class InputDetails(TypedDict):
    cached_tokens: Count
    cache_write_tokens: Literal[0]


class OutputDetails(TypedDict):
    reasoning_tokens: Count


class ResponseUsage(TypedDict):
    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class ConversationId(TypedDict):
    id: str


class ResponseError(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class RawMessage(TypedDict):
    type: Literal["raw_message_tokens"]
    message: str
    tokens: list[Count]


class ResponseObject(TypedDict):
    id: str
    object: Literal["response"]
    created_at: Count
    model: str
    background: bool
    conversation: ConversationId | None
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: Count | None
    max_tool_calls: Count | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Count
    top_p: float
    truncation: str
    user: str | None
    status: Status
    completed_at: Count | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[MessageOutput | ReasoningOutput | FunctionCallOutput | CustomToolCallOutput | ToolSearchCallOutput]
    usage: ResponseUsage | None
    input_messages: NotRequired[list[RawMessage] | None]
    output_messages: NotRequired[list[RawMessage] | None]


class ResponseDeleted(TypedDict):
    id: str
    object: Literal["response.deleted"]
    deleted: Literal[True]


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: Count


class ConversationObject(TypedDict):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, Any]


class ConversationDeleted(TypedDict):
    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


@with_config(extra="allow")
class StoredItem(TypedDict):
    type: str
    id: NotRequired[str]


class ItemList(TypedDict):
    object: Literal["list"]
    data: list[StoredItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CompactedResponse(TypedDict):
    id: str
    object: Literal["response.compaction"]
    created_at: Count
    output: list[StoredItem]
    usage: ResponseUsage | None
