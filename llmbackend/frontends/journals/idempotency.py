"""Retried POSTs: a second request with the same `Idempotency-Key` gets the answer of the first one, computed once.

Invariants: only one of the requests with the same key runs; the others get all bytes of its answer, even while it runs;
another body is refused; an answer other than 2xx, or with an error event, is forgotten once its waiting readers have
received it; what is retained is bounded per API key and in total, and expires. A request continues without its client
for the grace period.
Sources: draft-ietf-httpapi-idempotency-key-header (422 for another body; unlike in the draft, a retry waits instead of
getting 409, which is sent only while the first request's body is arriving), Stripe (`Idempotent-Replayed`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmbackend.frontends.errors import log_bug
from llmbackend.frontends.http.direct_body import DirectBody
from llmbackend.frontends.http.request_scope import HAS_FAILED, LABELS, PRESENCE, ClientPresence, unless_disconnected

from ..http.errors import STOPPING, refusing
from .journal import EventsGoneError, Journal, settle
from .kept_answers import KeptAnswer, KeptAnswers
from .response_store import current_owner
from .store_settings import IdempotencyLimits

REPLAYED: Final = (b"idempotent-replayed", b"true")
"""Header of the answer to an earlier request."""
_KEY: Final = b"idempotency-key"
_MAX_KEY_CHARS: Final = 255
_BODY_WAIT_S: Final = 1.0
"""How long a retry waits for the body of the earlier request with the same key."""
_OPENAI_PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations")
_MODELS: Final = "/v2/models/"
_MODEL_ENDPOINTS: Final = ("/infer", "/generate", "/generate_stream")
_FINGERPRINTED_HEADERS: Final = frozenset((b"content-type", b"content-encoding", b"inference-header-content-length"))
"""Headers that change the meaning of a body."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Answer(KeptAnswer):
    """The answer to the requests with one key."""

    presence: ClientPresence = field(default_factory=ClientPresence)
    """The client presence that the application sees."""
    fingerprint: asyncio.Future[bytes | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Fingerprint of the request; None if its body was not read."""
    head: asyncio.Future[Message | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The first message of the answer; None if there is no answer."""
    work: asyncio.Task[None] | None = None
    num_body_bytes: int = 0
    """Size of the request's body."""
    has_first_client: bool = True
    unsent_bytes: int = 0
    """Published, but not yet sent to the first client."""
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the first client has been sent more, or has left."""

    @property
    def has_ended(self) -> bool:
        return self.journal.has_ended

    def cancel(self) -> None:
        if not self.has_ended:
            self.presence.lost()


class IdempotentRequests:
    """The answers of one server. Used only on its event loop."""

    def __init__(self, limits: IdempotencyLimits, kept: KeptAnswers) -> None:
        self._limits = limits
        self._kept = kept

    def applies_to(self, scope: Scope) -> bool:
        """Whether it is a POST that starts an inference and has a key."""
        if scope["type"] != "http" or scope["method"] != "POST" or not self._limits.ttl_s:
            return False
        return any(name == _KEY for name, _ in scope["headers"]) and _begins_inference(scope)

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request with `app`, or with the answer to an earlier one."""
        key = _key_of(scope)
        if not key or len(key) > _MAX_KEY_CHARS or not key.isprintable():
            text = f"the header 'Idempotency-Key' has {len(key)} characters, expected 1 to {_MAX_KEY_CHARS}, printable"
            await refusing(400, text)(scope, receive, send)
            return
        owner = current_owner()
        while (answer := self._kept.find(_Answer, owner, key)) is not None:
            try:
                async with asyncio.timeout(_BODY_WAIT_S):
                    expected = await asyncio.shield(answer.fingerprint)
            except TimeoutError:
                text = f"the first request with the key '{key}' of the header 'Idempotency-Key' is still being sent"
                await refusing(409, text)(scope, receive, send)
                return
            if expected is None:
                self._kept.forget(answer)  # its body was not read
                continue
            if await _fingerprint(scope, receive, answer.num_body_bytes) != expected:
                text = f"the key '{key}' of the header 'Idempotency-Key' was used with another request"
                await refusing(422, text)(scope, receive, send)
            else:
                await self._give(answer, scope, receive, send, is_first=False)
            return
        if text := self._make_room(owner):
            await refusing(429, text)(scope, receive, send)
            return
        journal = Journal(self._limits.max_answer_bytes)
        answer = _Answer(owner=owner, key=key, journal=journal, retention_s=self._limits.ttl_s)
        answer.stop = answer.cancel
        self._kept.add(answer)
        answer.work = asyncio.get_running_loop().create_task(self._work(answer, app, scope, receive))
        await self._give(answer, scope, receive, send, is_first=True)

    async def close(self) -> None:
        answers = list(self._kept.all(_Answer))
        for answer in answers:
            self._kept.forget(answer)
            if answer.work is not None:
                answer.work.cancel()
        await asyncio.gather(*(answer.work for answer in answers if answer.work is not None), return_exceptions=True)

    # --- the first request --------------------------------------------------------------------------------------------

    async def _work(self, answer: _Answer, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        """Runs the application as if its client stayed connected, and retains its answer."""
        inner = {**scope, PRESENCE: answer.presence}
        DirectBody.remove_from(inner)
        body = _BodyReader(answer, inner, receive)

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope.setdefault(LABELS, inner.get(LABELS, ""))
                answer.head.set_result(message)
                return
            if piece := message.get("body", b""):
                await self._wait_for_first_client(answer)
                answer.unsent_bytes += len(piece)
                self._kept.publish(answer, [piece])
            if not message.get("more_body", False):
                self._complete(answer, inner)

        try:
            await app(inner, body.receive, send)
        except Exception as error:
            log_bug(f"{scope['method']} {scope['path']} failed", error)
        finally:
            settle(answer.fingerprint)
            settle(answer.head)
            if not answer.has_ended:
                self._kept.end(answer, _IncompleteError())
                self._kept.forget(answer)

    async def _wait_for_first_client(self, answer: _Answer) -> None:
        """Holds the application up as a client does without a key: what it has not been sent is not dropped."""
        while answer.has_first_client and answer.unsent_bytes > self._limits.max_answer_bytes // 2:
            answer.progress.clear()
            await answer.progress.wait()

    def _complete(self, answer: _Answer, scope: Scope) -> None:
        self._kept.end(answer)
        message = answer.head.result()
        is_kept = message is not None and 200 <= message["status"] < 300 and answer.fingerprint.done()
        if is_kept and HAS_FAILED not in scope:
            self._evict(answer.owner)
        else:
            self._kept.forget(answer)

    # --- its readers --------------------------------------------------------------------------------------------------

    async def _give(self, answer: _Answer, scope: Scope, receive: Receive, send: Send, *, is_first: bool) -> None:
        """Sends the answer from its beginning, as it arrives. is_first: to the client of the first request"""
        with answer.journal.reading(), suppress(ClientDisconnect, OSError):
            # The body must have been read before its client is watched, unless it is not needed.
            try:
                await asyncio.wait((answer.fingerprint, answer.head), return_when=asyncio.FIRST_COMPLETED)
                sending = self._send(answer, scope, receive, send, is_first)
                await unless_disconnected(Request(scope, receive), sending)
            finally:
                if is_first:
                    answer.has_first_client = False
                    answer.progress.set()

    async def _send(self, answer: _Answer, scope: Scope, receive: Receive, send: Send, is_first: bool) -> None:
        head = await asyncio.shield(answer.head)
        if head is None:
            await refusing(503, STOPPING)(scope, receive, send)
            return
        if answer.journal.first_held:
            text = "the answer to the first request with this 'Idempotency-Key' was too large to retain"
            await refusing(409, text)(scope, receive, send)
            return
        await send({**head, "headers": head["headers"] if is_first else [*head["headers"], REPLAYED]})
        reading = answer.journal.follow()
        try:
            async for pieces in reading:
                body = b"".join(pieces.parts)
                await send({"type": "http.response.body", "body": body, "more_body": True})
                if is_first:
                    answer.unsent_bytes -= len(body)
                    answer.progress.set()
        except (EventsGoneError, _IncompleteError):
            return  # the connection closes within the body, so the client sees that it is incomplete
        finally:
            await reading.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    # --- eviction -----------------------------------------------------------------------------------------------------

    def _make_room(self, owner: str) -> str:
        """Makes room for one more answer. Returns why that is not possible, otherwise ""."""
        of_owner = self._kept.of(_Answer, owner)
        if len(of_owner) >= self._limits.max_answers and not self._forget_one(of_owner):
            return f"{self._limits.max_answers} requests with an 'Idempotency-Key' are running, which is the limit"
        return "" if self._kept.has_capacity() else self._kept.refusal("answers to requests with an 'Idempotency-Key'")

    def _evict(self, owner: str) -> None:
        answers = self._kept.of(_Answer, owner)
        held = sum(one.journal.held_bytes for one in answers.values())
        while held > self._limits.max_bytes and (gone := self._forget_one(answers)) is not None:
            held -= gone.journal.held_bytes

    def _forget_one(self, answers: Mapping[str, _Answer]) -> _Answer | None:
        """Forgets and returns the oldest ended answer; None if all are running."""
        oldest = next((one for one in answers.values() if one.has_ended), None)
        if oldest is not None:
            self._kept.forget(oldest)
        return oldest


class _IncompleteError(Exception):
    """The application ended before its answer did."""


class _BodyReader:
    """The `receive` of the application: the request's body, which is hashed, then a disconnect."""

    def __init__(self, answer: _Answer, scope: Scope, receive: Receive) -> None:
        self._answer = answer
        self._receive = receive
        self._hash = _begun_hash(scope)
        self._gone: asyncio.Future[None] | None = None

    async def receive(self) -> Message:
        answer = self._answer
        if answer.fingerprint.done():
            return await self._until_lost()
        message = await self._receive()
        if message["type"] == "http.disconnect":
            answer.fingerprint.set_result(None)
            return message
        chunk = message.get("body", b"")
        answer.num_body_bytes += len(chunk)
        self._hash.update(chunk)
        if not message.get("more_body", False):
            answer.fingerprint.set_result(self._hash.digest())
        return message

    async def _until_lost(self) -> Message:
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_future()
            self._answer.presence.when_lost(partial(settle, self._gone))
        await asyncio.shield(self._gone)
        return {"type": "http.disconnect"}


async def _fingerprint(scope: Scope, receive: Receive, expected_bytes: int) -> bytes | None:
    """Reads a request's body and returns its fingerprint; None if it is longer than expected or does not arrive."""
    found = _begun_hash(scope)
    num_bytes = 0
    is_more = True
    while is_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > expected_bytes:
            return None
        found.update(chunk)
        is_more = message.get("more_body", False)
    return found.digest()


def _begun_hash(scope: Scope) -> hashlib._Hash:
    """A hash that already contains everything of the request except its body."""
    headers = sorted((name, value) for name, value in scope["headers"] if name in _FINGERPRINTED_HEADERS)
    return hashlib.sha256(repr((scope["path"], scope.get("query_string", b""), headers)).encode())


def _begins_inference(scope: Scope) -> bool:
    path: str = scope["path"]
    return path in _OPENAI_PATHS or (path.startswith(_MODELS) and path.endswith(_MODEL_ENDPOINTS))


def _key_of(scope: Scope) -> str:
    key: bytes = next(value for name, value in scope["headers"] if name == _KEY)
    return key.decode("latin-1").strip()
