"""Writes the chunks of a stream as ready-made server-sent events.

For: the endpoints, streaming mode. Does not know: HTTP, the host. Invariant: id, created and model are the same bytes
in every chunk; each choice gets its text, then exactly one finish chunk; the usage comes last. The hot path is bytes:
what is the same in every chunk is encoded once, and a token costs one orjson call for its text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import orjson

from .fields import JsonObject
from .logprobs import CompletionLogprobs, chat_logprobs
from .requests import GenerationRequest
from .responses import DEFAULT_FINISH_REASON, Identity
from .sampling import StreamOptions
from .tensors import Delta, TokenEntries
from .usage import Usage

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


@dataclass(frozen=True, slots=True)
class _Shape:
    """Where the text stands in a choice: chat puts it in `delta`, completions in `text`."""

    kind: str
    text_open: bytes
    text_close: bytes
    without_text: bytes


_CHAT = _Shape("chat.completion.chunk", b'"delta":{"content":', b"}", b'"delta":{}')
_COMPLETION = _Shape("text_completion", b'"text":', b"", b'"text":""')
_ROLE = b'"delta":{"role":"assistant","content":""}'


class ChunkWriter:
    """The chunks of one stream, in order: `begin`, `delta` for each delta, `end`."""

    def __init__(self, request: GenerationRequest, identity: Identity, options: StreamOptions) -> None:
        self._shape = _CHAT if request.is_chat else _COMPLETION
        self._head = b"data: " + orjson.dumps(identity.fields(self._shape.kind))[:-1] + b',"choices":['
        self._options = options
        self._tail = b'],"usage":null}\n\n' if options.include_usage else b"]}\n\n"
        self._usage = Usage()
        self._echo = request.echo
        self._finished = [False] * len(request.prompts)
        self._logprobs = [_logprobs_renderer(request) for _ in request.prompts]

    def begin(self) -> bytes:
        """One chunk per choice that says who speaks (chat), or repeats the prompt (completions with `echo`)."""
        if self._shape is _CHAT:
            return b"".join(self._chunk(index, _ROLE) for index in range(len(self._finished)))
        return b"".join(self._chunk(index, self._text(text)) for index, text in enumerate(self._echo) if text)

    def delta(self, index: int, delta: Delta) -> bytes:
        """The chunk of new text, the finish chunk, both, or nothing (text held back until it is sure)."""
        self._usage.add(index, delta)
        chunk = b""
        if delta.text or delta.logprobs:
            render = self._logprobs[index]
            logprobs = b"null" if render is None else orjson.dumps(render(delta.logprobs))
            chunk = self._chunk(index, self._text(delta.text), logprobs)
        if (delta.finish_reason or delta.is_final) and not self._finished[index]:
            self._finished[index] = True
            reason = orjson.dumps(delta.finish_reason or DEFAULT_FINISH_REASON)
            chunk += self._chunk(index, self._shape.without_text, finish_reason=reason)
        return chunk

    def end(self) -> bytes:
        if not self._options.include_usage:
            return DONE
        return self._head + b'],"usage":' + orjson.dumps(self._usage.total()) + b"}\n\n" + DONE

    def _text(self, text: str) -> bytes:
        return self._shape.text_open + orjson.dumps(text) + self._shape.text_close

    def _chunk(self, index: int, text: bytes, logprobs: bytes = b"null", finish_reason: bytes = b"null") -> bytes:
        tail = self._tail
        if self._options.continuous_usage:
            tail = b'],"usage":' + orjson.dumps(self._usage.as_json()) + b"}\n\n"
        return b'%b{"index":%d,%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._head, index, text, logprobs, finish_reason, tail,
        )  # fmt: skip


def _logprobs_renderer(request: GenerationRequest) -> Callable[[list[TokenEntries]], JsonObject] | None:
    top = request.top_logprobs
    if top is None:
        return None
    if not request.is_chat:
        return CompletionLogprobs(top).render
    return lambda positions: chat_logprobs(positions, top)
