"""Reads the body of a Messages request as a GenerationRequest.

Independent of HTTP, the host and the format of answers. Invariant: the prompt is the one that the same chat has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ..conversation.tools import ToolUse
from ..generation.request import STRUCTURED_OUTPUTS, WITH_USAGE, GenerationRequest, ReasoningUse
from ..generation.sealed_reasoning import SealingKey
from ..generation.tensors import messages_tensor
from ..generation.validation import ClosedObject, read
from ..http.errors import JsonObject, OpenAIError, missing, requires
from ..openai.schema import check_template_variables
from .content import BetaFields, check_cache_control, read_conversation, read_tools
from .schema import NESTED, CountTokensRequest, JsonFormat, MessagesRequest, PromptFields, Thinking, UnservedFields

_SAMPLING: Final = ("temperature", "top_k", "top_p", "seed")
_FIELD_NAMES: Final = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
}
"""Field names of chats and sampling parameters → Anthropic's names."""
Body = TypeVar("Body", bound=PromptFields)


@dataclass(frozen=True, slots=True)
class MessageRequest:
    generation: GenerationRequest
    max_tokens: int
    shows_thinking: bool
    """False: only the signature of the reasoning is sent, not its text."""


def parse_message(body: JsonObject, beta: BetaFields, key: SealingKey) -> MessageRequest:
    """key: signs the thinking blocks. Raises OpenAIError naming the first invalid or unsupported field."""
    fields = _read(MessagesRequest, body, beta)
    tools = read_tools(fields.tools, fields.tool_choice, beta)
    sampling: JsonObject = {"max_tokens": fields.max_tokens}
    sampling |= {name: value for name in _SAMPLING if (value := getattr(fields, name)) is not None}
    if fields.stop_sequences:
        sampling["stop"] = fields.stop_sequences
    structure, schema_field = _structure(fields)
    thinking = fields.thinking
    request = GenerationRequest(
        model=fields.model,
        prompts=(_prompt(fields, tools, beta, key),),
        id_prefix="msg_",
        prompt_field="messages",
        sampling=sampling | structure,
        stream=WITH_USAGE if fields.stream else None,
        labels={} if fields.metadata is None or not fields.metadata.user_id else {"user_id": fields.metadata.user_id},
        sent_fields=tuple(sampling),
        structure_field=schema_field.removesuffix(".schema"),
        schema_field=schema_field,
        field_names=_FIELD_NAMES,
        tool_use=tools,
        reasoning=_reasoning(thinking),
    )
    return MessageRequest(request, fields.max_tokens, thinking is None or thinking.display != "omitted")


def parse_prompt(body: JsonObject, beta: BetaFields, key: SealingKey) -> GenerationRequest:
    """Reads a request to count tokens. Raises OpenAIError."""
    fields = _read(CountTokensRequest, body, beta)
    tools = read_tools(fields.tools, fields.tool_choice, beta)
    _structure(fields)
    prompt = _prompt(fields, tools, beta, key)
    return GenerationRequest(
        model=fields.model, prompts=(prompt,), id_prefix="msg_", prompt_field="messages", sampling={}, tool_use=tools
    )


def _read(model: type[Body], body: JsonObject, beta: BetaFields) -> Body:
    if body.get("thread") is not None:  # even with betas: its messages are not the whole conversation
        raise UnsupportedThreadError
    fields = read(model, _known(model, body, beta))
    if fields.messages is None:
        raise missing("messages")
    check_cache_control(fields.cache_control, "cache_control", beta)
    check_template_variables(fields.chat_template_kwargs)
    _check_thinking(fields.thinking)
    return fields


def _known(model: type[ClosedObject], body: JsonObject, beta: BetaFields, param: str = "") -> JsonObject:
    """`body` without beta fields that have no effect here."""
    if not beta.are_named:
        return body
    known = model.__pydantic_fields__.keys() | model.field_aliases
    kept: JsonObject = {}
    for name, value in body.items():
        path = f"{param}.{name}" if param else name
        if name not in known or name in UnservedFields.__pydantic_fields__:
            if value is not None:
                beta.unserved(path)
        elif not param and name in NESTED and isinstance(value, dict):
            kept[name] = _known(NESTED[name], value, beta, path)
        else:
            kept[name] = value
    return kept


def _check_thinking(thinking: Thinking | None) -> None:
    if thinking is None:
        return
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        raise missing("thinking.budget_tokens")
    if thinking.type != "enabled" and thinking.budget_tokens is not None:
        raise requires("thinking.budget_tokens", "'thinking.type': \"enabled\"")
    if thinking.type == "disabled" and thinking.display is not None:
        raise requires("thinking.display", '\'thinking.type\': "enabled" or "adaptive"')


def _reasoning(thinking: Thinking | None) -> ReasoningUse:
    if thinking is None:
        return ReasoningUse()
    return ReasoningUse(is_included=thinking.type != "disabled", budget_tokens=thinking.budget_tokens)


def _structure(fields: PromptFields) -> tuple[JsonObject, str]:
    """Sampling parameters for the answer's schema, and the field that contains it."""
    config = fields.output_config.format if fields.output_config is not None else None
    if config is not None and fields.output_format is not None:
        message = "'output_config.format' and 'output_format' are mutually exclusive"
        raise OpenAIError(message, param="output_format", code="invalid_value")
    chosen: JsonFormat | None = config or fields.output_format
    where = "output_format.schema" if config is None else "output_config.format.schema"
    return ({} if chosen is None else {STRUCTURED_OUTPUTS: {"json": chosen.schema_}}), where


def _prompt(fields: PromptFields, tools: ToolUse | None, beta: BetaFields, key: SealingKey) -> Any:
    conversation = read_conversation(fields.system, fields.messages, beta, key)
    options: JsonObject = {}
    if conversation.has_later_system:
        options["system_is_anywhere"] = True
    if tools is not None:
        options["tools"] = tools.tools
    if conversation.is_prefilled:
        options |= {"continue_final_message": True, "add_generation_prompt": False}
    if fields.output_config is not None and fields.output_config.effort is not None:
        options["reasoning_effort"] = fields.output_config.effort
    if variables := _variables(fields.thinking, fields.chat_template_kwargs or {}):
        options["chat_template_kwargs"] = variables
    return messages_tensor(conversation.messages, options)


def _variables(thinking: Thinking | None, variables: Mapping[str, Any]) -> JsonObject:
    """Variables of the chat template: model families use these names to turn thinking on or off."""
    if thinking is None:
        return dict(variables)
    thinks = thinking.type != "disabled"
    return {"enable_thinking": thinks, "thinking": thinks, **variables}


class UnsupportedThreadError(OpenAIError):
    """A request about a thread, a conversation stored by the server. After an error with these details, Anthropic's
    clients send the whole conversation."""

    details: Final = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}

    def __init__(self) -> None:
        message = "'thread' is not supported: this server stores no conversations; send all messages"
        super().__init__(message, param="thread", code="unsupported_parameter")
