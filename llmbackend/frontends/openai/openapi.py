"""The endpoints under /v1 in OpenAPI's words.

For: `frontends/openapi.py`. Does not know: handlers. Invariant: requests are documented by the models that read
them (schema.py); responses, which are written by hand, have their forms here (`make fuzz` compares them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core import core_schema

from ..http.openapi_parts import array, body, closed, json_response, operation, optional, plain_response, ref, refusals
from ..http.responses import TEXT
from .errors import JsonObject
from .lora_endpoints import LoadLoraAdapterRequest, UnloadLoraAdapterRequest
from .responses_api import conversation_openapi, stored_openapi
from .responses_api.input_tokens import FIELDS as INPUT_TOKENS_FIELDS
from .responses_api.openapi import RESPONSE
from .responses_api.schema import ResponsesBody
from .schema import ChatCompletionRequest, CompletionRequest
from .tokenization import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest

_STRING: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_NULL: Final = {"type": "null"}
_USAGE: Final = closed(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": closed({"cached_tokens": _COUNT}),
        "completion_tokens_details": closed({"reasoning_tokens": _COUNT}),
    },
    required=["prompt_tokens", "completion_tokens", "total_tokens"],
)


_REQUESTS: Final = (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesBody,
    TokenizeTextRequest,
    TokenizeChatRequest,
    DetokenizeRequest,
    LoadLoraAdapterRequest,
    UnloadLoraAdapterRequest,
    *conversation_openapi.REQUESTS,
)


class _PlainJsonSchema(GenerateJsonSchema):
    """Without titles, which repeat names, and defaults, which are all null."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonObject:
        return self.generate_inner(schema["schema"])


def request_schemas(*models: type[BaseModel]) -> JsonObject:
    """The components that describe request bodies, by name."""
    requests: Any = [(model, "validation") for model in models]
    _, documented = models_json_schema(requests, ref_template=ref("{model}")["$ref"], schema_generator=_PlainJsonSchema)
    found: JsonObject = documented["$defs"]
    for schema in found.values():
        schema.pop("title", None)
    return found


def schemas() -> JsonObject:
    """All components of the document, by name."""
    return _RESPONSES | conversation_openapi.SCHEMAS | stored_openapi.SCHEMAS | request_schemas(*_REQUESTS)


_FINISH_REASONS: Final = ("stop", "length")


_OF_PROMPT: Final[JsonObject] = {
    "prompt_token_ids": array(_COUNT),
    "prompt_logprobs": array({"type": ["object", "null"]}),
    "prompt_text": _STRING,
}
"""What an answer says of its prompt, where the request asks for it: in each choice of a completion."""


def _completion(kind: str, choice: JsonObject, finish_reasons: Sequence[str]) -> JsonObject:
    shared = {
        "index": _COUNT,
        "logprobs": {"type": ["object", "null"]},
        "finish_reason": {"enum": finish_reasons},
        "stop_reason": {"type": ["string", "integer", "null"], "description": "The `stop` or `stop_token_ids` it met."},
    }
    of_choice, of_answer = ({}, _OF_PROMPT) if kind == "chat.completion" else (_OF_PROMPT, {})
    answer = {
        "id": _STRING,
        "object": {"const": kind},
        "created": _COUNT,
        "model": _STRING,
        "system_fingerprint": optional(_STRING),
        "choices": array(_with(shared | choice, {"token_ids": array(_COUNT)} | of_choice)),
        "usage": {"anyOf": [_USAGE, {"type": "null", "description": "The model counts no tokens."}]},
    }
    return _with(answer, of_answer)


def _with(properties: JsonObject, asked_for: JsonObject) -> JsonObject:
    """An object with these members, and with those that a request asks for."""
    return closed(properties | asked_for, required=list(properties))


_CALLED: Final = closed({"name": _STRING, "arguments": _STRING})
_MESSAGE: Final = closed(
    {
        "role": {"const": "assistant"},
        "content": optional(_STRING),
        "refusal": _NULL,
        "reasoning": optional(_STRING),
        "reasoning_content": optional(_STRING),
        "tool_calls": array(closed({"id": _STRING, "type": {"const": "function"}, "function": _CALLED})),
        "function_call": _CALLED,
    },
    required=["role", "content", "refusal"],
)

_RESPONSES: Final[JsonObject] = {
    "OpenAIError": closed(
        {"error": closed({"message": _STRING, "type": _STRING, "param": optional(_STRING), "code": optional(_STRING)})}
    ),
    "Model": closed(
        {
            "id": _STRING,
            "object": {"const": "model"},
            "created": _COUNT,
            "owned_by": _STRING,
            "root": _STRING,
            "parent": optional(_STRING),
            "max_model_len": optional(_COUNT),
        }
    ),
    "ModelList": closed({"object": {"const": "list"}, "data": array(ref("Model"))}),
    "ChatCompletion": _completion(
        "chat.completion",
        {"message": _MESSAGE},
        [*_FINISH_REASONS, "tool_calls", "function_call"],
    ),
    "Completion": _completion("text_completion", {"text": _STRING}, _FINISH_REASONS),
    "Response": RESPONSE,
    "InputTokens": closed({"object": {"const": "response.input_tokens"}, "input_tokens": _COUNT}),
    "InputTokensBody": {"allOf": [ref("ResponsesBody")], "propertyNames": {"enum": sorted(INPUT_TOKENS_FIELDS)}},
    "TokenizeRequest": {"anyOf": [ref("TokenizeTextRequest"), ref("TokenizeChatRequest")]},
    "Tokens": closed(
        {"count": _COUNT, "max_model_len": _COUNT, "tokens": array(_COUNT), "token_strs": optional(array(_STRING))}
    ),
    "Text": closed({"prompt": _STRING}),
    "Rendered": closed(
        {
            "request_id": _STRING,
            "token_ids": array(_COUNT),
            "features": _NULL,
            "sampling_params": {"type": "object", "description": "Under vLLM's names, as they would hold."},
            "model": _STRING,
            "stream": {"type": "boolean"},
            "stream_options": {"type": ["object", "null"]},
            "cache_salt": optional(_STRING),
            "priority": {"type": "integer"},
            "kv_transfer_params": _NULL,
        }
    ),
}


_CHUNKS: Final = "The whole answer, or with `stream` one event per chunk and then `data: [DONE]`."
_EVENTS: Final = "The whole response, or with `stream` its events, the last of which holds it."


def _answer(schema: str, description: str = _CHUNKS) -> JsonObject:
    return {
        "200": {
            "description": description,
            "content": {"application/json": {"schema": ref(schema)}, "text/event-stream": {}},
        }
    }


def _models(schema: str) -> JsonObject:
    return {"200": {"description": "The models.", "content": {"application/json": {"schema": ref(schema)}}}}


_REFUSED: Final = refusals("OpenAIError", 400, 404, 413, 415, 429, 503)

_STORED: Final = conversation_openapi.OPERATIONS | stored_openapi.OPERATIONS
OPERATIONS: Final[dict[tuple[str, str], JsonObject]] = {
    ("GET", "/v1/models"): operation("The models served here", _models("ModelList")),
    ("GET", "/v1/models/{model}"): operation("One model", _models("Model") | refusals("OpenAIError", 400, 404, 503)),
    ("POST", "/v1/chat/completions"): operation(
        "Answer a conversation", _answer("ChatCompletion") | _REFUSED, body=body("ChatCompletionRequest")
    ),
    ("POST", "/v1/completions"): operation(
        "Continue a text", _answer("Completion") | _REFUSED, body=body("CompletionRequest")
    ),
    ("POST", "/v1/responses"): operation(
        "Answer a conversation, with items", _answer("Response", _EVENTS) | _REFUSED, body=body("ResponsesBody")
    ),
    ("POST", "/v1/responses/input_tokens"): operation(
        "The number of tokens of a prompt",
        {"200": json_response("InputTokens")} | _REFUSED,
        body=body("InputTokensBody"),
    ),
    ("POST", "/v1/responses/compact"): operation("Not supported", refusals("OpenAIError", 404)),
    ("POST", "/v1/chat/completions/render"): operation(
        "What an engine would get for a conversation",
        {"200": json_response("Rendered")} | _REFUSED,
        body=body("ChatCompletionRequest"),
    ),
    ("POST", "/v1/completions/render"): operation(
        "What an engine would get for each prompt",
        {"200": {"description": "By prompt.", "content": {"application/json": {"schema": array(ref("Rendered"))}}}}
        | _REFUSED,
        body=body("CompletionRequest"),
    ),
    ("POST", "/tokenize"): operation(
        "The tokens of a text or of a conversation",
        {"200": json_response("Tokens")} | _REFUSED,
        body=body("TokenizeRequest"),
    ),
    ("POST", "/detokenize"): operation(
        "The text of tokens", {"200": json_response("Text")} | _REFUSED, body=body("DetokenizeRequest")
    ),
    ("POST", "/v1/load_lora_adapter"): operation(
        "Serve a LoRA adapter from now on",
        {"200": plain_response("It is served.", TEXT)} | _REFUSED,
        body=body("LoadLoraAdapterRequest"),
    ),
    ("POST", "/v1/unload_lora_adapter"): operation(
        "Serve a LoRA adapter no longer",
        {"200": plain_response("It takes no further request.", TEXT)} | _REFUSED,
        body=body("UnloadLoraAdapterRequest"),
    ),
} | _STORED
