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
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from llmbackend.core.errors import TritonError
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
from ...http.errors import JsonObject, OpenAIError
from ...http.request_body import release_body
from ...inference_gate import InferenceGate
from ...journals.documents import Document, StoreError
from ...journals.response_store import LiveLog, ResponseStore, current_owner
from ...operations.probes import load_headers
from .conversations import Conversations
from .events import ResponseWriter, journal_stream
from .parsing import History, read_responses
from .preparation import PreparedResponse, prepare
from .response_state import ResponseState

log = logging.getLogger(__name__)
T = TypeVar("T")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[tuple[object, ...]])


def encode_deltas(deltas: Iterable[Delta]) -> bytes:
    return _ENCODER.encode([msgspec.structs.astuple(delta) for delta in deltas])


def decode_deltas(steps: Iterable[bytes]) -> list[Delta]:
    return [Delta(*fields) for step in steps if step for fields in _DECODER.decode(step)]  # type: ignore[arg-type]


class BackgroundRun:
    """The generation of one background response. Used only on the event loop."""

    def __init__(
        self,
        gate: InferenceGate,
        log: LiveLog,
        state: ResponseState,
        writer: ResponseWriter,
        before_end: Callable[[], Awaitable[object]],
    ) -> None:
        """before_end: awaited when the answer is complete, before its last event is sent"""
        self._gate = gate
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
        return self._begin(partial(self._produce, generation))

    def resume(self, attempt: Callable[[], Generation] | None) -> asyncio.Task[None]:
        """Continues a response of another server. attempt: creates its generation; None: it has all its tokens"""
        return self._begin(self._complete if attempt is None else partial(self._continue, attempt))

    def _begin(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        self._task = asyncio.get_running_loop().create_task(self._until_end(work))
        return self._task

    async def cancel(self) -> None:
        """Has no effect after the end. Raises StoreError."""
        if await self._stopped():
            self._state.cancel()
            await self._finish([])

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

    async def _until_end(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except asyncio.CancelledError:
            if self._failure is None:
                raise
            await self._give_up(self._failure)
        except Exception as error:
            self._is_ending = True
            await self._give_up(OpenAIError.of(error))
        finally:
            if self._generation is not None:
                self._generation.close()

    async def _continue(self, attempt: Callable[[], Generation]) -> None:
        async def begun() -> tuple[Generation, Delta]:
            generation = self._generation = attempt()
            try:
                return generation, (await generation.next())[1]
            except Exception:
                generation.close()
                raise

        await self._produce(*await _repeated(begun))

    async def _produce(self, generation: Generation, first: Delta | None = None) -> None:
        """first: an already popped delta"""
        while first is not None or not generation.is_over:
            deltas = [(await generation.next())[1] if first is None else first]
            first = None
            while (arrival := generation.pop()) is not None:
                deltas.append(arrival[1])
            self.log.append(await self._events(deltas), encode_deltas(deltas))
            await self.log.wait_for_capacity()
        await generation.checked()
        await self._complete()

    async def _complete(self) -> None:
        self._is_ending = True
        events = await self._gate.run_in_thread(self._writer.end_events)
        await self._before_end()
        await self._finish(events)

    async def _events(self, deltas: Sequence[Delta]) -> list[bytes]:
        def written() -> list[bytes]:
            return [event for delta in deltas for event in self._writer.delta_events(delta)]

        if not deltas[-1].is_final:
            return written()
        self._is_ending = True  # a thread cannot be cancelled
        events = await self._gate.run_in_thread(written)  # the last ones repeat all logprobs
        self._is_ending = False
        if self._failure is not None:  # which could not cancel the thread
            raise self._failure
        return events

    async def _give_up(self, error: OpenAIError) -> None:
        with suppress(StoreError):  # already reported where it occurred
            await self._finish(self._writer.fail_events(error))

    async def _finish(self, events: Sequence[bytes]) -> None:
        self._is_ending = self.is_over = True
        document = replace(self.log.document, body=self._state.json(), output=self._state.output_json())
        await self.log.finish(document, events)

    def _store_failed(self, error: Exception) -> None:
        """Set as the log's `on_failure`."""
        log.error("the background response %s cannot be stored: %s", self.log.id, error)
        self._failure = OpenAIError.of(error)
        if self._task is not None and not self._is_ending:
            self._is_ending = True
            self._task.cancel()


_SEED_BITS: Final = 31
_RETRY_S: Final = 1.0
"""Time between two attempts to continue a response of another server while this one refuses it for the time being."""
_MAX_UNAVAILABLE_S: Final = 600.0
"""How long a model that is not ready, or whose queue is full, is asked again. A limit of the server is waited for until
the response expires."""


async def _repeated(attempt: Callable[[], Awaitable[T]]) -> T:
    """`attempt()`, repeated while it is refused for the time being. Raises its last error."""
    end_s = time.monotonic() + _MAX_UNAVAILABLE_S
    while True:
        try:
            return await attempt()
        except (OpenAIError, TritonError) as error:
            if isinstance(error, LimitReachedError):
                end_s = time.monotonic() + _MAX_UNAVAILABLE_S
            elif OpenAIError.of(error).status != 503 or time.monotonic() > end_s:
                raise
        await asyncio.sleep(_RETRY_S)


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
        self._resuming: dict[str, tuple[asyncio.Task[None], LiveLog]] = {}
        """Responses of other servers that have no run yet."""
        store.producer = self

    async def create(
        self, http: Request, prepared: PreparedResponse, target: Target, trace: RequestTrace | None
    ) -> Response:
        """Starts the response; returns the queued response, or its events."""
        seed = prepared.request.generation.sampling.get("seed")
        seed = secrets.randbits(_SEED_BITS) if seed in (None, -1) else seed
        identity = Identity.of(prepared.request.generation, target.model.fingerprint, prepared.identity_suffix)
        response = self._response(prepared, identity, target, seed)
        continuation = await self._gate.decode_in_thread(
            len(prepared.items), partial(_continuation, prepared, identity, seed)
        )
        generation = Generation(self._gate, response.request, target, identity.id, plan=response.plan, trace=trace)
        release_body(http)
        try:
            queued = response.state.json()
            events = response.writer.begin_events()
            document = prepared.document(current_owner(), identity, response.state, self._store, continuation)
            run = self._run(self._store.begin(document, prepared.history.ancestors), response)
            run.log.append(events, b"")
            self._watch(run, run.begin(generation))
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
        return Response(queued, headers=headers, media_type="application/json")

    async def cancel(self, id: str) -> None:
        """Has no effect on a response that is not in progress. Raises StoreError."""
        if (resuming := self._resuming.get(id)) is not None:
            task, log = resuming
            if log.document.is_live:  # otherwise it is failing
                task.cancel()
            await asyncio.wait((task,))
            await log.finish(_with(log.document, {"status": "cancelled"}))
        elif (run := self._runs.get(id)) is not None:
            await run.cancel()

    # --- a Producer of the store --------------------------------------------------------------------------------------

    async def take_over(self, document: Document) -> None:
        """Readers find its log at once; a task continues the generation."""
        log, progress = await self._store.resume(document)
        task = asyncio.get_running_loop().create_task(self._resume(document, log, progress))
        self._resuming[document.id] = task, log
        task.add_done_callback(lambda _: self._resuming.pop(document.id, None))

    async def suspend(self) -> None:
        for task, _ in list(self._resuming.values()):
            task.cancel()
        await asyncio.gather(*(run.suspend() for run in list(self._runs.values())))

    async def _resume(self, document: Document, log: LiveLog, progress: list[bytes]) -> None:
        try:
            response, target, is_complete = await self._replayed(document, log, progress)
        except Exception as error:
            await _fail(log, OpenAIError.of(error))
            return
        del self._resuming[document.id]
        attempt = partial(Generation, self._gate, response.request, target, response.identity.id, plan=response.plan)
        run = self._run(log, response)
        self._watch(run, run.resume(None if is_complete else attempt))

    async def _replayed(
        self, document: Document, log: LiveLog, progress: list[bytes]
    ) -> tuple[_Response, Target, bool]:
        """The response at the end of its log, and whether its tokens are complete."""
        if not document.continuation:
            raise OpenAIError("the server exited while generating the response", status=503)
        continuation = _decoded(document.continuation)
        prepared, deltas = await self._gate.run_in_thread(partial(_read, continuation, progress, self._key))
        asked = prepared.request.generation
        target = await _repeated(partial(self._catalog.require, asked.model, asked.prompts[0].name))
        identity = Identity(document.id, continuation.created_s, asked.model, continuation.fingerprint)
        response = self._response(prepared, identity, target, continuation.seed)
        await self._gate.run_in_thread(partial(_replay, response.writer, deltas))
        if response.writer.next_sequence_number != log.journal.next_number:
            message = "for the same tokens, this server sends other events than the one that began the response"
            raise OpenAIError(message, status=503)
        sent = tuple(id for delta in deltas for id in delta.token_ids)
        response = replace(response, request=replace(response.request, prior_output_ids=sent))
        return response, target, any(delta.is_final for delta in deltas)

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
        run = self._runs[log.id] = BackgroundRun(self._gate, log, response.state, response.writer, tell)
        return run

    def _watch(self, run: BackgroundRun, task: asyncio.Task[None]) -> None:
        """Ends the run when its document expires, at the latest. task: of the run"""
        left_s = run.log.document.expires_s - self._store.clock_s()
        alarm = asyncio.get_running_loop().call_later(max(left_s, 0.0), run.expire)

        def ended(_: asyncio.Task[None]) -> None:
            alarm.cancel()
            self._runs.pop(run.log.id, None)

        task.add_done_callback(ended)


def _continuation(prepared: PreparedResponse, identity: Identity, seed: int) -> bytes:
    body = prepared.body | {"model": identity.model}  # the default, if the request names none
    history = (list(prepared.history.items), dict(prepared.history.by_id))
    return msgspec.msgpack.encode(
        _Continuation(
            *(body, history, prepared.identity_suffix, identity.created_s, identity.fingerprint, seed),
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
        raise OpenAIError("another release of the server began the response, and stored it differently", status=503)
    return found


def _read(continuation: _Continuation, progress: list[bytes], key: SealingKey) -> tuple[PreparedResponse, list[Delta]]:
    history = History(tuple(continuation.history[0]), continuation.history[1])
    return prepare(read_responses(continuation.body), history, key, continuation.suffix), decode_deltas(progress)


def _replay(writer: ResponseWriter, deltas: list[Delta]) -> None:
    """Brings a new writer to the state of the previous one. The events are not sent again."""
    writer.begin_events()
    for delta in deltas:
        writer.delta_events(delta)


async def _fail(live_log: LiveLog, error: OpenAIError) -> None:
    """Ends a response that cannot be continued."""
    log.warning("the response %s cannot be continued: %s", live_log.id, error.message)
    told = {"code": error.code or "server_error", "message": error.message}
    document = _with(live_log.document, {"status": "failed", "error": told})
    head = b'event: response.failed\ndata: {"type":"response.failed","sequence_number":%d,"response":%b}\n\n'
    await live_log.finish(document, [head % (live_log.journal.next_number, document.body)])


def _with(document: Document, fields: JsonObject) -> Document:
    return replace(document, body=orjson.dumps(orjson.loads(document.body) | fields))
