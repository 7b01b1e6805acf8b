"""Sends the responses of one Triton request, which all of its tasks share.

For: InferTask; a request with a batch of prompts has one task for each. Does not know: tokens, tensors' names, queues.
Invariant: exactly one FINAL, with the end of the last task; then statistics, release and closing the factory, in this
order, once. A task that fails sends its error and does not affect the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmbackend.core.activity.messages import RequestEnd, RequestEnded
from llmbackend.core.backend_api import ModelInstance, Request, ResponseFlag, Tensor, TritonError

from .resuming import DeltaWriter, Known, Piece
from .schemas.schema import TaskTimes

_NONE, _FINAL = ResponseFlag.NONE, ResponseFlag.FINAL


@dataclass(frozen=True, slots=True)
class Choice:
    """The last response of a task.

    index              the task's place among those of its prompt
    cumulative_logprob of its tokens, where logprobs were asked for
    pieces             of its delta: one, where the request is resumable
    """

    index: int
    cumulative_logprob: float
    outputs: Sequence[Tensor]
    pieces: tuple[Piece, ...] = ()


class TaskUsage(NamedTuple):
    """What a task came to. prompt_tokens: 0 where another task of its request has the same prompt."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    num_preemptions: int


class ResponseSender:
    """`_lock`: the tasks of a batch may be on several engines, whose loops send at the same time."""

    def __init__(
        self,
        request: Request,
        instance: ModelInstance,
        exec_start_ns: int,
        client_error: Callable[[TritonError], TritonError],
        num_tasks: int = 1,
        num_prompts: int = 1,
        known: Known | None = None,
        num_choices: int = 1,
    ) -> None:
        """client_error: gives an error the text that the client expects
        num_prompts: the request's batch size
        num_choices: that the client gets of each prompt
        known: of a resumable request, with the seeds of its prompts; None = it is none
        """
        self.client_id = request.id
        self.number = request.number
        self.activity = instance.activity
        """Of the instance that has the request; it changes when another engine takes it."""
        self.tenant = request.tenant
        self.timeout_us = request.timeout_us
        self.num_choices = num_choices
        self._request = request
        self._instance = instance
        self._factory = request.response_factory()
        self._client_error = client_error
        self._num_prompts = num_prompts
        self._num_live = num_tasks
        self._usages: list[TaskUsage] = []
        """Of the tasks that have ended."""
        self._num_tasks = num_tasks
        self._has_failed = False
        self._known_pieces: tuple[Piece, ...] = () if known is None else known.pieces
        self._deltas = None if known is None else DeltaWriter(known.seeds, known.num_to_skip)
        self._response_start_ns = exec_start_ns
        self._lock = threading.Lock()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Registers what a cancel of the request calls; only before the task is queued."""
        self._request.on_cancel(callback)

    @property
    def is_resumable(self) -> bool:
        return self._deltas is not None

    def take_known_pieces(self) -> tuple[Piece, ...]:
        """What the responses before were made of, which its tasks must make again before they go on; once."""
        pieces, self._known_pieces = self._known_pieces, ()
        return pieces

    def send(self, outputs: Sequence[Tensor], piece: Piece | None = None) -> None:
        """Sends one response; others of its task follow. piece: of its delta, as for the other methods."""
        with self._lock:
            self._send_counted(outputs, _NONE, () if piece is None else (piece,))

    def end(self, choice: Choice, times: TaskTimes) -> None:
        """Sends the last response of a task."""
        with self._lock:
            self._send(choice.outputs, self._last_flags(), times, choice.pieces)

    def fail(self, error: TritonError, times: TaskTimes, piece: Piece | None = None) -> None:
        """Ends a task with an error in place of its last response."""
        with self._lock:
            self._send_error(error, self._last_flags(), times, () if piece is None else (piece,))

    def count_end(self, usage: TaskUsage, reason: str) -> None:
        """One of the tasks has ended; the last one tells those who watch that the request has."""
        with self._lock:
            self._usages.append(usage)
            if len(self._usages) < self._num_tasks or not self.activity.kinds:
                return
        prompt_tokens, cached_tokens, output_tokens, num_preemptions = map(sum, zip(*self._usages, strict=True))
        self.activity.report(
            RequestEnded(
                RequestEnd(
                    request=self.number,
                    time=time.time(),
                    finish_reason=reason,
                    prompt_tokens=prompt_tokens,
                    cached_tokens=min(cached_tokens, prompt_tokens),
                    output_tokens=output_tokens,
                    num_preemptions=num_preemptions,
                )
            )
        )

    def _send(
        self, outputs: Sequence[Tensor], flags: ResponseFlag, times: TaskTimes, pieces: tuple[Piece, ...]
    ) -> None:
        self._send_counted(outputs, flags, pieces)
        self._release_after(flags, times)

    def _send_counted(self, outputs: Sequence[Tensor], flags: ResponseFlag, pieces: tuple[Piece, ...]) -> None:
        """Sends a response and reports its statistics: once per token."""
        factory, start_ns, output_start_ns = self._factory, self._response_start_ns, time.monotonic_ns()
        if self._deltas is None:
            factory.send(outputs, flags)
        elif self._deltas.skips():
            self._send_flags(flags)
            return
        else:
            factory.send(outputs, flags, self._deltas.delta(pieces))
        self._response_start_ns = end_ns = time.monotonic_ns()
        self._instance.report_response_statistics(factory, start_ns, output_start_ns, end_ns)

    def _send_flags(self, flags: ResponseFlag) -> None:
        """In place of a response that its receiver has."""
        if flags is not _NONE:
            self._factory.send_flags(flags)

    def _send_error(self, error: TritonError, flags: ResponseFlag, times: TaskTimes, pieces: tuple[Piece, ...]) -> None:
        self._has_failed = True
        if self._deltas is not None and self._deltas.skips():
            self._send_flags(flags)
            self._release_after(flags, times)
            return
        error = self._client_error(error)
        delta = b"" if self._deltas is None else self._deltas.delta(pieces)
        self._factory.new_response().send(flags, error, delta)
        start_ns, self._response_start_ns = self._response_start_ns, time.monotonic_ns()
        end_ns = self._response_start_ns
        self._instance.report_response_statistics(self._factory, start_ns, end_ns, end_ns, error)
        self._release_after(flags, times)

    def _last_flags(self) -> ResponseFlag:
        """The flags of the last response of a task: FINAL when no other task is live."""
        self._num_live -= 1
        return _NONE if self._num_live else _FINAL

    def _release_after(self, flags: ResponseFlag, times: TaskTimes) -> None:
        """After the final response: reports statistics, releases the request and closes the factory."""
        if not flags & ResponseFlag.FINAL:
            return
        end_ns = time.monotonic_ns()
        phase_times = (times.exec_start_ns, times.compute_start_ns, times.last_token_ns or end_ns, end_ns)
        self._instance.report_statistics(self._request, not self._has_failed, *phase_times)
        if not self._has_failed:
            self._instance.report_batch_statistics(self._num_prompts, *phase_times)
        self._request.release()
        self._factory.close()
