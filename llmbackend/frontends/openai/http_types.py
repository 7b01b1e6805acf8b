"""Types of the answers of /v1, for /openapi.json. An answer has these members and no others (`make fuzz` compares)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, with_config
from typing_extensions import TypedDict  # pydantic accepts typing.TypedDict only from Python 3.12 on

from ..http.routing import Count


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    parent: str | None
    max_model_len: Count | None


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class PromptTokensDetails(TypedDict):
    cached_tokens: Count


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: Count


class Usage(TypedDict):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class OfPrompt(TypedDict, total=False):
    """Requested details of the prompt: in a chat's answer, or in each choice of a completion."""

    prompt_token_ids: list[Count] | None
    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_text: str


class _Choice(TypedDict):
    index: Count
    logprobs: dict[str, Any] | None
    stop_reason: Annotated[str | int | None, Field(description="The matched `stop` string or `stop_token_ids` entry.")]
    token_ids: NotRequired[list[Count]]


class AnsweredFunction(TypedDict):
    name: str
    arguments: str


class AnsweredCall(TypedDict):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[AnsweredCall]]
    function_call: NotRequired[AnsweredFunction]


class ChatChoice(_Choice):
    message: AnswerMessage
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"]


class CompletionChoice(_Choice, OfPrompt):
    text: str
    finish_reason: Literal["stop", "length"]


class RequestMetrics(TypedDict):
    """The timings of an answer with `include_metrics`, in ms."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float | None


class _Answer(TypedDict):
    id: str
    created: Count
    model: str
    system_fingerprint: str | None
    usage: Annotated[Usage | None, Field(description="null if the model counts no tokens.")]
    metrics: NotRequired[RequestMetrics]


class ChatCompletion(_Answer, OfPrompt):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class StoredChatCompletion(ChatCompletion):
    temperature: float
    top_p: float
    frequency_penalty: float
    presence_penalty: float
    seed: int | None
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    response_format: dict[str, Any] | None
    input_user: str | None
    service_tier: Literal["default"]
    metadata: dict[str, str]


class _List(TypedDict):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ChatList(_List):
    data: list[StoredChatCompletion]


class ChatDeleted(TypedDict):
    object: Literal["chat.completion.deleted"]
    id: str
    deleted: Literal[True]


@with_config(extra="allow")
class StoredChatMessage(TypedDict):
    id: str
    role: str
    content: str | None
    content_parts: list[dict[str, Any]] | None
    name: str | None


class ChatMessageList(_List):
    data: list[StoredChatMessage]


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Tokens(TypedDict):
    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


@with_config(extra="allow")
class TokenizerInfo(TypedDict):
    tokenizer_class: str
    chat_template: str | None


class Text(TypedDict):
    prompt: str


class Rendered(TypedDict):
    request_id: str
    token_ids: list[Count]
    features: None
    sampling_params: Annotated[dict[str, Any], Field(description="The sampling parameters, under vLLM's names.")]
    model: str
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None
