"""The JSON that the endpoints of responses and conversations answer, as types: for /openapi.json.

For: the endpoints. Does not know: how answers are written. Invariant: an answer has the members that response_state.py
writes and no others (`make fuzz` compares them).
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import with_config
from typing_extensions import TypedDict  # pydantic takes typing's only from Python 3.12 on

from ...http.routing import Count
from .response_state import Status


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


class ResponseDeleted(TypedDict):
    id: str
    object: Literal["response.deleted"]
    deleted: Literal[True]


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: Count


class CompactBody(TypedDict):
    model: str


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
