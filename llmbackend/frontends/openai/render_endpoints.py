"""/v1/chat/completions/render and /v1/completions/render: what an engine would get for a request, and nothing is
generated.

For: the router. Does not know: templates, tokenizers. Invariant: a request is read, planned and checked as the one that
generates, so that both take or refuse the same.
Source: vLLM's render endpoints and their answer, GenerateRequest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llmbackend.core.tensors import Tensor
from llmbackend.frontends.http.request_body import release_body
from llmbackend.frontends.http.request_scope import unless_disconnected
from llmbackend.frontends.http.routing import post
from llmbackend.frontends.inference_gate import InferenceGate

from .answer_plan import AnswerPlan, plan_answer
from .endpoints import OpenAIEndpoints, json_answer
from .errors import JsonObject, OpenAIError
from .generation import check_fields_taken, sampling_of
from .http_types import Rendered
from .models import ModelCatalog, Target
from .prompt_description import PromptDescription, describe_prompt
from .requests import GenerationRequest, parse_chat, parse_completion
from .responses import Identity
from .schema import ChatCompletionRequest, CompletionRequest
from .tensors import RETURN_PROMPT_TOKEN_IDS, RETURN_SAMPLING_PARAMETERS


class RenderEndpoints(OpenAIEndpoints):
    def __init__(self, gate: InferenceGate, catalog: ModelCatalog, max_body_bytes: int) -> None:
        super().__init__(gate, max_body_bytes)
        self._catalog = catalog

    @post("/v1/chat/completions/render", body=ChatCompletionRequest, answer=Rendered)
    async def chat(self, http: Request) -> Response:
        """What an engine would get for a conversation"""
        [rendered] = await self._rendered(http, parse_chat)
        return json_answer(rendered)

    @post("/v1/completions/render", body=CompletionRequest, answer=list[Rendered])
    async def completions(self, http: Request) -> Response:
        """What an engine would get for each prompt"""
        rendered = await self._rendered(http, parse_completion)
        return json_answer(b"[%b]" % b",".join(rendered))

    async def _rendered(self, http: Request, parse: Callable[[JsonObject], GenerationRequest]) -> list[bytes]:
        self._gate.check_room()
        request = self._catalog.with_model(await self.parsed(http, parse))
        target = self._catalog.require(request.model, request.prompts[0].name)
        check_fields_taken(request, target)
        plan = plan_answer(request, target)
        release_body(http)
        return await unless_disconnected(http, self._all(request, target, plan))

    async def _all(self, request: GenerationRequest, target: Target, plan: AnswerPlan | None) -> list[bytes]:
        identity = Identity.of(request, target.model.fingerprint, request.request_id)
        rendered = []
        for prompt in request.prompts:
            found = await self._one(request, target, plan, prompt, identity.id)
            rendered.append(await self._gate.run_in_thread(partial(_written, request, identity.id, found)))
        return rendered

    async def _one(
        self, request: GenerationRequest, target: Target, plan: AnswerPlan | None, prompt: Tensor, request_id: str
    ) -> PromptDescription:
        wanted = (RETURN_PROMPT_TOKEN_IDS, RETURN_SAMPLING_PARAMETERS)
        try:
            return await describe_prompt(
                self._gate,
                target,
                prompt,
                wanted,
                sampling=sampling_of(request, target, plan),
                request_id=request_id,
                max_tokens_must_fit=bool(request.max_tokens_field),
            )
        except OpenAIError as error:
            if plan is not None and plan.is_about_calls(error):
                raise plan.in_own_fields(error) from None
            raise request.in_own_fields(error) from None


def _written(request: GenerationRequest, request_id: str, found: PromptDescription) -> bytes:
    options = None if request.stream is None else request.stream.model_dump(exclude_none=True)
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
