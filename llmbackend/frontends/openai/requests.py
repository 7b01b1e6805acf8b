"""Request bodies of the two generating endpoints → one frozen message.

For: the endpoints. Does not know: HTTP, the host, how responses are written. Invariant: a request that exists is
valid as far as it can be judged without the model, and holds everything its body asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmbackend.core.tensors import Tensor

from .errors import CONTEXT_LENGTH_EXCEEDED, OpenAIError, refuse
from .fields import Fields, JsonObject, is_token_ids
from .messages import parse_messages
from .sampling import (
    StreamOptions,
    check_min_tokens,
    take_model,
    take_neutral,
    take_sampling,
    take_stream,
)
from .tensors import MESSAGES, input_ids_tensor, messages_tensor, text_tensor

_DEFAULT_COMPLETION_TOKENS = 16
MAX_PROMPTS = 64
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "continue_final_message": (False,),
    "echo": (False,),
    "chat_template": (),
    "documents": (),
}
COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
}


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a client asked for.

    prompts: one tensor per choice (`messages`, `text_input` or `input_ids`). echo: the text before each choice's own,
    "" when not asked for. top_logprobs: None = no logprobs; n = the chosen token's and the n most likely ones'.
    stream: None = one whole response. asked: the fields of `sampling` that the client sent. max_tokens_field: the one
    in which it limited the answer, "" when it did not.
    """

    model: str
    prompts: tuple[Tensor, ...]
    sampling: dict[str, Any]
    stream: StreamOptions | None
    top_logprobs: int | None
    echo: tuple[str, ...]
    asked: tuple[str, ...]
    max_tokens_field: str

    @property
    def is_chat(self) -> bool:
        return self.prompts[0].name == MESSAGES

    def in_its_words(self, error: OpenAIError) -> OpenAIError:
        """An error of the model, naming the request's own fields."""
        if error.param == "max_tokens" and self.max_tokens_field:
            error.param = self.max_tokens_field
            error.message = error.message.replace("'max_tokens'", f"'{self.max_tokens_field}'")
        elif error.code == CONTEXT_LENGTH_EXCEEDED and error.param is None:
            error.param = "messages" if self.is_chat else "prompt"
        return error


def parse_chat(body: JsonObject) -> GenerationRequest:
    """Raises OpenAIError naming the first wrong, unknown or unsupported field."""
    fields = Fields(body)
    model = take_model(fields)
    prompt = _take_chat_prompt(fields)
    stream = take_stream(fields)
    sampling = take_sampling(fields)
    old, new = fields.integer("max_tokens", 1), fields.integer("max_completion_tokens", 1)
    max_tokens_field = "max_completion_tokens" if new else "max_tokens" if old else ""
    asked = (*sampling, *((max_tokens_field,) if max_tokens_field else ()))
    sampling["max_tokens"] = new or old  # None = as many as the context has room for
    check_min_tokens(sampling)
    top_logprobs = _take_chat_logprobs(fields)
    _take_neutral(fields, CHAT_NEUTRAL)
    return _request(model, (prompt,), sampling, stream, top_logprobs, ("",), asked, max_tokens_field)


def parse_completion(body: JsonObject) -> GenerationRequest:
    """Raises OpenAIError naming the first wrong, unknown or unsupported field."""
    fields = Fields(body)
    model = take_model(fields)
    prompts = _split_prompt(fields.require("prompt"))
    stream = take_stream(fields)
    sampling = take_sampling(fields)
    max_tokens = fields.integer("max_tokens", 1)
    max_tokens_field = "max_tokens" if max_tokens else ""
    asked = (*sampling, *((max_tokens_field,) if max_tokens_field else ()))
    sampling["max_tokens"] = max_tokens or _DEFAULT_COMPLETION_TOKENS
    check_min_tokens(sampling)
    top_logprobs = fields.integer("logprobs", 0, 5)
    echo = _echoed(fields.boolean("echo") or False, prompts, top_logprobs)
    _take_neutral(fields, COMPLETION_NEUTRAL)
    tensors = tuple(text_tensor(item) if isinstance(item, str) else input_ids_tensor(item) for item in prompts)
    return _request(model, tensors, sampling, stream, top_logprobs, echo, asked, max_tokens_field)


def _request(
    model: str,
    prompts: tuple[Tensor, ...],
    sampling: dict[str, Any],
    stream: StreamOptions | None,
    top_logprobs: int | None,
    echo: tuple[str, ...],
    asked: tuple[str, ...],
    max_tokens_field: str,
) -> GenerationRequest:
    if top_logprobs is not None:
        sampling["logprobs"] = top_logprobs
    return GenerationRequest(model, prompts, sampling, stream, top_logprobs, echo, asked, max_tokens_field)


def _take_neutral(fields: Fields, endpoint_fields: dict[str, tuple[Any, ...]]) -> None:
    for name, accepted in endpoint_fields.items():
        fields.only(name, accepted)
    take_neutral(fields)
    fields.finish()


def _take_chat_prompt(fields: Fields) -> Tensor:
    messages = parse_messages(fields.require("messages"))
    template_options = {
        "add_generation_prompt": fields.boolean("add_generation_prompt"),
        "chat_template_kwargs": fields.mapping("chat_template_kwargs"),
    }
    return messages_tensor(messages, {name: value for name, value in template_options.items() if value is not None})


def _take_chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs") or False
    top = fields.integer("top_logprobs", 0, 20)
    if top is not None and not wanted:
        raise refuse("top_logprobs", "to be sent only with 'logprobs': true", top)
    return (top or 0) if wanted else None


def _split_prompt(value: object) -> list[str | list[int]]:
    """The prompts of a request: OpenAI takes a string, token ids, or a list of either kind."""
    if isinstance(value, str):
        return [_not_empty(value)]
    if isinstance(value, list) and value:
        if is_token_ids(value):
            return [value]
        if len(value) > MAX_PROMPTS:
            text = f"'prompt' holds {len(value)} prompts, expected at most {MAX_PROMPTS} in one request"
            raise OpenAIError(text, param="prompt", code="invalid_value")
        if all(isinstance(item, str) for item in value) or all(is_token_ids(item) for item in value):
            return [_not_empty(item) for item in value]
    raise refuse("prompt", "a non-empty string, a list of strings, a list of token ids, or a list of such lists", value)


def _not_empty(prompt: Any) -> Any:
    if not prompt:
        raise refuse("prompt", "to hold at least one token", prompt)
    return prompt


def _echoed(echo: bool, prompts: list[str | list[int]], top_logprobs: int | None) -> tuple[str, ...]:
    if not echo:
        return ("",) * len(prompts)
    if top_logprobs is not None:
        raise OpenAIError("'echo' is not supported yet together with 'logprobs'", param="echo")
    texts = tuple(item for item in prompts if isinstance(item, str))
    if len(texts) != len(prompts):
        raise OpenAIError("'echo' is not supported yet for a prompt of token ids", param="echo")
    return texts
