"""Chunks of chats with tool calls or reasoning.

For: the router. Does not know: how a model writes them. Invariant: as of every stream: the deltas put together are the
whole response's message; logprobs and token ids come with the first delta of their tokens, or with an empty one.
"""

from __future__ import annotations

import orjson

from .answer_plan import AnswerPlan
from .answers import AnswerReader
from .parsers import ContentDelta
from .requests import GenerationRequest
from .responses import DEFAULT_FINISH_REASON, Identity
from .schema import StreamOptions
from .streams import ChunkWriter
from .tensors import Delta


class AnswerChunkWriter(ChunkWriter):
    """A ChunkWriter that reads what the model writes."""

    def __init__(
        self, request: GenerationRequest, identity: Identity, options: StreamOptions, plan: AnswerPlan
    ) -> None:
        super().__init__(request, identity, options)
        self._readers = [AnswerReader(plan, identity.id, index) for index in range(len(self._finished))]
        self._reports_reasoning = plan.reasoning_format is not None

    def delta(self, index: int, delta: Delta) -> bytes:
        reader = self._readers[index]
        events = reader.read(delta)
        if self._has_usage:
            self._usage.add(index, delta)
            if self._reports_reasoning:
                self._usage.set_reasoning(index, reader.num_reasoning_tokens)
        if len(events) == 1 and isinstance(events[0], ContentDelta) and not (self._has_more or delta.token_ids):
            chunks = [self._text_chunk(index, events[0].text)]
        else:
            deltas = [orjson.dumps(found) for event in events if (found := reader.as_delta(event)) is not None]
            chunks = self._chunks(index, delta, deltas)
        if (delta.finish_reason or delta.is_final) and not self._finished[index]:
            self._finished[index] = True
            reason = reader.finish_reason(delta.finish_reason or DEFAULT_FINISH_REASON)
            chunks.append(self._finish_chunk(index, reason, delta))
        return b"".join(chunks)

    def _chunks(self, index: int, delta: Delta, deltas: list[bytes]) -> list[bytes]:
        if not delta.logprobs and not delta.token_ids:
            return [self._chunk(index, b'"delta":' + one) for one in deltas]
        first, *others = deltas or [b"{}"]
        render = self._logprobs[index]
        logprobs = b"null" if render is None else orjson.dumps(render(delta.logprobs))
        more = b',"token_ids":' + orjson.dumps(delta.token_ids) if delta.token_ids else b""
        chunks = [self._chunk(index, b'"delta":' + first, logprobs, more=more)]
        return chunks + [self._chunk(index, b'"delta":' + one) for one in others]


def chunk_writer(
    request: GenerationRequest, identity: Identity, options: StreamOptions, plan: AnswerPlan | None
) -> ChunkWriter:
    """The plain one where the answer is text."""
    if plan is None:
        return ChunkWriter(request, identity, options)
    return AnswerChunkWriter(request, identity, options, plan)
