"""The endpoints under /v1 in OpenAPI's words.

For: `openapi.py`. Data, no code. Does not know: handlers. Invariant: the fields here are the fields that the parsers
of `openai/` take, with their types and ranges (tests compare the names, `make fuzz` the values).
Source: OpenAI's API reference, and vLLM's SamplingParams for the extras.
"""

from __future__ import annotations

from typing import Any, Final

from .openai.fields import INT32_MAX
from .openai.requests import CHAT_NEUTRAL, COMPLETION_NEUTRAL, MAX_PROMPTS
from .openai.sampling import LABELS, NEUTRAL
from .openapi_parts import array, body, closed, open_object, operation, optional, ref, refusals

_STRING: Final = {"type": "string"}
_JSON_TEXT: Final = {"type": "string", "contentMediaType": "application/json"}
_TEXT: Final = {"type": "string", "minLength": 1}
_BOOLEAN: Final = {"type": "boolean"}
_OBJECT: Final = {"type": "object"}
_TOKEN_ID: Final = {"type": "integer", "minimum": 0, "maximum": INT32_MAX}
_COUNT: Final = {"type": "integer", "minimum": 0}
_NULL: Final = {"type": "null"}


def _integer(low: int, high: int = INT32_MAX) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(low: float, high: float) -> dict[str, Any]:
    return {"type": "number", "minimum": low, "maximum": high}


def _above_zero(high: float) -> dict[str, Any]:
    return {"type": "number", "exclusiveMinimum": 0, "maximum": high}


def _fields(*groups: dict[str, Any]) -> dict[str, Any]:
    """Fields that may be left out or null."""
    return {name: optional(schema) for group in groups for name, schema in group.items()}


def _neutral(accepted: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Fields that this server knows and does not act on: only the values that ask for what it does anyway."""
    return {name: {"enum": list(values)} for name, values in accepted.items()}


_SAMPLING: Final[dict[str, Any]] = {
    "temperature": _number(0, 2),
    "top_p": _above_zero(1),
    "top_k": {**_integer(-1), "description": "0 or -1: off."},
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _above_zero(100),
    "logit_bias": {
        "type": "object",
        "description": "Token id, below the model's vocabulary size, to bias.",
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": _number(-100, 100),
    },
    "seed": _integer(-(2**63), 2**63 - 1),
    "stop": {"anyOf": [_TEXT, array(_TEXT)]},
    "stop_token_ids": array(_TOKEN_ID),
    "min_tokens": {**_integer(0), "description": "At most max_tokens."},
    "max_tokens": {**_integer(1), "description": "At most what the model's context has room for behind the prompt."},
    "ignore_eos": _BOOLEAN,
    "include_stop_str_in_output": _BOOLEAN,
    "skip_special_tokens": _BOOLEAN,
    "cache_salt": {**_TEXT, "description": "Only requests with the same one share cached prefixes."},
    "stream": _BOOLEAN,
    "stream_options": ref("StreamOptions"),
    "parallel_tool_calls": _BOOLEAN,
    "metadata": _OBJECT,
    **dict.fromkeys(LABELS, _STRING),
    **_neutral(NEUTRAL),
}
_STREAM_OPTIONS_NEED_STREAM: Final = {
    "stream_options": {
        "anyOf": [
            {"properties": {"stream_options": _NULL}},
            {"properties": {"stream": {"const": True}}, "required": ["stream"]},
        ]
    }
}
_TOP_LOGPROBS_NEED_LOGPROBS: Final = {
    "top_logprobs": {
        "anyOf": [
            {"properties": {"top_logprobs": _NULL}},
            {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]},
        ]
    }
}
_ECHO_NEEDS_TEXT: Final = {
    "echo": {
        "anyOf": [
            {"properties": {"echo": {"enum": [False, None]}}},
            {"properties": {"logprobs": _NULL, "prompt": {"anyOf": [_STRING, array(_STRING)]}}},
        ]
    }
}
_CONTENT: Final = {"anyOf": [_STRING, array(ref("TextPart"))]}


def _message(roles: list[str], properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """A message of these roles. Members of other names may be there if they are null: clients dump whole objects."""
    shared = {"role": {"enum": roles}, "name": optional(_STRING), "function_call": _NULL}
    return open_object(shared | properties, ["role", *required]) | {"additionalProperties": _NULL}


def _says(field: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {field: schema}, "required": [field]}


_ASSISTANT: Final = _message(
    ["assistant"],
    {
        "content": optional(_CONTENT),
        "refusal": optional(_STRING),
        "reasoning_content": optional(_STRING),
        "reasoning": optional(_STRING),
        "tool_calls": optional(array(ref("ToolCall"))),
        "audio": _NULL,
        "annotations": optional(array({}, maxItems=0)),
    },
    [],
) | {
    "anyOf": [
        _says("content", _CONTENT),
        _says("refusal", _TEXT),
        _says("reasoning_content", _TEXT),
        _says("tool_calls", array({}, minItems=1)),
    ]
}
_USAGE: Final = closed(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": closed({"cached_tokens": _COUNT}),
    },
    required=["prompt_tokens", "completion_tokens", "total_tokens"],
)
_FINISH_REASON: Final = {"enum": ["stop", "length"]}
_LOGPROBS: Final = {"type": ["object", "null"]}


def _completion(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    shared = {"index": _COUNT, "logprobs": _LOGPROBS, "finish_reason": _FINISH_REASON}
    return closed(
        {
            "id": _STRING,
            "object": {"const": kind},
            "created": _COUNT,
            "model": _STRING,
            "system_fingerprint": optional(_STRING),
            "choices": array(closed(shared | choice)),
            "usage": {"anyOf": [_USAGE, {"type": "null", "description": "The model counts no tokens."}]},
        }
    )


SCHEMAS: Final[dict[str, Any]] = {
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
    "StreamOptions": closed(
        _fields(
            {"include_usage": _BOOLEAN, "continuous_usage_stats": _BOOLEAN, "include_obfuscation": {"enum": [False]}}
        ),
        required=[],
    ),
    "TextPart": {
        "oneOf": [
            closed({"type": {"const": "text"}, "text": _STRING}),
            closed({"type": {"const": "refusal"}, "refusal": _STRING}),
        ]
    },
    "ToolCall": open_object(
        {
            "id": _STRING,
            "type": {"enum": ["function", None]},
            "index": {},
            "function": open_object({"name": _STRING, "arguments": _JSON_TEXT}, ["name", "arguments"])
            | {"additionalProperties": _NULL},
        },
        ["id", "function"],
    )
    | {"additionalProperties": _NULL},
    "Message": {
        "oneOf": [
            _message(["system", "developer", "user"], {"content": _CONTENT}, ["content"]),
            _ASSISTANT,
            _message(["tool"], {"content": _CONTENT, "tool_call_id": _STRING}, ["content", "tool_call_id"]),
        ]
    },
    "ChatCompletionRequest": closed(
        {"model": _STRING, "messages": array(ref("Message"), minItems=1)}
        | _fields(
            _SAMPLING,
            {
                "max_completion_tokens": {**_integer(1), "description": "As max_tokens."},
                "logprobs": _BOOLEAN,
                "top_logprobs": _integer(0, 20),
                "add_generation_prompt": _BOOLEAN,
                "chat_template_kwargs": {"type": "object", "propertyNames": {"not": {"enum": ["messages", "self"]}}},
            },
            _neutral(CHAT_NEUTRAL),
        ),
        required=["model", "messages"],
    )
    | {"dependentSchemas": _STREAM_OPTIONS_NEED_STREAM | _TOP_LOGPROBS_NEED_LOGPROBS},
    "CompletionRequest": closed(
        {
            "model": _STRING,
            "prompt": {
                "description": "Text, token ids, or a list of either; one choice for each.",
                "anyOf": [
                    _TEXT,
                    array(_TEXT, minItems=1, maxItems=MAX_PROMPTS),
                    array(_TOKEN_ID, minItems=1),
                    array(array(_TOKEN_ID, minItems=1), minItems=1, maxItems=MAX_PROMPTS),
                ],
            },
        }
        | _fields(
            _SAMPLING,
            {
                "logprobs": _integer(0, 5),
                "echo": _BOOLEAN,
            },
            _neutral(COMPLETION_NEUTRAL),
        ),
        required=["model", "prompt"],
    )
    | {"dependentSchemas": _STREAM_OPTIONS_NEED_STREAM | _ECHO_NEEDS_TEXT},
    "ChatCompletion": _completion(
        "chat.completion",
        {"message": closed({"role": {"const": "assistant"}, "content": _STRING, "refusal": _NULL})},
    ),
    "Completion": _completion("text_completion", {"text": _STRING}),
}


def _answer(schema: str) -> dict[str, Any]:
    return {
        "200": {
            "description": "The whole answer, or with `stream` one event per chunk and then `data: [DONE]`.",
            "content": {"application/json": {"schema": ref(schema)}, "text/event-stream": {}},
        }
    }


def _models(schema: str) -> dict[str, Any]:
    return {"200": {"description": "The models.", "content": {"application/json": {"schema": ref(schema)}}}}


_REFUSED: Final = refusals("OpenAIError", 400, 404, 413, 415, 429, 503)

OPERATIONS: Final[dict[tuple[str, str], dict[str, Any]]] = {
    ("GET", "/v1/models"): operation("The models served here", _models("ModelList")),
    ("GET", "/v1/models/{model}"): operation("One model", _models("Model") | refusals("OpenAIError", 400, 404, 503)),
    ("POST", "/v1/chat/completions"): operation(
        "Answer a conversation", _answer("ChatCompletion") | _REFUSED, body=body("ChatCompletionRequest")
    ),
    ("POST", "/v1/completions"): operation(
        "Continue a text", _answer("Completion") | _REFUSED, body=body("CompletionRequest")
    ),
}
