"""Whole answers of chats and completions; logprobs, including those of streams.

Invariants: an answer equals the joined chunks of its stream; the joined results of several calls of a logprobs renderer
equal the result of one call with all positions.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from ..generation.answer import DEFAULT_FINISH_REASON, Answer, Identity, Usage, request_metrics
from ..generation.inferences import Generation
from ..generation.plan import AnswerPlan
from ..generation.request import FIRST_RANK, GenerationRequest, LogprobForm
from ..generation.tensors import Delta, PromptDetails, TokenEntries
from ..http.errors import JsonObject


@dataclass(slots=True)
class _Choice:
    parts: list[str] = field(default_factory=list)
    positions: list[TokenEntries] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = DEFAULT_FINISH_REASON
    stop_reason: int | str | None = None
    answer: Answer | None = None
    """Set for chats."""

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
        return self.finish_reason if self.answer is None else self.answer.reader.finish_reason(self.finish_reason)


class WholeAnswer:
    """An answer that is collected from its deltas."""

    def __init__(self, request: GenerationRequest, identity: Identity, plan: AnswerPlan) -> None:
        self._request = request
        self._identity = identity
        self._choices = [_Choice(parts=[echo]) for echo in request.echo for _ in range(request.n)]
        if request.is_chat:
            for index, choice in enumerate(self._choices):
                choice.answer = Answer(plan, identity.call_seed, index)
        self._usage = Usage(request.n)
        self._prompts: dict[int, PromptDetails] = {}
        self._metrics: JsonObject | None = None

    def add(self, index: int, delta: Delta) -> None:
        request, choices = self._request, self._choices
        if delta.prompt is not None:
            self._prompts[index // request.n] = delta.prompt
            _echo(request, delta.prompt, choices[index // request.n * request.n :][: request.n])
        choices[index].add(delta)
        self._usage.add(index, delta)
        if delta.times_ns is not None:
            self._metrics = request_metrics(delta, self._usage.num_output_tokens)

    async def body(self, generation: Generation) -> bytes:
        """To be called once every choice has ended."""
        for index, choice in enumerate(self._choices):
            if choice.answer is not None and choice.answer.reader.reports_reasoning:
                self._usage.set_reasoning(index, choice.answer.reader.num_reasoning_tokens)
        if self._prompts:
            return await generation.in_thread(self._json)
        num_tokens = sum(len(entries) for choice in self._choices for entries in choice.positions)
        return await generation.in_thread_if_long(num_tokens + len(self._choices), self._json)

    def _json(self) -> bytes:
        request = self._request
        body = self._identity.fields("chat.completion" if request.is_chat else "text_completion")
        body["choices"] = rendered = [_rendered(index, choice, request) for index, choice in enumerate(self._choices)]
        for target in [body] if request.is_chat else rendered:
            target |= _NOTHING_OF_PROMPT
        for number, prompt in self._prompts.items():
            of_prompt = request.prompt_form.fields(prompt)
            for target in [body] if request.is_chat else rendered[number * request.n : (number + 1) * request.n]:
                target |= of_prompt
        body["usage"] = self._usage.total()
        if self._metrics is not None:
            body["metrics"] = self._metrics
        self._choices, self._prompts = [], {}  # freeing many logprobs takes as long as reading them
        return orjson.dumps(body)


async def whole_response(generation: Generation, answer: WholeAnswer) -> bytes:
    """The answer's body. Raises OpenAIError if a choice failed."""
    while not generation.is_over:
        index, delta = await generation.next()
        await generation.in_thread_if_long(delta.num_listed_tokens, partial(answer.add, index, delta))
        if index % _CHOICES_AT_ONCE == _CHOICES_AT_ONCE - 1:
            await asyncio.sleep(0)
    return await answer.body(generation)


_CHOICES_AT_ONCE = 16
"""How many choices are added without letting other requests continue."""
_NOTHING_OF_PROMPT: JsonObject = {"prompt_token_ids": None, "prompt_logprobs": None}
"""vLLM's fields if nothing was requested."""


def _rendered(index: int, choice: _Choice, request: GenerationRequest) -> JsonObject:
    form = request.logprobs
    rendered: JsonObject = {
        "index": index,
        **({"text": "".join(choice.parts)} if choice.answer is None else {"message": _message(choice, choice.answer)}),
        "logprobs": None if form is None else logprobs_renderer(form, is_chat=request.is_chat)(choice.positions),
        "finish_reason": choice.reason,
        "stop_reason": choice.stop_reason,
    }
    if request.return_token_ids:
        rendered["token_ids"] = choice.token_ids
    return rendered


def _message(choice: _Choice, answer: Answer) -> JsonObject:
    """The message, preceded by the echoed text."""
    message, echo = answer.message(), "".join(choice.parts)
    return message | {"content": echo + (message["content"] or "")} if echo else message


def _echo(request: GenerationRequest, prompt: PromptDetails, choices: Iterable[_Choice]) -> None:
    """Adds the text and the positions of the prompt. To be called before its choices are added."""
    for choice in choices:
        choice.positions[:0] = request.prompt_form.positions(prompt)
        if request.prompt_form.has_text:
            choice.parts.insert(0, prompt.text)


_IMPOSSIBLE = -9999.0
Render = Callable[[list[TokenEntries]], JsonObject]
"""Renders the positions that follow those of the last call, as `choices[].logprobs`."""


def logprobs_renderer(form: LogprobForm, *, is_chat: bool) -> Render:
    """The renderer of one choice."""
    return ChatLogprobs(form).render if is_chat else CompletionLogprobs(form).render


class ChatLogprobs:
    """Logprobs in chats: the chosen token at each position, and the most likely tokens, best first."""

    def __init__(self, form: LogprobForm) -> None:
        self._form = form

    def render(self, positions: list[TokenEntries]) -> JsonObject:
        return {"content": [self._position(entries) for entries in positions], "refusal": None}

    def _position(self, entries: TokenEntries) -> JsonObject:
        chosen = self._token(*next(iter(entries.items())))
        chosen["top_logprobs"] = [self._token(*item) for item in self._form.others(entries)]
        return chosen

    def _token(self, token_id: str, entry: dict[str, Any]) -> JsonObject:
        return {"token": self._form.token(token_id, entry), "logprob": _logprob(entry), "bytes": list(_bytes(entry))}


class CompletionLogprobs:
    """Logprobs in completions: four lists. A token within a character has the offset of that character."""

    def __init__(self, form: LogprobForm) -> None:
        self._form = form
        self._offset_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def render(self, positions: list[TokenEntries]) -> JsonObject:
        result: JsonObject = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entries in positions:
            chosen = next(iter(entries.items()))
            is_first = chosen[1]["rank"] == FIRST_RANK
            best = [*self._form.others(entries), chosen]
            result["tokens"].append(self._form.token(*chosen))
            result["token_logprobs"].append(None if is_first else _logprob(chosen[1]))
            named = {self._form.token(*item): _logprob(item[1]) for item in best}
            result["top_logprobs"].append(None if is_first else named)
            result["text_offset"].append(self._offset_chars)
            self._offset_chars += len(self._decoder.decode(_bytes(chosen[1])))
        return result


def _bytes(entry: dict[str, Any]) -> bytes:
    """A token's own bytes if it is part of a character; otherwise those of its text."""
    return bytes(entry["bytes"]) if "bytes" in entry else (entry["decoded_token"] or "").encode()


def _logprob(entry: dict[str, Any]) -> float:
    """JSON has no minus infinity: the model interface sends null, OpenAI's API this number."""
    value: float | None = entry["logprob"]
    return _IMPOSSIBLE if value is None else value
