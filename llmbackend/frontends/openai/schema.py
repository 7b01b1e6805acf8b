"""The request bodies of chats and completions, for validation, errors and /openapi.json.

Invariant: a field reaches the model, or has no effect by definition, or is refused by name; null is the same as a
missing field; true is not 1, and 1.0 is not an integer. Sources: OpenAI's API reference, vLLM's SamplingParams.
"""

import itertools
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, StringConstraints, WithJsonSchema

from ..conversation.tools import (
    MAX_TOOLS,
    NAME_EXPECTED,
    NAME_PATTERN,
    OfferedTool,
    ToolUse,
    check_tool_count,
    tool_use,
)
from ..generation.validation import (
    AnyObject,
    ClosedObject,
    Expected,
    Flag,
    IsTokenIds,
    Items,
    NonEmpty,
    Only,
    Range,
    TokenIds,
)
from ..http.errors import JsonObject, OpenAIError, refuse
from .fields import ChatToolChoice, FunctionCall, Labels, ReasoningFields, StructuredOutputFields
from .messages import Message

_NOT_STORED = "only responses and chat completions are stored"
_RENDER = "it is part of vLLM's render endpoints"
_ONE_ENGINE = "the KV cache of a request stays in one engine"
TEXT_ONLY = "models read and write text only"
_NO_BEAMS = "beam search is not implemented; 'n' and 'best_of' sample several choices"
_SPECULATION = "speculative decoding is configured on the server ('speculative_config')"


class UnservedEverywhere(ClosedObject):
    """Unsupported fields of chats, completions and responses."""

    service_tier: Annotated[Any, Only("auto", "default", reason="this server has one service tier")] = None
    watermarking: Annotated[Any, Only(False, reason="this server has no watermarks")] = None
    kv_transfer_params: Annotated[Any, Only(reason=_ONE_ENGINE)] = None
    ec_transfer_params: Annotated[Any, Only(reason=_ONE_ENGINE)] = None
    vllm_xargs: Annotated[Any, Only({}, reason="this server has no extensions that read them")] = None


class UnservedFields(UnservedEverywhere):
    """Unsupported fields of chats and completions."""

    use_beam_search: Annotated[Any, Only(False, reason=_NO_BEAMS)] = None
    length_penalty: Annotated[Any, Only(1, 1.0, reason="it is part of beam search")] = None
    repetition_detection: Annotated[Any, Only(reason="use 'stop', 'max_tokens' and the penalties instead")] = None
    routed_experts_prompt_start: Annotated[Any, Only(0, reason="the experts of a token are not returned")] = None
    return_token_offsets: Annotated[Any, Only(False, reason=_RENDER)] = None
    return_mm_kwargs: Annotated[Any, Only(True, reason=_RENDER)] = None


class MediaFields(ClosedObject):
    """Unsupported fields of all requests with messages."""

    media_io_kwargs: Annotated[Any, Only({}, reason=TEXT_ONLY)] = None
    mm_processor_kwargs: Annotated[Any, Only({}, reason=TEXT_ONLY)] = None


class UnservedInConversations(MediaFields):
    """Unsupported fields of chats and responses."""

    moderation: Annotated[Any, Only(reason="this server has no moderation model")] = None
    prompt_cache_options: Annotated[
        Any, Only({"mode": "implicit"}, reason="all prefixes are cached while memory lasts")
    ] = None


class UnservedByChat(UnservedInConversations):
    """Unsupported fields of chat completions."""

    modalities: Annotated[Any, Only(["text"], reason=TEXT_ONLY)] = None
    audio: Annotated[Any, Only(reason=TEXT_ONLY)] = None
    prediction: Annotated[Any, Only(reason=_SPECULATION)] = None
    verbosity: Annotated[Any, Only("medium", reason="no model is trained for it")] = None
    web_search_options: Annotated[Any, Only(reason="this server has no search")] = None


class UnservedByCompletions(ClosedObject):
    """Unsupported fields of completions."""

    store: Annotated[Any, Only(False, reason=_NOT_STORED)] = None
    thinking_token_budget: Annotated[Any, Only(-1, reason="completions have no reasoning; chats have")] = None
    prompt_embeds: Annotated[Any, Only(reason="prompts are text or token ids")] = None


TEMPLATE_NAMES = frozenset(("messages", "self"))
"""Variables of a chat template that requests cannot set."""


def check_template_variables(variables: JsonObject | None) -> None:
    """Raises OpenAIError for `chat_template_kwargs` with TEMPLATE_NAMES."""
    if taken := TEMPLATE_NAMES & (variables or {}).keys():
        raise refuse("chat_template_kwargs", f"variables other than {' and '.join(sorted(TEMPLATE_NAMES))}", min(taken))


REQUEST_ID = "^[!-~]{1,128}$"
"""The pattern of a client's request id."""
MAX_CHOICES = 128
"""Of one prompt."""
MAX_PROMPTS = 1024
MAX_GENERATIONS = 1024
"""Over all prompts of a request."""


class StreamOptions(ClosedObject):
    include_usage: Flag | None = Field(None, description="The last chunk has the usage.")
    continuous_usage_stats: Flag | None = Field(
        None, description="With include_usage: every chunk has the usage so far (a vLLM extra)."
    )
    include_obfuscation: Annotated[Any, Only(False)] = None


_MAX_NAMED = 64
"""At most this many keys are checked for an error that names every invalid one."""


def _check_token_bias(value: object) -> object:
    """Checked in Python, because a C call would hold the GIL too long for hundreds of thousands of items."""
    if not isinstance(value, dict):
        raise refuse("logit_bias", "an object", value)
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit()):
            wrong = [key for key in itertools.islice(value, _MAX_NAMED) if not (key.isascii() and key.isdigit())]
            raise refuse("logit_bias", "token ids as keys", wrong if token in wrong else token)
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise refuse(f"logit_bias.{token}", "a number from -100 to 100", bias)
    return value


_TokenBias = Annotated[
    dict[str, float],
    PlainValidator(_check_token_bias),
    WithJsonSchema(
        {
            "type": "object",
            "description": "Token id, below the model's vocabulary size, to bias.",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]


class Sampling(ClosedObject):
    """Sampling fields, which are passed to the model under the same names."""

    temperature: Annotated[float, Range(0, 2)] | None = None
    top_p: Annotated[float, Range(0, 1)] | None = Field(None, description="0: only the most likely token.")
    top_k: Annotated[int, Range(-1)] | None = Field(None, description="0 or -1: no limit.")
    min_p: Annotated[float, Range(0, 1)] | None = None
    presence_penalty: Annotated[float, Range(-2, 2)] | None = None
    frequency_penalty: Annotated[float, Range(-2, 2)] | None = None
    repetition_penalty: Annotated[float, Range(0, 100, is_above=True)] | None = None
    logit_bias: _TokenBias | None = None
    seed: Annotated[int, Range(-(2**63), 2**63 - 1)] | None = None
    stop: (
        Annotated[NonEmpty | Annotated[list[NonEmpty], Items()], Expected("a non-empty string or a list of them")]
        | None
    ) = None
    stop_token_ids: TokenIds | None = None
    min_tokens: Annotated[int, Range(0)] | None = Field(None, description="At most max_tokens.")
    ignore_eos: Flag | None = None
    include_stop_str_in_output: Flag | None = None
    skip_special_tokens: Flag | None = None
    prompt_logprobs: Annotated[int, Range(-1)] | None = Field(
        None, description="Number of most likely tokens at each position of the prompt; -1: all."
    )
    logprob_token_ids: Annotated[list[int], IsTokenIds(1)] | None = Field(
        None, description="With logprobs: report these tokens instead of the most likely ones."
    )
    allowed_token_ids: Annotated[list[int], IsTokenIds(1)] | None = Field(
        None, description="Only these tokens are generated."
    )
    bad_words: Annotated[list[NonEmpty], Items()] | None = Field(None, description="Texts that must not be generated.")
    truncation_side: Annotated[Literal["left", "right"], Expected('"left" or "right"')] | None = Field(
        None, description="Which end of the prompt truncate_prompt_tokens cuts off: left unless sent."
    )
    truncate_prompt_tokens: Annotated[int, Range(-1)] | None = Field(
        None, description="Keep only so many tokens of the prompt; -1: as many as fit."
    )
    add_special_tokens: Flag | None = Field(
        None,
        description="Add the tokenizer's special tokens; default: to text, not to conversations.",
    )
    spaces_between_special_tokens: Flag | None = None
    priority: Annotated[int, Range(-(2**31), 2**31 - 1)] | None = Field(
        None, description="Priority level of the model, 1 is the highest; 0: its default."
    )
    cache_salt: NonEmpty | None = Field(None, description="Only requests with the same salt share cached prefixes.")

    def chosen_sampling(self) -> JsonObject:
        """The fields that were sent; for others the model's defaults apply."""
        fields = self.__dict__
        chosen = {name: fields[name] for name in Sampling.__pydantic_fields__ if fields[name] is not None}
        if isinstance(self.stop, str):
            chosen["stop"] = [self.stop]
        if self.top_k == -1:  # "off" in older releases of vLLM
            chosen["top_k"] = 0
        return chosen


class _Request(Sampling, StructuredOutputFields, Labels, UnservedFields):
    """The fields that the two endpoints share."""

    model: str | None = Field(None, description="Default: the server's only model.")
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Range(0)] | None = Field(
        None, description="Must fit into the context. 0: only the prompt."
    )
    n: Annotated[int, Range(1, MAX_CHOICES)] | None = Field(None, description="Choices for each prompt.")
    best_of: Annotated[int, Range(1, MAX_CHOICES)] | None = Field(
        None, description="Choices to generate, of which the n most likely are returned; not streamed."
    )
    stream_interval: Annotated[int, Range(1)] | None = Field(
        None, description="With stream: tokens of a choice per chunk; at least the server's --stream-interval."
    )
    return_token_ids: Flag | None = Field(None, description="Return the answer's token ids.")
    return_tokens_as_token_ids: Flag | None = Field(
        None, description="With logprobs: return tokens as token_id:7 instead of text."
    )
    include_metrics: Flag | None = Field(
        None, description="Return the times of an answer with one choice; default: true where the server allows it."
    )
    request_id: (
        Annotated[str, StringConstraints(pattern=REQUEST_ID), Expected("1 to 128 visible characters")] | None
    ) = Field(None, description="Part of the response's id; the header X-Request-Id takes precedence.")


def needs(field: str, *alternatives: JsonObject) -> JsonObject:
    """JSON Schema: if `field` is sent, and not false or null, one of `alternatives` holds."""
    return {field: {"anyOf": [{"properties": {field: {"enum": [False, None]}}}, *alternatives]}}


def is_true(field: str) -> JsonObject:
    return {"properties": {field: {"const": True}}, "required": [field]}


_NUMBER_OF_LOGPROBS: JsonObject = {"properties": {"logprobs": {"type": "integer"}}, "required": ["logprobs"]}
_NO_ECHO: JsonObject = {"properties": {"echo": {"enum": [False, None]}}}
_NO_TOOLS: JsonObject = {"properties": {"tools": {"enum": [None, []]}, "tool_choice": {"type": "null"}}}
_NEEDS_STREAM = needs("stream_options", is_true("stream"))


class FunctionDefinition(ClosedObject):
    name: Annotated[str, StringConstraints(pattern=NAME_PATTERN), Expected(NAME_EXPECTED)]
    description: str | None = None
    parameters: AnyObject | None = Field(None, description="A JSON Schema; default: no arguments.")
    strict: Flag | None = Field(None, description="Guarantee that the arguments match the schema.")

    def offered(self, param: str) -> OfferedTool:
        at = f"{param}.name"
        return OfferedTool.of(
            self.name, self.description, self.parameters, bool(self.strict), f"{param}.parameters", at
        )


class FunctionTool(ClosedObject):
    type: Annotated[Any, Only("function")]
    function: FunctionDefinition
    custom: Annotated[Any, Only()] = None


def _check_tool_count(field: str) -> BeforeValidator:
    def check(value: object) -> object:
        if isinstance(value, list):
            check_tool_count(value, field)
        return value

    return BeforeValidator(check)


class ToolFields(ClosedObject):
    """Tool fields of chats. A named tool must be one of `tools`."""

    tools: Annotated[list[FunctionTool], Items(0, MAX_TOOLS), _check_tool_count("tools")] | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: Flag | None = Field(None, description="false: no more than one call.")
    functions: Annotated[list[FunctionDefinition], Items(0, MAX_TOOLS), _check_tool_count("functions")] | None = Field(
        None, description="The older form of tools; answers use the older form, too."
    )
    function_call: FunctionCall | None = None

    def tool_use(self) -> ToolUse | None:
        """None if no tool may be called. Raises OpenAIError for contradictions."""
        is_legacy = bool(self.functions) or self.function_call is not None
        if is_legacy and (self.tools or self.tool_choice is not None):
            raise OpenAIError("'functions' and 'function_call' cannot be sent with 'tools'", param="functions")
        max_calls = 1 if self.parallel_tool_calls is False else None
        if is_legacy:
            offered = [one.offered(f"functions[{index}]") for index, one in enumerate(self.functions or ())]
            return tool_use(offered, self.function_call, max_calls, is_legacy=True)
        offered = [one.function.offered(f"tools[{index}].function") for index, one in enumerate(self.tools or ())]
        return tool_use(offered, self.tool_choice, max_calls)


class ChatPromptFields(ToolFields):
    """The fields that form a chat's prompt, except `reasoning_effort`."""

    messages: Annotated[list[Message], Items(1)]
    add_generation_prompt: Flag | None = None
    chat_template_kwargs: AnyObject | None = Field(
        None, json_schema_extra={"propertyNames": {"not": {"enum": [*sorted(TEMPLATE_NAMES)]}}}
    )
    documents: Annotated[list[AnyObject], Items()] | None = Field(None, description="Passed to the chat template.")
    continue_final_message: Flag | None = Field(
        None, description="Continue the last message; not with add_generation_prompt: true."
    )
    chat_template: NonEmpty | None = Field(
        None, description="Replaces the model's template, if the server trusts templates of requests."
    )


class ChatCompletionRequest(_Request, ChatPromptFields, ReasoningFields, UnservedByChat):
    model_config = ConfigDict(
        defer_build=False,
        json_schema_extra={
            "dependentSchemas": _NEEDS_STREAM
            | {"top_logprobs": {"anyOf": [{"properties": {"top_logprobs": {"enum": [0, None]}}}, is_true("logprobs")]}}
            | needs("return_tokens_as_token_ids", is_true("logprobs"))
            | needs("logprob_token_ids", is_true("logprobs"))
            | needs("functions", {"properties": {"functions": {"maxItems": 0}}}, _NO_TOOLS)
            | needs("function_call", _NO_TOOLS)
        },
    )
    default_max_tokens: ClassVar[int | None] = None
    """Default: the rest of the context."""
    store: Flag | None = Field(None, description="The completion can be retrieved later. Not with request_id.")
    max_completion_tokens: Annotated[int, Range(0)] | None = Field(None, description="As max_tokens.")
    logprobs: Flag | None = None
    top_logprobs: Annotated[int, Range(-1)] | None = Field(
        None,
        description="At most the server's --max-logprobs, 20 by default; -1: all, where the server allows it.",
        json_schema_extra={"maximum": 20, "minimum": 0},
    )
    echo: Flag | None = Field(
        None, description="Begin the answer with the text of the final message, if it is from the assistant."
    )
    return_prompt_text: Flag | None = Field(None, description="Return the rendered prompt.")


def _check_count(prompt: object) -> object:
    if isinstance(prompt, list) and len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int):
        message = f"'prompt' holds {len(prompt)} prompts, expected at most {MAX_PROMPTS} in one request"
        raise OpenAIError(message, param="prompt", code="invalid_value")
    return prompt


_NonEmptyIds = Annotated[list[int], IsTokenIds(1)]
_Prompt = Annotated[
    Annotated[
        NonEmpty
        | Annotated[list[NonEmpty], Items(1, MAX_PROMPTS)]
        | _NonEmptyIds
        | Annotated[list[_NonEmptyIds], Items(1, MAX_PROMPTS)],
        Expected("a non-empty string, a list of strings, a list of token ids, or a list of such lists"),
    ],
    BeforeValidator(_check_count),
    Field(description="Text, token ids, or a list of either; one choice for each."),
]


class CompletionRequest(_Request, UnservedByCompletions):
    model_config = ConfigDict(
        defer_build=False,
        json_schema_extra={
            "dependentSchemas": _NEEDS_STREAM
            | needs("return_tokens_as_token_ids", _NUMBER_OF_LOGPROBS)
            | needs("logprob_token_ids", _NUMBER_OF_LOGPROBS)
            | needs("suffix", {"properties": {"suffix": {"const": ""}}}, _NO_ECHO)
        },
    )
    default_max_tokens: ClassVar[int | None] = 16
    prompt: _Prompt
    logprobs: Annotated[int, Range(0)] | None = Field(
        None, description="At most the server's --max-logprobs, 20 by default.", json_schema_extra={"maximum": 20}
    )
    echo: Flag | None = None
    suffix: str | None = Field(
        None,
        description="The text after the generated one, for models whose tokenizer has fill-in-the-middle tokens. "
        "Requires a text prompt, without echo and truncate_prompt_tokens.",
    )

    def chosen_sampling(self) -> JsonObject:
        return super().chosen_sampling() | ({"suffix": self.suffix} if self.suffix else {})

    def prompts(self) -> list[str] | list[list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if isinstance(prompt[0], int) else prompt
