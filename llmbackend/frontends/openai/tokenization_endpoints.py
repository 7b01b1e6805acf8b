"""/tokenize and /detokenize: vLLM's endpoints for text to tokens and back.

For: the router. Does not know: tokenizers. Invariant: nothing in proportion to a body is done on the event loop.
Source: vLLM's documentation of these paths, and its answers' forms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llmbackend.frontends.http.request_body import release_body
from llmbackend.frontends.http.request_scope import unless_disconnected
from llmbackend.frontends.http.routing import post
from llmbackend.frontends.inference_gate import InferenceGate

from .endpoints import OpenAIEndpoints, json_answer
from .errors import JsonObject, OpenAIError
from .http_types import Text, Tokens
from .models import ModelCatalog
from .prompt_description import PromptDescription, describe_prompt
from .tensors import RETURN_PROMPT_TOKENS
from .tokenization import (
    DetokenizeRequest,
    PromptQuestion,
    TokenizeChatRequest,
    TokenizeTextRequest,
    parse_detokenize,
    parse_tokenize,
)

_FEW_TOKENS: Final = 4096
"""So many are written as JSON on the event loop, in about 0.1 ms."""


class TokenizationEndpoints(OpenAIEndpoints):
    def __init__(self, gate: InferenceGate, catalog: ModelCatalog, max_body_bytes: int) -> None:
        super().__init__(gate, max_body_bytes)
        self._catalog = catalog

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
        self._gate.check_room()
        question = await self.parsed(http, parse)
        target = self._catalog.require(self._catalog.named(question.model), question.prompt.name)
        release_body(http)
        work = describe_prompt(self._gate, target, question.prompt, question.wanted, sampling=question.sampling)
        try:
            return question, await unless_disconnected(http, work)
        except OpenAIError as error:
            raise question.in_own_fields(error) from None
