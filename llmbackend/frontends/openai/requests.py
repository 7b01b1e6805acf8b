"""Reads the JSON of a chat or completion into a GenerationRequest."""

from __future__ import annotations

import dataclasses

import orjson

from llmbackend.core.tensors import Tensor

from ..conversation.tools import ToolUse
from ..generation.request import GenerationRequest, LogprobForm, PromptForm, ReasoningUse, StoredParts, StreamForm
from ..generation.tensors import input_ids_tensor, messages_tensor, text_tensor
from ..generation.validation import read
from ..http.errors import JsonObject, OpenAIError, refuse, requires
from ..protocol_options import RequestDefaults
from .messages import for_template
from .schema import (
    MAX_GENERATIONS,
    ChatCompletionRequest,
    ChatPromptFields,
    CompletionRequest,
    check_template_variables,
)

_MAX_TOKENS_FIELDS = ("max_completion_tokens", "max_tokens")
"""The first one that is set is the limit."""
_STORED_FIELDS = ("response_format", "seed", "tool_choice", "tools")
_TEMPLATE_OPTIONS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
)


def with_defaults(body: JsonObject, defaults: RequestDefaults) -> JsonObject:
    """The body with the operator's defaults for fields that are missing or null; for `stream_interval`, the least."""
    if body.get("include_metrics") is True and not defaults.per_request_metrics:
        message = "'include_metrics' is not supported: the server was started without --enable-per-request-metrics"
        raise OpenAIError(message, param="include_metrics", code="unsupported_parameter")
    added: JsonObject = {"include_metrics": True} if defaults.per_request_metrics else {}
    logprobs = body.get("logprobs")
    if defaults.return_tokens_as_token_ids and logprobs is not None and logprobs is not False:  # 0 is a number of them
        added["return_tokens_as_token_ids"] = True
    if body.get("stream") is True:
        least, own = defaults.stream_interval_tokens, body.get("stream_interval")
        if least > 1 and (own is None or (type(own) is int and 0 < own < least)):  # others are valid, or refused later
            body = body | {"stream_interval": least}
        options = body.get("stream_options")
        if defaults.force_include_usage and isinstance(options, dict | None):
            body = body | {"stream_options": (options or {}) | {"include_usage": True, "continuous_usage_stats": True}}
    return body | {name: value for name, value in added.items() if body.get(name) is None}


def parse_chat(body: JsonObject) -> GenerationRequest:
    """Raises OpenAIError naming the first invalid, unknown or unsupported field."""
    fields = read(ChatCompletionRequest, body)
    if fields.top_logprobs and not fields.logprobs:
        raise requires("top_logprobs", "'logprobs': true")
    tool_use = fields.tool_use()
    prompt, messages = chat_prompt(fields, body, tool_use)
    top_logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    form = PromptForm(
        has_rendered_text=bool(fields.return_prompt_text),
        has_token_ids=bool(fields.return_token_ids),
        logprobs=fields.prompt_logprobs,
    )
    echo = str(messages[-1]["content"]) if fields.echo and messages[-1]["role"] == "assistant" else ""
    request = _request(fields, body, (prompt,), (echo,), top_logprobs, form)
    stored = _stored_parts(fields, body) if fields.store else None
    reasoning = ReasoningUse(fields.include_reasoning is not False, fields.thinking_token_budget)
    return dataclasses.replace(request, tool_use=tool_use, reasoning=reasoning, stored=stored)


def _stored_parts(fields: ChatCompletionRequest, body: JsonObject) -> StoredParts:
    if fields.request_id is not None:
        message = "'request_id' is not supported with 'store': the server chooses the ids of stored completions"
        raise OpenAIError(message, param="request_id", code="unsupported_parameter")
    repeated = {name: body.get(name) for name in _STORED_FIELDS} | {
        "frequency_penalty": fields.frequency_penalty or 0.0,
        "presence_penalty": fields.presence_penalty or 0.0,
        "input_user": fields.user,
        "service_tier": "default",
    }
    return StoredParts(orjson.dumps(body["messages"]), orjson.dumps(repeated))


def chat_prompt(
    fields: ChatPromptFields, body: JsonObject, tool_use: ToolUse | None
) -> tuple[Tensor, list[JsonObject]]:
    """The prompt of a chat, and its messages for the template. body: `fields` as sent"""
    messages = [for_template(message, f"messages[{index}]") for index, message in enumerate(fields.messages)]
    options = {name: body[name] for name in _TEMPLATE_OPTIONS if body.get(name) is not None}
    check_template_variables(fields.chat_template_kwargs)
    if tool_use is not None:
        options["tools"] = tool_use.tools
    return messages_tensor(messages, options), messages


def parse_completion(body: JsonObject) -> GenerationRequest:
    """Raises OpenAIError naming the first invalid, unknown or unsupported field."""
    fields = read(CompletionRequest, body)
    if fields.suffix and fields.echo:
        message = "'suffix' is not supported with 'echo'"
        raise OpenAIError(message, param="suffix", code="unsupported_parameter")
    prompts = fields.prompts()
    tensors = tuple(text_tensor(item) if isinstance(item, str) else input_ids_tensor(item) for item in prompts)
    # The text of token ids, and of a prompt that may be cut, is the model's.
    has_text = bool(fields.echo) and (isinstance(prompts[0], list) or fields.truncate_prompt_tokens is not None)
    echo = tuple(item if fields.echo and not has_text and isinstance(item, str) else "" for item in prompts)
    form = PromptForm(
        has_text=has_text,
        has_echoed_logprobs=bool(fields.echo) and fields.logprobs is not None,
        has_token_ids=bool(fields.return_token_ids),
        logprobs=fields.prompt_logprobs,
    )
    return _request(fields, body, tensors, echo, fields.logprobs, form)


def _request(
    fields: ChatCompletionRequest | CompletionRequest,
    body: JsonObject,
    prompts: tuple[Tensor, ...],
    echo: tuple[str, ...],
    top_logprobs: int | None,
    prompt_form: PromptForm,
) -> GenerationRequest:
    sampling = fields.chosen_sampling() | fields.chosen_structure()
    limit = next((name for name in _MAX_TOKENS_FIELDS if body.get(name) is not None), "")
    sent_fields = (*sampling, limit) if limit else tuple(sampling)
    most = sampling["max_tokens"] = body[limit] if limit else fields.default_max_tokens
    if most is not None and (fields.min_tokens or 0) > most:
        raise refuse("min_tokens", f"at most max_tokens ({most})", fields.min_tokens)
    if top_logprobs is not None:
        sampling["logprobs"] = top_logprobs
        if prompt_form.has_echoed_logprobs:
            sampling["prompt_logprobs"] = top_logprobs
    if (wanted := fields.prompt_logprobs) is not None:
        sampling["prompt_logprobs"] = wanted if wanted < 0 else max(wanted, sampling["prompt_logprobs"])
    n, best_of = _choices(fields, len(prompts))
    is_chat = isinstance(fields, ChatCompletionRequest)
    if best_of > 1:
        sampling |= {"n": n, "best_of": best_of}
    return GenerationRequest(
        model=fields.model or "",
        prompts=prompts,
        id_prefix="chatcmpl-" if is_chat else "cmpl-",
        prompt_field="messages" if is_chat else "prompt",
        n=n,
        num_generations=best_of * len(prompts),
        sampling=sampling,
        stream=_stream_form(fields, body),
        logprobs=_logprob_form(fields, top_logprobs),
        return_token_ids=bool(fields.return_token_ids),
        include_metrics=bool(fields.include_metrics) and n * len(prompts) == 1,
        prompt_form=prompt_form,
        labels=fields.sent_labels(),
        echo=echo,
        sent_fields=sent_fields,
        max_tokens_field=limit,
        structure_field=fields.structure_field,
        schema_field=fields.schema_field,
        request_id=fields.request_id or "",
    )


def _choices(fields: ChatCompletionRequest | CompletionRequest, num_prompts: int) -> tuple[int, int]:
    """Choices per prompt that are sent, and that are generated."""
    n = fields.n or 1
    best_of = n if fields.best_of is None else fields.best_of
    if best_of < n:
        raise refuse("best_of", f"at least n ({n})", best_of)
    if best_of > n and fields.stream:
        raise refuse("best_of", f"n ({n}) in a stream: the best choices are known only at the end", best_of)
    if best_of * num_prompts > MAX_GENERATIONS:
        each = MAX_GENERATIONS // num_prompts
        most = f"at most {each} for {num_prompts} prompts: {MAX_GENERATIONS} choices in one request"
        raise refuse("best_of" if best_of > n else "n", most, best_of)
    return n, best_of


def _logprob_form(fields: ChatCompletionRequest | CompletionRequest, top_logprobs: int | None) -> LogprobForm | None:
    as_token_ids, token_ids = bool(fields.return_tokens_as_token_ids), fields.logprob_token_ids or ()
    if top_logprobs is not None:
        return LogprobForm(top_logprobs, as_token_ids, tuple(map(str, token_ids)))
    if as_token_ids:
        raise requires("return_tokens_as_token_ids", "'logprobs'")
    if token_ids:
        raise requires("logprob_token_ids", "'logprobs'")
    return None


def _stream_form(fields: ChatCompletionRequest | CompletionRequest, body: JsonObject) -> StreamForm | None:
    options, interval_tokens = fields.stream_options, fields.stream_interval
    if fields.stream:
        usage = (None, None) if options is None else (options.include_usage, options.continuous_usage_stats)
        return StreamForm(*usage, interval_tokens or 1)
    if options is not None:
        raise requires("stream_options", "'stream': true")
    return None
