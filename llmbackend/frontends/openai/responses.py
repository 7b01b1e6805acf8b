"""Whole responses, and what streams have in common with them: identity and usage.

For: the router, and streams.py, which writes the same responses in pieces. Does not know: HTTP, the host. Invariant:
the body equals the chunks of the stream put together, since both render the same deltas with the same functions.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

import orjson

from .errors import JsonObject
from .generation import Generation
from .logprobs import logprobs_renderer
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
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = DEFAULT_FINISH_REASON

    def add(self, delta: Delta) -> None:
        self.parts.append(delta.text)
        self.positions.extend(delta.logprobs)
        self.token_ids.extend(delta.token_ids)
        self.finish_reason = delta.finish_reason or self.finish_reason


async def whole_response(generation: Generation, request: GenerationRequest, identity: Identity) -> bytes:
    """The response's body, once every choice has ended. Raises TritonError when one failed."""
    choices = [_Choice(parts=[echo]) for echo in request.echo for _ in range(request.n)]
    usage = Usage(request.n)
    while not generation.is_over:
        index, delta = await generation.next()
        choices[index].add(delta)
        usage.add(index, delta)
    kind = "chat.completion" if request.is_chat else "text_completion"
    body = identity.fields(kind)
    body["choices"] = [_rendered(index, choice, request) for index, choice in enumerate(choices)]
    body["usage"] = usage.total()
    return orjson.dumps(body)


def _rendered(index: int, choice: _Choice, request: GenerationRequest) -> JsonObject:
    text = "".join(choice.parts)
    form = request.logprobs
    rendered: JsonObject = {
        "index": index,
        **(_message(text) if request.is_chat else {"text": text}),
        "logprobs": None if form is None else logprobs_renderer(form, is_chat=request.is_chat)(choice.positions),
        "finish_reason": choice.finish_reason,
    }
    if request.return_token_ids:
        rendered["token_ids"] = choice.token_ids
    return rendered


def _message(text: str) -> JsonObject:
    return {"message": {"role": "assistant", "content": text, "refusal": None}}


class Usage:
    """The running counts of one response: tokens of each prompt once, and of each choice."""

    def __init__(self, n: int) -> None:
        """n: choices of each prompt"""
        self._n = n
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        self._completion_tokens = 0

    def add(self, index: int, delta: Delta) -> None:
        prompt = index // self._n
        if delta.num_input_tokens:
            self._prompt_tokens[prompt] = delta.num_input_tokens
        if delta.num_cached_tokens is not None and not index % self._n:
            self._cached_tokens[prompt] = delta.num_cached_tokens
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
