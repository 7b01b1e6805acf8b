"""The bodies of /tokenize and /detokenize: read, and made to questions that a model answers without an engine.

For: the endpoints. Does not know: HTTP, the host. Invariant: the prompt of a conversation is the one that a chat with
the same fields would have; a field is acted on or refused by name.
Source: vLLM's protocol of these paths.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from llmbackend.core.tensors import Tensor

from .errors import JsonObject, OpenAIError
from .reasoning import Effort
from .requests import chat_prompt
from .schema import ChatPromptFields
from .tensors import (
    INPUT_IDS,
    RETURN_MAX_MODEL_LEN,
    RETURN_NUM_INPUT_TOKENS,
    RETURN_PROMPT_TEXT,
    RETURN_PROMPT_TOKEN_IDS,
    RETURN_PROMPT_TOKENS,
    input_ids_tensor,
    text_tensor,
)
from .unserved_fields import MediaFields
from .validation import ClosedObject, Flag, TokenIds, read

_MODEL = "Without it: the only one that is served."


class _TokenizeFields(ClosedObject):
    """Of both forms of a prompt."""

    model: str | None = Field(None, description=_MODEL)
    add_special_tokens: Flag | None = Field(
        None, description="Whether the tokenizer adds its own: by default to a text, not to a conversation."
    )
    return_token_strs: Flag | None = Field(None, description="The tokens' names in the vocabulary come along.")


class TokenizeTextRequest(_TokenizeFields):
    model_config = ConfigDict(defer_build=False)
    prompt: str


class TokenizeChatRequest(_TokenizeFields, ChatPromptFields, MediaFields):
    model_config = ConfigDict(defer_build=False)
    reasoning_effort: Effort | None = Field(None, description="For chat templates that read it.")


class DetokenizeRequest(ClosedObject):
    model_config = ConfigDict(defer_build=False)
    model: str | None = Field(None, description=_MODEL)
    tokens: Annotated[TokenIds, Field(description="Of the model's vocabulary.")]


@dataclass(frozen=True, slots=True)
class PromptQuestion:
    """What a client wants to know of a prompt."""

    model: str | None
    prompt: Tensor
    wanted: tuple[str, ...]
    """Flags of the model's inputs."""
    sampling: dict[str, Any] = field(default_factory=dict)

    def in_own_fields(self, error: OpenAIError) -> OpenAIError:
        """An error of the model with the request's names of fields."""
        if self.prompt.name == INPUT_IDS and error.param is None and error.status == 400:
            error.param, error.message = "tokens", error.message.replace(f"input '{INPUT_IDS}'", "'tokens'")
        return error


def parse_tokenize(body: JsonObject) -> PromptQuestion:
    """Raises OpenAIError naming the first wrong, unknown or unsupported field."""
    fields: TokenizeTextRequest | TokenizeChatRequest
    if "messages" in body:
        fields = read(TokenizeChatRequest, body)
        prompt, _ = chat_prompt(fields, body, fields.tool_use())
    else:
        fields = read(TokenizeTextRequest, body)
        prompt = text_tensor(fields.prompt)
    wanted = (RETURN_NUM_INPUT_TOKENS, RETURN_MAX_MODEL_LEN, RETURN_PROMPT_TOKEN_IDS)
    names = (RETURN_PROMPT_TOKENS,) if fields.return_token_strs else ()
    adds = fields.add_special_tokens
    sampling = {} if adds is None else {"add_special_tokens": adds}
    return PromptQuestion(fields.model, prompt, (*wanted, *names), sampling)


def parse_detokenize(body: JsonObject) -> PromptQuestion:
    """Raises OpenAIError naming the first wrong, unknown or unsupported field."""
    fields = read(DetokenizeRequest, body)
    return PromptQuestion(fields.model, input_ids_tensor(fields.tokens), (RETURN_PROMPT_TEXT,))
