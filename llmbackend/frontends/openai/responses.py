"""Whole responses, and what streams have in common with them: identity and usage.

For: the router, and streams.py, which writes the same responses in pieces. Does not know: HTTP, the host. Invariant:
the body equals the chunks of the stream put together, since both render the same deltas with the same functions.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import msgspec
import orjson

from llmbackend.frontends.journals.journal import Recording

from .answer_plan import AnswerPlan
from .answers import Answer
from .errors import JsonObject
from .generation import Generation
from .logprobs import logprobs_renderer
from .requests import GenerationRequest
from .tensors import Delta, PromptDetails, TokenEntries

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
    def of(cls, request: GenerationRequest, fingerprint: str, request_id: str = "") -> Identity:
        """Drawn here, once, and the same from then on, whatever happens to engines. request_id: the client's own."""
        id = request.id_prefix + (request_id or uuid.uuid4().hex)
        return cls(id, int(time.time()), request.model, fingerprint)

    def recorded(self, recording: Recording) -> Identity:
        """The one that a stream which is made again had; else itself, put on record."""
        if recording.identity:
            return msgspec.msgpack.decode(recording.identity, type=Identity)
        recording.identity = msgspec.msgpack.encode(self)
        return self

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
    stop_reason: int | str | None = None
    answer: Answer | None = None
    """Reads a chat's answer that is more than text."""

    def add(self, delta: Delta) -> None:
        if self.answer is None:
            self.parts.append(delta.text)
        else:
            self.answer.add(delta)
        self.positions.extend(delta.logprobs)
        self.token_ids.extend(delta.token_ids)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason if delta.stop_reason is not None else self.stop_reason

    @property
    def reason(self) -> str:
        """Why it ended, as the client gets it."""
        return self.finish_reason if self.answer is None else self.answer.reader.finish_reason(self.finish_reason)


async def whole_response(
    generation: Generation, request: GenerationRequest, identity: Identity, plan: AnswerPlan | None = None
) -> bytes:
    """The response's body, once every choice has ended. plan: how a chat's answer is read. Raises TritonError when one
    failed."""
    choices = [_Choice(parts=[echo]) for echo in request.echo for _ in range(request.n)]
    if plan is not None:
        for index, choice in enumerate(choices):
            choice.answer = Answer(plan, identity.id, index)
    usage = Usage(request.n)
    prompts: dict[int, PromptDetails] = {}
    while not generation.is_over:
        index, delta = await generation.next()
        if delta.prompt is not None:
            prompts[index // request.n] = delta.prompt
            _echo(request, delta.prompt, choices[index // request.n * request.n :][: request.n])
        choices[index].add(delta)
        usage.add(index, delta)
    for index, choice in enumerate(choices):
        if choice.answer is not None and choice.answer.reports_reasoning:
            usage.set_reasoning(index, choice.answer.reader.num_reasoning_tokens)
    render = partial(_body, request, identity, choices, usage, prompts)
    return await generation.in_thread(render) if prompts else render()


def _body(
    request: GenerationRequest,
    identity: Identity,
    choices: list[_Choice],
    usage: Usage,
    prompts: dict[int, PromptDetails],
) -> bytes:
    kind = "chat.completion" if request.is_chat else "text_completion"
    body = identity.fields(kind)
    body["choices"] = rendered = [_rendered(index, choice, request) for index, choice in enumerate(choices)]
    for number, prompt in prompts.items():
        of_prompt = request.prompt_form.fields(prompt)
        for target in [body] if request.is_chat else rendered[number * request.n : (number + 1) * request.n]:
            target |= of_prompt
    body["usage"] = usage.total()
    return orjson.dumps(body)


def _rendered(index: int, choice: _Choice, request: GenerationRequest) -> JsonObject:
    form = request.logprobs
    rendered: JsonObject = {
        "index": index,
        **(_message(choice) if request.is_chat else {"text": "".join(choice.parts)}),
        "logprobs": None if form is None else logprobs_renderer(form, is_chat=request.is_chat)(choice.positions),
        "finish_reason": choice.reason,
        "stop_reason": choice.stop_reason,
    }
    if request.return_token_ids:
        rendered["token_ids"] = choice.token_ids
    return rendered


def _message(choice: _Choice) -> JsonObject:
    text = "".join(choice.parts)
    if choice.answer is None:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}
    message = choice.answer.message()
    return {"message": message | {"content": text + (message["content"] or "")} if text else message}


def _echo(request: GenerationRequest, prompt: PromptDetails, choices: Iterable[_Choice]) -> None:
    """Puts what the model tells of a prompt before its choices."""
    for choice in choices:
        choice.positions[:0] = request.prompt_form.positions(prompt)
        if request.prompt_form.has_text:
            choice.parts.insert(0, prompt.text)


class Usage:
    """The running counts of one response: tokens of each prompt once, and of each choice."""

    def __init__(self, n: int) -> None:
        """n: choices of each prompt"""
        self._n = n
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        self._reasoning_tokens: dict[int, int] = {}
        self._completion_tokens = 0
        self._told_tokens: dict[int, int] = {}
        """Of the choices whose counts are told from time to time: those of the last time."""

    def add(self, index: int, delta: Delta) -> None:
        if delta.usage is not None:
            self._prompt_tokens[index // self._n], num_output_tokens, num_cached_tokens = delta.usage
            self._completion_tokens += num_output_tokens - self._told_tokens.get(index, 0)
            self._told_tokens[index] = num_output_tokens
            if not index % self._n:
                self._cached_tokens[index // self._n] = num_cached_tokens
            return
        if delta.num_input_tokens:
            self._prompt_tokens[index // self._n] = delta.num_input_tokens
        if delta.num_cached_tokens is not None and not index % self._n:
            self._cached_tokens[index // self._n] = delta.num_cached_tokens
        self._completion_tokens += delta.num_output_tokens

    def set_reasoning(self, index: int, num_tokens: int) -> None:
        """How many tokens of a choice are reasoning so far."""
        self._reasoning_tokens[index] = num_tokens

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
        if self._reasoning_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(self._reasoning_tokens.values())}
        return usage
