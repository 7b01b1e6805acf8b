"""Prompts without generation: /tokenize, /detokenize, /tokenizer_info, and vLLM's render endpoints.

Invariants: a prompt is the one that a chat with the same fields has; render requests are read, planned and checked like
generating ones; no work that grows with a body is done on the event loop. Source: vLLM's protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final

import orjson
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from llmbackend.core.tensors import Tensor

from ..generation.answer import Identity
from ..generation.inferences import PromptDescription, check_fields, describe_prompt, in_client_fields, sampling_of
from ..generation.models import Target
from ..generation.plan import AnswerPlan, plan_answer
from ..generation.request import GenerationRequest
from ..generation.tensors import (
    INPUT_IDS,
    RETURN_MAX_MODEL_LEN,
    RETURN_NUM_INPUT_TOKENS,
    RETURN_PROMPT_TEXT,
    RETURN_PROMPT_TOKEN_IDS,
    RETURN_PROMPT_TOKENS,
    RETURN_SAMPLING_PARAMETERS,
    RETURN_TOKENIZER_CONFIG,
    input_ids_tensor,
    text_tensor,
)
from ..generation.validation import ClosedObject, Flag, TokenIds, read
from ..http.errors import JsonObject, OpenAIError
from ..http.request_body import release_body
from ..http.request_scope import unless_disconnected
from ..http.routing import get, post
from .endpoints import OpenAIEndpoints, json_answer
from .fields import Effort
from .http_types import Rendered, Text, TokenizerInfo, Tokens
from .requests import chat_prompt, parse_chat, parse_completion
from .schema import ChatCompletionRequest, ChatPromptFields, CompletionRequest, MediaFields

_MODEL = "Default: the only model."


class _TokenizeFields(ClosedObject):
    model: str | None = Field(None, description=_MODEL)
    add_special_tokens: Flag | None = Field(
        None, description="Add the tokenizer's special tokens; default: to text, not to conversations."
    )
    return_token_strs: Flag | None = Field(None, description="Return the tokens' names in the vocabulary.")


class TokenizeTextRequest(_TokenizeFields):
    model_config = ConfigDict(defer_build=False)
    prompt: str


class TokenizeChatRequest(_TokenizeFields, ChatPromptFields, MediaFields):
    model_config = ConfigDict(defer_build=False)
    reasoning_effort: Effort | None = Field(None, description="Passed to the chat template.")


class DetokenizeRequest(ClosedObject):
    model_config = ConfigDict(defer_build=False)
    model: str | None = Field(None, description=_MODEL)
    tokens: Annotated[TokenIds, Field(description="Token ids of the model's vocabulary.")]


@dataclass(frozen=True, slots=True)
class PromptQuestion:
    model: str | None
    prompt: Tensor
    wanted: tuple[str, ...]
    """The model's input flags for the requested outputs."""
    sampling: dict[str, Any] = field(default_factory=dict)

    def in_client_fields(self, error: OpenAIError) -> OpenAIError:
        """A model error in terms of the client's fields."""
        if self.prompt.name == INPUT_IDS and error.param is None and error.status == 400:
            error.param, error.message = "tokens", error.message.replace(f"input '{INPUT_IDS}'", "'tokens'")
        return error


def parse_tokenize(body: JsonObject) -> PromptQuestion:
    """Raises OpenAIError naming the first invalid, unknown or unsupported field."""
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
    """Raises OpenAIError naming the first invalid, unknown or unsupported field."""
    fields = read(DetokenizeRequest, body)
    return PromptQuestion(fields.model, input_ids_tensor(fields.tokens), (RETURN_PROMPT_TEXT,))


_FEW_TOKENS: Final = 4096
"""Up to this number, tokens are written as JSON on the event loop, in about 0.1 ms."""


class PromptEndpoints(OpenAIEndpoints):
    @post("/tokenize", body=TokenizeTextRequest | TokenizeChatRequest, answer=Tokens)
    async def tokenize(self, http: Request) -> Response:
        """The tokens of a text or of a conversation"""
        question, found = await self._ask(http, parse_tokenize)
        with_names = RETURN_PROMPT_TOKENS in question.wanted

        def written() -> bytes:
            answer = {
                "count": found.num_tokens,
                "max_model_len": found.max_model_len_tokens,
                "tokens": found.token_ids,
                "token_strs": orjson.Fragment(found.token_names) if with_names else None,
            }
            return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)

        few = found.num_tokens <= _FEW_TOKENS
        return json_answer(written() if few else await self._gate.run_in_thread(written))

    @post("/detokenize", body=DetokenizeRequest, answer=Text)
    async def detokenize(self, http: Request) -> Response:
        """The text of tokens"""
        _, found = await self._ask(http, parse_detokenize)
        return json_answer(await self._gate.run_in_thread(lambda: orjson.dumps({"prompt": found.text})))

    async def _ask(
        self, http: Request, parse: Callable[[JsonObject], PromptQuestion]
    ) -> tuple[PromptQuestion, PromptDescription]:
        self._gate.check_capacity()
        question = await self.parsed(http, parse)
        target = await self._catalog.require(await self._catalog.named(question.model), question.prompt.name)
        release_body(http)
        work = describe_prompt(self._gate, target, question.prompt, question.wanted, sampling=question.sampling)
        try:
            return question, await unless_disconnected(http, work)
        except OpenAIError as error:
            raise question.in_client_fields(error) from None

    @post("/v1/chat/completions/render", body=ChatCompletionRequest, answer=Rendered)
    async def chat(self, http: Request) -> Response:
        """Render a conversation as the engine would receive it"""
        [rendered] = await self._rendered(http, parse_chat)
        return json_answer(rendered)

    @post("/v1/completions/render", body=CompletionRequest, answer=list[Rendered])
    async def completions(self, http: Request) -> Response:
        """Render each prompt as the engine would receive it"""
        rendered = await self._rendered(http, parse_completion)
        return json_answer(b"[%b]" % b",".join(rendered))

    async def _rendered(self, http: Request, parse: Callable[[JsonObject], GenerationRequest]) -> list[bytes]:
        self._gate.check_capacity()
        request = await self._catalog.with_model(await self.parsed(http, parse))
        target = await self._catalog.require(request.model, request.prompts[0].name)
        check_fields(request, target)
        plan = plan_answer(request, target)
        release_body(http)
        return await unless_disconnected(http, self._all(request, target, plan))

    async def _all(self, request: GenerationRequest, target: Target, plan: AnswerPlan) -> list[bytes]:
        id = Identity.of(request, target.model.fingerprint, request.request_id).id
        wanted, sampling = (RETURN_PROMPT_TOKEN_IDS, RETURN_SAMPLING_PARAMETERS), sampling_of(request, target, plan)
        must_fit = bool(request.max_tokens_field)
        rendered = []
        for prompt in request.prompts:
            try:
                found = await describe_prompt(
                    self._gate, target, prompt, wanted, sampling=sampling, request_id=id, max_tokens_must_fit=must_fit
                )
            except OpenAIError as error:
                raise in_client_fields(error, request, plan) from None
            rendered.append(await self._gate.run_in_thread(partial(_written, request, id, found)))
        return rendered


class TokenizerInfoEndpoints(OpenAIEndpoints):
    @get("/tokenizer_info", answer=TokenizerInfo)
    async def tokenizer_info(self, http: Request) -> Response:
        """The tokenizer's configuration and the chat template of `?model=`, by default of the only model"""
        self._gate.check_capacity()
        prompt = text_tensor("")
        model = await self._catalog.named(http.query_params.get("model"))
        target = await self._catalog.require(model, prompt.name)
        work = describe_prompt(self._gate, target, prompt, (RETURN_TOKENIZER_CONFIG,))
        return json_answer((await unless_disconnected(http, work)).tokenizer_config)


def _written(request: GenerationRequest, request_id: str, found: PromptDescription) -> bytes:
    names = ("include_usage", "continuous_usage_stats")
    options = {name: value for name in names if (value := getattr(request.stream, name, None)) is not None}
    fields = {
        "request_id": request_id,
        "token_ids": found.token_ids,
        "features": None,
        "sampling_params": orjson.Fragment(found.sampling_parameters),
        "model": request.model,
        "stream": request.stream is not None,
        "stream_options": options or None,
        "cache_salt": request.sampling.get("cache_salt"),
        "priority": request.sampling.get("priority") or 0,
        "kv_transfer_params": None,
    }
    return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
