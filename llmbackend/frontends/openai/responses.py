"""Writes one whole response, and gives every response its identity.

For: the endpoints, non-streaming mode. Does not know: HTTP, the host. Invariant: the body equals the chunks of
`chunks.py` put together, since both render the same deltas with the same functions.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

import orjson

from .fields import JsonObject
from .generation import Generation
from .logprobs import CompletionLogprobs, chat_logprobs
from .requests import GenerationRequest
from .tensors import Delta, TokenEntries
from .usage import Usage

DEFAULT_FINISH_REASON = "stop"
"""For a model that ends without a reason (its tensor interface makes `finish_reason` optional)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a response and all chunks of a stream have in common. created_s: Unix time. fingerprint: changes with the
    server's release and the model's configuration; "" when the host does not say."""

    id: str
    created_s: int
    model: str
    fingerprint: str

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
