"""Whole responses, and what streams have in common with them: identity, usage, logprobs.

For: the router, and streams.py, which writes the same responses in pieces. Does not know: HTTP, the host. Invariant:
the body equals the chunks of the stream put together, since both render the same deltas with the same functions.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import orjson

from .errors import JsonObject
from .generation import Generation
from .requests import GenerationRequest
from .tensors import Delta, TokenEntries

DEFAULT_FINISH_REASON = "stop"
"""For a model that ends without a reason (its tensor interface makes `finish_reason` optional)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a response and all chunks of a stream have in common."""

    id: str
    created_s: int
    """Unix time."""
    model: str
    fingerprint: str
    """Changes with the server's release and the model's configuration; "" when the host has none."""

    @classmethod
    def of(cls, request: GenerationRequest, fingerprint: str) -> Identity:
        prefix = "chatcmpl" if request.is_chat else "cmpl"
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), request.model, fingerprint)

    def fields(self, kind: str) -> JsonObject:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint or None,
        }


@dataclass(slots=True)
class _Choice:
    parts: list[str] = field(default_factory=list)
    positions: list[TokenEntries] = field(default_factory=list)
    finish_reason: str = DEFAULT_FINISH_REASON

    def add(self, delta: Delta) -> None:
        self.parts.append(delta.text)
        self.positions.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason or self.finish_reason


async def whole_response(generation: Generation, request: GenerationRequest, identity: Identity) -> bytes:
    """The response's body, once every choice has ended. Raises TritonError when one failed."""
    choices = [_Choice(parts=[echo]) for echo in request.echo]
    usage = Usage()
    while not generation.is_over:
        index, delta = await generation.next()
        choices[index].add(delta)
        usage.add(index, delta)
    render = _chat_choice if request.is_chat else _completion_choice
    kind = "chat.completion" if request.is_chat else "text_completion"
    body = identity.fields(kind)
    body["choices"] = [render(index, choice, request.top_logprobs) for index, choice in enumerate(choices)]
    body["usage"] = usage.total()
    return orjson.dumps(body)


def _chat_choice(index: int, choice: _Choice, top: int | None) -> JsonObject:
    return {
        "index": index,
        "message": {"role": "assistant", "content": "".join(choice.parts), "refusal": None},
        "logprobs": None if top is None else chat_logprobs(choice.positions, top),
        "finish_reason": choice.finish_reason,
    }


def _completion_choice(index: int, choice: _Choice, top: int | None) -> JsonObject:
    return {
        "index": index,
        "text": "".join(choice.parts),
        "logprobs": None if top is None else CompletionLogprobs(top).render(choice.positions),
        "finish_reason": choice.finish_reason,
    }


class Usage:
    """The running counts of one response."""

    def __init__(self) -> None:
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        self._completion_tokens = 0

    def add(self, index: int, delta: Delta) -> None:
        if delta.num_input_tokens:
            self._prompt_tokens[index] = delta.num_input_tokens
        if delta.num_cached_tokens is not None:
            self._cached_tokens[index] = delta.num_cached_tokens
        self._completion_tokens += delta.num_output_tokens

    def total(self) -> JsonObject | None:
        """Of a response that is complete; None when the model has reported nothing."""
        return self.as_json() if self._prompt_tokens or self._completion_tokens else None

    def as_json(self) -> JsonObject:
        prompt = sum(self._prompt_tokens.values())
        usage: JsonObject = {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
        }
        if self._cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(self._cached_tokens.values())}
        return usage


_IMPOSSIBLE = -9999.0


def chat_logprobs(positions: list[TokenEntries], top: int) -> JsonObject:
    """`choices[].logprobs` of chat: the chosen token at each position and the `top` most likely ones, best first."""
    return {"content": [_chat_position(entries, top) for entries in positions], "refusal": None}


def _chat_position(entries: TokenEntries, top: int) -> JsonObject:
    chosen = _chat_token(next(iter(entries.values())))
    chosen["top_logprobs"] = [_chat_token(entry) for entry in _most_likely(entries, top)]
    return chosen


def _chat_token(entry: dict[str, Any]) -> JsonObject:
    token: str = entry["decoded_token"] or ""
    return {"token": token, "logprob": _logprob(entry), "bytes": list(token.encode())}


def _logprob(entry: dict[str, Any]) -> float:
    """JSON has no minus infinity: the interface sends null, OpenAI this number."""
    value: float | None = entry["logprob"]
    return _IMPOSSIBLE if value is None else value


def _most_likely(entries: TokenEntries, top: int) -> list[dict[str, Any]]:
    """The chosen token comes along even when it is not among the `top`: its rank tells."""
    ranked = sorted(entries.values(), key=lambda entry: int(entry["rank"]))
    return [entry for entry in ranked if entry["rank"] <= top][:top]


class CompletionLogprobs:
    """`choices[].logprobs` of completions for one choice; remembers where in the text the next token starts."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset_chars = 0

    def render(self, positions: list[TokenEntries]) -> JsonObject:
        """The form of the tokens that follow those of the last call."""
        result: JsonObject = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entries in positions:
            chosen = next(iter(entries.values()))
            token = chosen["decoded_token"] or ""
            result["tokens"].append(token)
            result["token_logprobs"].append(_logprob(chosen))
            best = [*_most_likely(entries, self._top), chosen]
            result["top_logprobs"].append({entry["decoded_token"] or "": _logprob(entry) for entry in best})
            result["text_offset"].append(self._offset_chars)
            self._offset_chars += len(token)
        return result
