"""Counts the answers that a server holds for its clients."""

from llmbackend.frontends.journals.idempotency import IdempotentRequests, _Answer
from llmbackend.frontends.journals.resumable_streams import ResumableStream, ResumableStreams


def num_answers(idempotent: IdempotentRequests, owner: str = "") -> int:
    return len(idempotent._kept.of(_Answer, owner))


def num_streams(streams: ResumableStreams) -> int:
    return sum(1 for _ in streams._kept.all(ResumableStream))
