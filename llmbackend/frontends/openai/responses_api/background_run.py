"""BackgroundRun: one response that is made without its client, from its generation into its log.

For: background.py. Does not know: requests, other responses. Invariants: each step's events and the deltas that they
came from are committed together, so that another process which pushes the deltas through a new writer is where this one
was; a run ends once: by itself, or stopped by its owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec

from llmbackend.frontends.journals.documents import StoreError
from llmbackend.frontends.journals.response_store import LiveLog

from ..errors import OpenAIError
from ..generation import Generation
from ..tensors import Delta
from .event_writer import ResponseWriter
from .response_state import ResponseState

log = logging.getLogger(__name__)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[tuple[object, ...]])


def encode_deltas(deltas: Iterable[Delta]) -> bytes:
    """One step's deltas, for the log."""
    return _ENCODER.encode([msgspec.structs.astuple(delta) for delta in deltas])


def decode_deltas(steps: Iterable[bytes]) -> list[Delta]:
    """Those of all steps."""
    return [Delta(*fields) for step in steps if step for fields in _DECODER.decode(step)]  # type: ignore[arg-type]


class BackgroundRun:
    """Used on the event loop alone."""

    def __init__(
        self, log: LiveLog, state: ResponseState, writer: ResponseWriter, before_end: Callable[[], Awaitable[None]]
    ) -> None:
        """before_end: awaited when the answer is complete, before it is told"""
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
        """Reads the generation until it ends."""
        self._generation = generation
        self._task = asyncio.get_running_loop().create_task(self._produce(generation))
        return self._task

    async def cancel(self) -> None:
        """Ends the response as cancelled, unless it has ended. Raises StoreError."""
        if await self._stopped():
            self._state.cancel()
            await self._finish([])

    async def fail(self, error: OpenAIError) -> None:
        """Ends it as failed. Raises StoreError."""
        await self._finish(self._writer.fail_events(error))

    async def complete(self) -> None:
        """Ends it after its last delta. Raises StoreError."""
        self._is_ending = True
        events = self._writer.end_events()
        await self._before_end()
        await self._finish(events)

    async def suspend(self) -> None:
        """Ends the run and leaves its log as it is."""
        if await self._stopped():
            self.is_over = True
            self.log.abandon()

    def expire(self) -> None:
        """The document's time is over; the store removes it."""
        self.log.abandon()
        self.is_over = True
        if self._task is not None and not self._is_ending:
            self._task.cancel()

    async def _stopped(self) -> bool:
        """Ends the task; False when the response has ended by itself."""
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
                await self.log.room()
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
        with suppress(StoreError):  # it was told where it happened
            await self.fail(error)

    async def _finish(self, events: Sequence[bytes]) -> None:
        self._is_ending = self.is_over = True
        await self.log.finish(replace(self.log.document, body=self._state.json()), events)

    def _store_failed(self, error: Exception) -> None:
        """Called by the log, between two steps of the task."""
        log.error("the background response %s can not be stored: %s", self.log.id, error)
        self._failure = OpenAIError.of(error)
        if self._task is not None and not self._is_ending:
            self._is_ending = True
            self._task.cancel()
