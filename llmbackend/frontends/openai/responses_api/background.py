"""Background responses: generated without a connected client, read by cursor, and continued by another server after a
crash.

Invariants: they count towards the limits of the server and the key; a step's events and deltas are committed together;
with a persistent store, the next server continues a response from its logged tokens with the same seed, and therefore
with the same tokens, events and sequence numbers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from llmbackend.core.tracing.trace import RequestTrace

from ...context import FrontendContext
from ...errors import LimitReachedError
from ...generation.answer import Identity
from ...generation.inferences import Generation
from ...generation.models import Target
from ...generation.plan import AnswerPlan, plan_answer
from ...generation.request import WITH_USAGE, GenerationRequest
from ...generation.sealed_reasoning import SealingKey
from ...generation.tensors import Delta
from ...http.errors import OpenAIError
from ...http.request_body import release_body
from ...journals.documents import Document, StoreError
from ...journals.response_store import LiveLog, ResponseStore, current_owner
from ...operations.probes import load_headers
from .conversations import Conversations
from .events import ResponseWriter, journal_stream
from .parsing import History, read_responses
from .preparation import PreparedResponse, prepare
from .response_state import ResponseState

log = logging.getLogger(__name__)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[tuple[object, ...]])


def encode_deltas(deltas: Iterable[Delta]) -> bytes:
    return _ENCODER.encode([msgspec.structs.astuple(delta) for delta in deltas])


def decode_deltas(steps: Iterable[bytes]) -> list[Delta]:
    return [Delta(*fields) for step in steps if step for fields in _DECODER.decode(step)]  # type: ignore[arg-type]


class BackgroundRun:
    """The generation of one background response. Used only on the event loop."""

    def __init__(
        self, log: LiveLog, state: ResponseState, writer: ResponseWriter, before_end: Callable[[], Awaitable[None]]
    ) -> None:
        """before_end: awaited when the answer is complete, before its last event is sent"""
        self.log = log
        self._before_end = before_end
        self.is_over = False
        self._state = state
        self._writer = writer
        self._generation: Generation | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_ending = False
        self._failure: OpenAIError | None = None
        log.on_failure = self._store_failed

    def begin(self, generation: Generation) -> asyncio.Task[None]:
        self._generation = generation
        self._task = asyncio.get_running_loop().create_task(self._produce(generation))
        return self._task

    async def cancel(self) -> None:
        """Has no effect after the end. Raises StoreError."""
        if await self._stopped():
            self._state.cancel()
            await self._finish([])

    async def fail(self, error: OpenAIError) -> None:
        """Raises StoreError."""
        await self._finish(self._writer.fail_events(error))

    async def complete(self) -> None:
        """To be called after the last delta. Raises StoreError."""
        self._is_ending = True
        events = self._writer.end_events()
        await self._before_end()
        await self._finish(events)

    async def suspend(self) -> None:
        """Ends the run but leaves its log as it is."""
        if await self._stopped():
            self.is_over = True
            self.log.abandon()

    def expire(self) -> None:
        """Called when the store removes the document."""
        self.log.abandon()
        self.is_over = True
        if self._task is not None and not self._is_ending:
            self._task.cancel()

    async def _stopped(self) -> bool:
        """Ends the task; returns False if the response has ended by itself."""
        task = self._task
        if task is not None:
            if not self._is_ending:
                task.cancel()
            await asyncio.wait((task,))
        if self._generation is not None:
            self._generation.close()
        return not self.is_over

    async def _produce(self, generation: Generation) -> None:
        try:
            while not generation.is_over:
                _, delta = await generation.next()
                deltas = [delta]
                while (arrival := generation.pop()) is not None:
                    deltas.append(arrival[1])
                self._append(deltas)
                await self.log.wait_for_capacity()
            await generation.checked()
            await self.complete()
        except asyncio.CancelledError:
            if self._failure is None:
                raise
            await self._give_up(self._failure)
        except Exception as error:
            self._is_ending = True
            await self._give_up(OpenAIError.of(error))
        finally:
            generation.close()

    def _append(self, deltas: Sequence[Delta]) -> None:
        events = [event for delta in deltas for event in self._writer.delta_events(delta)]
        self.log.append(events, encode_deltas(deltas))

    async def _give_up(self, error: OpenAIError) -> None:
        with suppress(StoreError):  # already reported where it occurred
            await self.fail(error)

    async def _finish(self, events: Sequence[bytes]) -> None:
        self._is_ending = self.is_over = True
        await self.log.finish(replace(self.log.document, body=self._state.json()), events)

    def _store_failed(self, error: Exception) -> None:
        """Set as the log's `on_failure`."""
        log.error("the background response %s cannot be stored: %s", self.log.id, error)
        self._failure = OpenAIError.of(error)
        if self._task is not None and not self._is_ending:
            self._is_ending = True
            self._task.cancel()


_SEED_BITS: Final = 31
_CAPACITY_POLL_S: Final = 1.0
"""Time between two attempts to continue a response of another server while this one is at its limit."""


_FORMAT: Final = 1
"""To be increased with each change of a _Continuation or a Delta: servers of two releases may share a store."""


class _Continuation(msgspec.Struct, frozen=True):
    """What another server needs to continue a response, in addition to its tokens."""

    body: Any
    """The request's JSON."""
    history: tuple[Any, Any]
    """(items, items by id)."""
    suffix: str
    created_s: int
    fingerprint: str
    seed: int
    format: int = 1


_CONTINUATION = msgspec.msgpack.Decoder(_Continuation)


@dataclass(frozen=True, slots=True)
class _Response:
    """Everything needed to generate one response."""

    prepared: PreparedResponse
    request: GenerationRequest
    plan: AnswerPlan
    identity: Identity
    state: ResponseState
    writer: ResponseWriter


class BackgroundResponses:
    """The Producer of its store. Used only on the event loop."""

    def __init__(self, context: FrontendContext, store: ResponseStore) -> None:
        self._gate = context.gate
        self._conversations = Conversations(store, context.gate, context.max_body_bytes)
        self._catalog = context.catalog
        self._store = store
        self._key = context.sealing_key
        self._runs: dict[str, BackgroundRun] = {}
        self._resuming: dict[str, asyncio.Task[None]] = {}
        store.producer = self

    async def create(
        self, http: Request, prepared: PreparedResponse, target: Target, trace: RequestTrace | None
    ) -> Response:
        """Starts the response; returns the queued response, or its events."""
        seed = prepared.request.generation.sampling.get("seed")
        seed = secrets.randbits(_SEED_BITS) if seed is None else seed
        identity = Identity.of(prepared.request.generation, target.model.fingerprint, prepared.identity_suffix)
        response = self._response(prepared, identity, target, seed)
        continuation = await self._gate.decode_in_thread(
            len(prepared.items), partial(_continuation, prepared, identity, seed)
        )
        generation = Generation(self._gate, response.request, target, identity.id, plan=response.plan, trace=trace)
        release_body(http)
        try:
            document = prepared.document(current_owner(), identity, response.state, self._store, continuation)
            events = response.writer.begin_events()
            run = self._run(self._store.begin(document), response)
            run.log.append(events, b"")
            self._begin(run, generation)
        except BaseException:
            self._runs.pop(identity.id, None)
            generation.close()
            raise
        headers = load_headers(self._gate.server, http, target.name)
        if prepared.request.generation.stream is not None:
            return journal_stream(run.log.journal, headers=headers)
        try:
            await run.log.committed()
        except StoreError as error:
            run.log.on_failure(error)  # nothing else would report it
            raise
        return Response(document.body, headers=headers, media_type="application/json")

    async def cancel(self, id: str) -> None:
        """Has no effect on a response that is not in progress. Raises StoreError."""
        if (resuming := self._resuming.get(id)) is not None:
            await asyncio.wait((resuming,))
        if (run := self._runs.get(id)) is not None:
            await run.cancel()

    # --- a Producer of the store --------------------------------------------------------------------------------------

    async def take_over(self, document: Document) -> None:
        """Readers find its log at once; a task continues the generation."""
        log, progress = await self._store.resume(document)
        task = asyncio.get_running_loop().create_task(self._resume(document, log, progress))
        self._resuming[document.id] = task
        task.add_done_callback(lambda _: self._resuming.pop(document.id, None))

    async def suspend(self) -> None:
        for task in list(self._resuming.values()):
            task.cancel()
        await asyncio.gather(*(run.suspend() for run in list(self._runs.values())))

    async def _resume(self, document: Document, log: LiveLog, progress: list[bytes]) -> None:
        try:
            response, target, is_complete = await self._replayed(document, log, progress)
        except Exception as error:
            await _fail(document, log, OpenAIError.of(error))
            return
        run = self._run(log, response)
        try:
            if is_complete:
                await run.complete()
            else:
                self._begin(run, await self._generation(response, target))
        except Exception as error:
            await run.fail(OpenAIError.of(error))
        finally:
            if run.is_over:
                self._runs.pop(document.id, None)

    async def _replayed(
        self, document: Document, log: LiveLog, progress: list[bytes]
    ) -> tuple[_Response, Target, bool]:
        """The response at the end of its log, and whether its tokens are complete."""
        if not document.continuation:
            raise OpenAIError("the server exited while generating the response", status=503)
        continuation = _decoded(document.continuation)
        prepared, deltas = await self._gate.run_in_thread(partial(_read, continuation, progress, self._key))
        asked = prepared.request.generation
        target = self._catalog.require(asked.model, asked.prompts[0].name)
        identity = Identity(document.id, continuation.created_s, asked.model, continuation.fingerprint)
        response = self._response(prepared, identity, target, continuation.seed)
        await self._gate.run_in_thread(partial(_replay, response.writer, deltas))
        if response.writer.next_sequence_number != log.journal.next_number:
            raise OpenAIError("the server that started the response produced other events for its tokens", status=503)
        sent = tuple(id for delta in deltas for id in delta.token_ids)
        response = replace(response, request=replace(response.request, prior_output_ids=sent))
        return response, target, any(delta.is_final for delta in deltas)

    async def _generation(self, response: _Response, target: Target) -> Generation:
        """Waits while the server is at its limit."""
        while True:
            try:
                return Generation(self._gate, response.request, target, response.identity.id, plan=response.plan)
            except LimitReachedError:
                await asyncio.sleep(_CAPACITY_POLL_S)

    # --- shared -------------------------------------------------------------------------------------------------------

    def _response(self, prepared: PreparedResponse, identity: Identity, target: Target, seed: int) -> _Response:
        """Raises OpenAIError."""
        asked = prepared.request.generation
        plan = replace(plan_answer(asked, target), reads_tokens=True)  # token by token, including the text
        request = replace(
            asked,
            stream=asked.stream or WITH_USAGE,
            sampling=asked.sampling | {"seed": seed},
            return_token_ids=True,
        )
        state = prepared.state(identity, plan, self._key, target)
        return _Response(prepared, request, plan, identity, state, ResponseWriter(state, cuts_at_tokens=True))

    def _run(self, log: LiveLog, response: _Response) -> BackgroundRun:
        tell = partial(response.prepared.add_to_conversation, self._conversations, log.document.owner, response.state)
        run = self._runs[log.id] = BackgroundRun(log, response.state, response.writer, tell)
        return run

    def _begin(self, run: BackgroundRun, generation: Generation) -> None:
        """Ends the run when its document expires, at the latest."""
        left_s = run.log.document.expires_s - self._store.clock_s()
        alarm = asyncio.get_running_loop().call_later(max(left_s, 0.0), run.expire)
        task = run.begin(generation)

        def ended(_: asyncio.Task[None]) -> None:
            alarm.cancel()
            self._runs.pop(run.log.id, None)

        task.add_done_callback(ended)


def _continuation(prepared: PreparedResponse, identity: Identity, seed: int) -> bytes:
    history = (list(prepared.history.items), dict(prepared.history.by_id))
    return msgspec.msgpack.encode(
        _Continuation(
            *(prepared.body, history, prepared.identity_suffix, identity.created_s, identity.fingerprint, seed),
            format=_FORMAT,
        )
    )


def _decoded(continuation: bytes) -> _Continuation:
    """Raises OpenAIError if a release with another format wrote it."""
    try:
        found = _CONTINUATION.decode(continuation)
    except msgspec.DecodeError:
        found = None
    if found is None or found.format != _FORMAT:
        raise OpenAIError("another release of the server, whose stored format differs, began it", status=503)
    return found


def _read(continuation: _Continuation, progress: list[bytes], key: SealingKey) -> tuple[PreparedResponse, list[Delta]]:
    history = History(tuple(continuation.history[0]), continuation.history[1])
    return prepare(read_responses(continuation.body), history, key, continuation.suffix), decode_deltas(progress)


def _replay(writer: ResponseWriter, deltas: list[Delta]) -> None:
    """Brings a new writer to the state of the previous one. The events are not sent again."""
    writer.begin_events()
    for delta in deltas:
        writer.delta_events(delta)


async def _fail(document: Document, live_log: LiveLog, error: OpenAIError) -> None:
    """Ends a response that cannot be continued."""
    log.warning("the response %s cannot be continued: %s", document.id, error.message)
    told = {"code": error.code or "server_error", "message": error.message}
    body = orjson.dumps(orjson.loads(document.body) | {"status": "failed", "error": told})
    head = b'event: response.failed\ndata: {"type":"response.failed","sequence_number":%d,"response":%b}\n\n'
    await live_log.finish(replace(document, body=body), [head % (live_log.journal.next_number, body)])
