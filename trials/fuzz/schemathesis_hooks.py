"""What schemathesis needs to know about this server: existing names, and the 5xx statuses that it may return.

Used by `schemathesis run`, which imports this module by its path (see openapi_target.py). Independent of what is
generated. Invariant: a hook only makes it possible to serve a valid body (the model's name, token ids in its
vocabulary, token limits, no contradictions between fields); invalid bodies are sent unchanged.
"""

from __future__ import annotations

from typing import Any

import schemathesis
from schemathesis.checks import CheckContext

from trials.fuzz.contradictions import take_out, take_out_of_query
from trials.fuzz.exchange import HttpAnswer, HttpInput, complaint
from trials.fuzz.http_inputs import DECOUPLED

_TOKEN_IDS = 256
_ROOM_TOKENS = 16
"""What the context of the model has room for behind any prompt that is likely to be made."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """In every phase: `map_body` is not asked by the one that tries boundaries."""
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return  # a change may make an invalid body valid, which would then have to be accepted
    if isinstance(case.body, dict) and case.path.startswith("/v1/") and case.body.get("model") is None:
        case.body["model"] = DECOUPLED  # it may be left out where there is one model; here are three
    case.body = _servable(case.body)
    if isinstance(case.body, dict) and not case.path.startswith("/v2/"):  # there a member may be any tensor
        take_out(case.body)
    if isinstance(case.query, dict):
        take_out_of_query(case.query)


def _servable(body: Any) -> Any:
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        return body
    body = _integers(body) | {"model": DECOUPLED}
    limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if type(body.get(name)) is int]
    if type(body.get("min_tokens")) is int and body["min_tokens"] > 0:
        body["min_tokens"] = 0 if 0 in limits else 1
    if type(body.get("n")) is int and body["n"] > 2:
        body["n"] = 2
    if type(body.get("best_of")) is int and body["best_of"] > 0:
        body["best_of"] = body.get("n")
    if type(body.get("prompt_logprobs")) is int and not 0 <= body["prompt_logprobs"] <= 20:
        body["prompt_logprobs"] = 20
    for name in ("max_tokens", "max_completion_tokens"):
        if type(body.get(name)) is int and body[name] > _ROOM_TOKENS:
            body[name] = _ROOM_TOKENS
    if isinstance(body.get("logit_bias"), dict):
        body["logit_bias"] = {_small(key): bias for key, bias in body["logit_bias"].items()}
    for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
        if isinstance(body.get(name), list):
            body[name] = [_small(token) for token in body[name]]
    if isinstance(body.get("prompt"), list):
        body["prompt"] = [[_small(t) for t in p] if isinstance(p, list) else _small(p) for p in body["prompt"]]
    for message in _items(body.get("messages")):
        for call in _items(message.get("tool_calls") if isinstance(message, dict) else None):
            _write_json_arguments(call)
    return body


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _write_json_arguments(call: Any) -> None:
    """A text that is JSON is beyond JSON Schema."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        function["arguments"] = "{}"


def _integers(value: Any) -> Any:
    """1.0 is an integer to JSON Schema, and not to this server."""
    if isinstance(value, dict):
        return {key: _integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _small(token: Any) -> Any:
    """A token id as one of the vocabulary; anything else as it is."""
    if isinstance(token, str) and token.isascii() and token.isdigit():
        return str(int(token[-9:]) % _TOKEN_IDS)
    return token % _TOKEN_IDS if type(token) is int and 0 <= token < 2**31 else token


@schemathesis.check
def allowed_answer(ctx: CheckContext, response: Any, case: Any) -> bool | None:
    """The project's own rule for errors, which knows 501, 503 and Triton's INTERNAL."""
    headers = {name.lower(): values[0] for name, values in response.headers.items()}
    request = HttpInput(case.formatted_path, b"", method=case.method)
    found = complaint(request, HttpAnswer(response.status_code, headers, response.content))
    assert not found, found
    return None
