"""The chunks of streamed chats and completions.

Invariants: the last chunk of each choice has its finish reason; the usage is last; the joined deltas equal the whole
answer's message. Logprobs and token ids are in the first delta of their tokens, or in an empty one. Requested details
of the prompt precede its choices. The constant parts of chunks are encoded once; a token costs one orjson call.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import msgspec
import orjson

from ..generation.answer import DEFAULT_FINISH_REASON, AnswerReader, Identity, Usage, request_metrics
from ..generation.http_answers import Writer
from ..generation.parsers import ContentDelta
from ..generation.plan import AnswerPlan
from ..generation.request import GenerationRequest, StreamForm
from ..generation.tensors import Delta, PromptDetails
from ..http.errors import OpenAIError
from .bodies import WholeAnswer, logprobs_renderer

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


@dataclass(frozen=True, slots=True)
class _Shape:
    """The location of the text in a choice: `delta` in chats, `text` in completions."""

    kind: str
    text_open: bytes
    text_close: bytes
    without_text: bytes


_CHAT = _Shape("chat.completion.chunk", b'"delta":{"content":', b"}", b'"delta":{}')
_COMPLETION = _Shape("text_completion", b'"text":', b"", b'"text":""')
_CHOICES = b',"choices":['
_ROLE = b'"delta":{"role":"assistant","content":""}'


class ChunkWriter:
    """The chunks of one stream, in order: `begin`, `delta` for each delta, `end`."""

    def __init__(self, request: GenerationRequest, identity: Identity, options: StreamForm) -> None:
        self._shape = _CHAT if request.is_chat else _COMPLETION
        self._opening = b"data: " + orjson.dumps(identity.fields(self._shape.kind))[:-1]
        self._head = self._opening + _CHOICES
        self._has_usage = bool(options.include_usage)
        self._has_continuous_usage = self._has_usage and bool(options.continuous_usage_stats)
        self._tail = b'],"usage":null}\n\n' if self._has_usage else b"]}\n\n"
        self._counts_tokens = self._has_usage or request.include_metrics
        self._metrics = b""
        """A field of the last message."""
        self._usage = Usage(request.n)
        self._prompt_form = request.prompt_form
        self._echo = [echo for echo in request.echo for _ in range(request.n)]
        self._finished = [False] * request.num_choices
        form, is_chat = request.logprobs, request.is_chat
        self._text_head = [self._head_of(index) + self._shape.text_open for index in range(request.num_choices)]
        self._text_tail = self._shape.text_close + b',"logprobs":null,"finish_reason":null}' + self._tail
        """What follows the text in a chunk without additional fields."""
        self._has_more = self._has_continuous_usage or request.logprobs is not None
        """Whether chunks have additional fields."""
        self._logprobs = [None if form is None else logprobs_renderer(form, is_chat=is_chat) for _ in self._finished]

    def begin(self) -> bytes:
        """For each choice, a chunk with the role (chats only) and a chunk with the text of `echo`."""
        roles = [self._chunk(index, _ROLE) for index in range(len(self._finished))] if self._shape is _CHAT else []
        return b"".join(roles) + b"".join(
            self._chunk(index, self._text(text)) for index, text in enumerate(self._echo) if text
        )

    def begin_choice(self, index: int, first: Delta) -> bytes:
        """Replaces `begin` for a choice whose first chunks have details of its prompt, or its number of tokens."""
        if first.num_input_tokens:
            self._usage.set_prompt(index, first.num_input_tokens)
        prompt = first.prompt or PromptDetails()
        fields = orjson.dumps(self._prompt_form.fields(prompt))[1:-1]
        more = b"," + fields if fields else b""
        if self._shape is _CHAT:
            role = self._chunk(index, _ROLE)
            start = role if index else self._opening + more + _CHOICES + role[len(self._head) :]
            return start + (self._chunk(index, self._text(self._echo[index])) if self._echo[index] else b"")
        positions = self._prompt_form.positions(prompt)
        render = self._logprobs[index]
        logprobs = b"null" if render is None or not positions else orjson.dumps(render(positions))
        text = self._echo[index] + prompt.text
        return self._chunk(index, self._text(text), logprobs, more=more) if text or more else b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """The text of a delta; b"" while it may be the start of a stop string."""
        if self._counts_tokens:
            self._count(index, delta)
        if (delta.finish_reason or delta.is_final) and not self._finished[index]:
            self._finished[index] = True
            text = self._text(delta.text) if delta.text else self._shape.without_text
            return self._last_chunk(index, text, delta.finish_reason or DEFAULT_FINISH_REASON, delta)
        if self._has_more or delta.token_ids:
            return self._chunk_with_more(index, delta)
        return self._text_chunk(index, delta.text) if delta.text else b""

    def _count(self, index: int, delta: Delta) -> None:
        self._usage.add(index, delta)
        if delta.times_ns is not None:
            self._metrics = b',"metrics":' + orjson.dumps(request_metrics(delta, self._usage.num_output_tokens))

    def _text_chunk(self, index: int, text: str) -> bytes:
        return b"%b%b%b" % (self._text_head[index], orjson.dumps(text), self._text_tail)

    def _chunk_with_more(self, index: int, delta: Delta) -> bytes:
        if not (delta.text or delta.logprobs or delta.token_ids):
            return b""
        logprobs, more = self._of_tokens(index, delta)
        return self._chunk(index, self._text(delta.text), logprobs, more=more)

    def _of_tokens(self, index: int, delta: Delta) -> tuple[bytes, bytes]:
        """The logprobs, and the field with token ids."""
        render = self._logprobs[index]
        logprobs = b"null" if render is None or not delta.logprobs else orjson.dumps(render(delta.logprobs))
        return logprobs, b',"token_ids":' + orjson.dumps(delta.token_ids) if delta.token_ids else b""

    def _head_of(self, index: int) -> bytes:
        return b'%b{"index":%d,' % (self._head, index)

    def end(self) -> bytes:
        if not self._has_usage:
            return DONE
        return b'%b],"usage":%b%b}\n\n%b' % (self._head, orjson.dumps(self._usage.total()), self._metrics, DONE)

    def ping(self) -> bytes:
        return PING

    def fail(self, error: OpenAIError) -> bytes:
        return error.event()

    def _last_chunk(self, index: int, text: bytes, finish_reason: str, delta: Delta) -> bytes:
        logprobs, more = self._of_tokens(index, delta)
        more += b',"stop_reason":' + orjson.dumps(delta.stop_reason)
        chunk = self._chunk(index, text, logprobs, orjson.dumps(finish_reason), more)
        if self._metrics and not self._has_usage:
            return chunk.removesuffix(b"}\n\n") + self._metrics + b"}\n\n"
        return chunk

    def _text(self, text: str) -> bytes:
        return self._shape.text_open + orjson.dumps(text) + self._shape.text_close

    def _chunk(
        self, index: int, text: bytes, logprobs: bytes = b"null", finish_reason: bytes = b"null", more: bytes = b""
    ) -> bytes:
        tail = self._tail
        if self._has_continuous_usage:
            tail = b'],"usage":' + orjson.dumps(self._usage.of_choice(index)) + b"}\n\n"
        return b'%b%b,"logprobs":%b,"finish_reason":%b%b}%b' % (
            self._head_of(index), text, logprobs, finish_reason, more, tail,
        )  # fmt: skip


class AnswerChunkWriter(ChunkWriter):
    """A chunk writer that also parses the answer."""

    def __init__(self, request: GenerationRequest, identity: Identity, options: StreamForm, plan: AnswerPlan) -> None:
        super().__init__(request, identity, options)
        self._readers = [AnswerReader(plan, identity.call_seed, index) for index in range(len(self._finished))]
        self._reports_reasoning = plan.reasoning_format is not None

    def delta(self, index: int, delta: Delta) -> bytes:
        reader = self._readers[index]
        events = reader.read(delta)
        if self._counts_tokens:
            self._count(index, delta)
            if self._reports_reasoning:
                self._usage.set_reasoning(index, reader.num_reasoning_tokens)
        is_last = (delta.finish_reason or delta.is_final) and not self._finished[index]
        is_plain = not (is_last or self._has_more or delta.token_ids)
        if is_plain and len(events) == 1 and isinstance(events[0], ContentDelta):
            return self._text_chunk(index, events[0].text)
        deltas = [orjson.dumps(found) for event in events if (found := reader.as_delta(event)) is not None]
        if not is_last:
            return self._chunks(index, delta, deltas)
        self._finished[index] = True
        reason = reader.finish_reason(delta.finish_reason or DEFAULT_FINISH_REASON)
        *others, last = deltas or [b"{}"]
        before = b"".join(self._chunk(index, b'"delta":' + one) for one in others)
        return before + self._last_chunk(index, b'"delta":' + last, reason, delta)

    def _chunks(self, index: int, delta: Delta, deltas: list[bytes]) -> bytes:
        if not delta.logprobs and not delta.token_ids:
            return b"".join(self._chunk(index, b'"delta":' + one) for one in deltas)
        first, *others = deltas or [b"{}"]
        logprobs, more = self._of_tokens(index, delta)
        chunks = [self._chunk(index, b'"delta":' + first, logprobs, more=more)]
        return b"".join(chunks + [self._chunk(index, b'"delta":' + one) for one in others])


def chunk_writer(request: GenerationRequest, identity: Identity, options: StreamForm, plan: AnswerPlan) -> ChunkWriter:
    if not plan.reads_tokens:
        return ChunkWriter(request, identity, options)
    return AnswerChunkWriter(request, identity, options, plan)


class _WrappingWriter:
    """Base class of a Writer that wraps another one."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def begin(self) -> bytes:
        return self._writer.begin()

    def begin_choice(self, index: int, first: Delta) -> bytes:
        return self._writer.begin_choice(index, first)

    def delta(self, index: int, delta: Delta) -> bytes:
        return self._writer.delta(index, delta)

    def end(self) -> bytes:
        return self._writer.end()

    def ping(self) -> bytes:
        return self._writer.ping()

    def fail(self, error: OpenAIError) -> bytes:
        return self._writer.fail(error)


class PromptFirst(_WrappingWriter):
    """Begins all choices of a prompt once its details, or its number of tokens, are known; delays deltas until then."""

    def __init__(self, writer: Writer, n: int, *, has_details: bool) -> None:
        """n: number of choices of each prompt. has_details: whether one of its deltas has the prompt's details"""
        super().__init__(writer)
        self._n = n
        self._has_details = has_details
        self._told: set[int] = set()
        self._held: defaultdict[int, list[tuple[int, Delta]]] = defaultdict(list)
        """By the index of the prompt."""

    def begin(self) -> bytes:
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        number = index // self._n
        if number in self._told:
            return self._writer.delta(index, delta)
        if self._has_details and delta.prompt is None:
            self._held[number].append((index, delta))
            return b""
        self._told.add(number)
        choices = range(number * self._n, (number + 1) * self._n)
        begun = b"".join(self._writer.begin_choice(choice, delta) for choice in choices)
        return begun + self._writer.delta(index, delta) + self._released(number)

    def end(self) -> bytes:
        return b"".join(map(self._released, sorted(self._held))) + self._writer.end()

    def _released(self, number: int) -> bytes:
        return b"".join(self._writer.delta(*held) for held in self._held.pop(number, ()))


class IntervalWriter(_WrappingWriter):
    """Joins the deltas of a choice until they have `interval_tokens`."""

    def __init__(self, writer: Writer, interval_tokens: int) -> None:
        super().__init__(writer)
        self._interval_tokens = interval_tokens
        self._begun: set[int] = set()
        self._waiting: defaultdict[int, list[Delta]] = defaultdict(list)
        self._num_tokens: defaultdict[int, int] = defaultdict(int)
        """New tokens of the waiting deltas, by choice."""

    def delta(self, index: int, delta: Delta) -> bytes:
        waiting = self._waiting[index]
        waiting.append(delta)
        self._num_tokens[index] += delta.num_output_tokens
        is_last = delta.finish_reason is not None or delta.is_final
        if index in self._begun and not is_last and self._num_tokens[index] < self._interval_tokens:
            return b""
        self._begun.add(index)
        del self._waiting[index], self._num_tokens[index]
        return self._writer.delta(index, _joined(waiting))


class CollectingWriter(_WrappingWriter):
    """Also collects the deltas in a WholeAnswer."""

    def __init__(self, writer: Writer, answer: WholeAnswer) -> None:
        super().__init__(writer)
        self._answer = answer
        self.has_ended = False
        """Whether the answer is complete."""

    def delta(self, index: int, delta: Delta) -> bytes:
        self._answer.add(index, delta)
        return self._writer.delta(index, delta)

    def end(self) -> bytes:
        self.has_ended = True
        return self._writer.end()


def _joined(deltas: list[Delta]) -> Delta:
    """One delta instead of consecutive ones of a choice."""
    if len(deltas) == 1:
        return deltas[0]
    return msgspec.structs.replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        logprobs=[entries for delta in deltas for entries in delta.logprobs],
        num_output_tokens=sum(delta.num_output_tokens for delta in deltas),
        text_tokens=[token for delta in deltas for token in delta.text_tokens],
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        prompt=next((delta.prompt for delta in deltas if delta.prompt is not None), None),
    )
