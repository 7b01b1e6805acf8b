"""/tokenize and /detokenize: vLLM's endpoints for text to tokens and back.

For: the router. Does not know: tokenizers. Invariant: nothing in proportion to a body is done on the event loop.
Source: vLLM's documentation of these paths, and its answers' forms.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llmbackend.frontends.http.client_disconnect import unless_disconnected
from llmbackend.frontends.http.request_body import release_body
from llmbackend.frontends.inference_gate import InferenceGate

from .errors import JsonObject, OpenAIError
from .models import ModelCatalog
from .prompt_description import PromptDescription, describe_prompt
from .requests import check_content_type, decode_cost, json_object, read_body
from .tensors import RETURN_PROMPT_TOKENS
from .tokenization import PromptQuestion, parse_detokenize, parse_tokenize

_FEW_TOKENS: Final = 4096
"""So many are written as JSON on the event loop, in about 0.1 ms."""


class TokenizationEndpoints:
    def __init__(self, gate: InferenceGate, catalog: ModelCatalog, max_body_bytes: int) -> None:
        self._gate = gate
        self._catalog = catalog
        self._max_body_bytes = max_body_bytes

    def routes(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        """Each takes POST."""
        return {"/tokenize": self.tokenize, "/detokenize": self.detokenize}

    async def tokenize(self, http: Request) -> Response:
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
        return _json(written() if few else await self._gate.run_in_thread(written))

    async def detokenize(self, http: Request) -> Response:
        _, found = await self._ask(http, parse_detokenize)
        return _json(await self._gate.run_in_thread(lambda: orjson.dumps({"prompt": found.text})))

    async def _ask(
        self, http: Request, parse: Callable[[JsonObject], PromptQuestion]
    ) -> tuple[PromptQuestion, PromptDescription]:
        self._gate.check_room()
        check_content_type(http)
        body = await read_body(self._gate, http, self._max_body_bytes)
        question = await self._gate.decode_in_thread(decode_cost(body), lambda: parse(json_object(body)))
        target = self._catalog.require(self._catalog.named(question.model), question.prompt.name)
        release_body(http)
        work = describe_prompt(self._gate, target, question.prompt, question.wanted, sampling=question.sampling)
        try:
            return question, await unless_disconnected(http, work)
        except OpenAIError as error:
            raise question.in_own_fields(error) from None


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
