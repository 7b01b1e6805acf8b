"""Sends the responses of all tasks of one Triton request: as they are produced, or all choices of a prompt together.

Used by InferTask; a request with a batch of prompts has a task for each. Independent of tokens, tensor names and
queues. Invariant: exactly one FINAL, when the last task ends; then, once and in this order, statistics, release and
closing the factory. A failing task does not affect the others, unless they are sent together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from llmbackend.core.activity.messages import RequestEnd, RequestEnded
from llmbackend.core.backend_api import ModelInstance, Request, ResponseFlag, Tensor, TritonError

from ..schemas.schema import PROMPT_OUTPUTS, SEQUENCE_INDEX, TaskTimes
from .resuming import DeltaWriter, Piece, ResumeState

_NONE, _FINAL = ResponseFlag.NONE, ResponseFlag.FINAL


@dataclass(frozen=True, slots=True)
class Choice:
    """The last response of a task.

    index               the task's index among those of its prompt
    cumulative_logprob  of its tokens, if logprobs were requested
    pieces              of its delta: one, if the request is resumable
    """

    index: int
    cumulative_logprob: float
    outputs: Sequence[Tensor]
    pieces: tuple[Piece, ...] = ()


class TaskUsage(NamedTuple):
    """Token counts of a task. prompt_tokens, cached_tokens: 0 if another task of its request has the same prompt."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    num_preemptions: int


class ResponseSender:
    """`_lock`: the tasks of a batch may be on several engines, whose loops send concurrently."""

    def __init__(
        self,
        request: Request,
        instance: ModelInstance,
        exec_start_ns: int,
        client_error: Callable[[TritonError], TritonError],
        num_tasks: int = 1,
        num_prompts: int = 1,
        resume_state: ResumeState | None = None,
        num_choices: int = 1,
    ) -> None:
        """client_error: gives an error the text that the client expects
        num_prompts: the request's batch size
        num_choices: choices per prompt that the client gets
        resume_state: set if the request is resumable; has the seeds of its prompts
        """
        self.client_id = request.id
        self.number = request.number
        self.activity = instance.activity
        """The instance that has the request now."""
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
        """Of the finished tasks."""
        self._num_tasks = num_tasks
        self._has_failed = False
        self._earlier_pieces: tuple[Piece, ...] = () if resume_state is None else resume_state.pieces
        self._deltas = None if resume_state is None else DeltaWriter(resume_state.seeds, resume_state.num_to_skip)
        self._response_start_ns = exec_start_ns
        self._lock = threading.Lock()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Registers a callback for the request's cancellation. To be called before the task is queued."""
        self._request.on_cancel(callback)

    @property
    def is_resumable(self) -> bool:
        return self._deltas is not None

    def take_earlier_pieces(self) -> tuple[Piece, ...]:
        """The pieces of the responses that its tasks must recreate before they continue. Can be taken once."""
        pieces, self._earlier_pieces = self._earlier_pieces, ()
        return pieces

    def send(self, outputs: Sequence[Tensor], piece: Piece | None = None) -> None:
        """Sends one response, not the last one of its task. piece: the generation's part of the response's delta."""
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

    def take_useless(self) -> Sequence[str]:
        """Ids of the tasks whose output is not needed because another one failed. Can be taken once."""
        return ()

    def count_end(self, usage: TaskUsage, reason: str) -> None:
        """Counts a finished task. After the last one, the end of the request is reported to watching clients."""
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
                    cached_tokens=cached_tokens,
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
        """Sends a response and reports its statistics; called once per token."""
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
        """Replaces a response that its receiver already has."""
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
        """The flags of a task's last response: FINAL if no other task is live."""
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


class CollectedChoices(ResponseSender):
    """Holds back the choices of one prompt until all have ended, ranks them, and sends them whole: joined in one
    response, or as one response per choice.

    Their order depends only on their cumulative logprobs and indices. If a choice fails, the request fails once all
    choices have ended; the others are to be stopped (`take_useless`).
    """

    def __init__(self, *arguments: Any, joins: bool, of_prompt: frozenset[str]) -> None:
        """arguments: as for ResponseSender; if resumable, the first response's delta contains all choices
        joins: whether all choices go into one response
        of_prompt: outputs that describe the prompt: those of the first choice are sent, once in a joined response
        """
        super().__init__(*arguments)
        self._is_ranked = self.num_choices < self._num_tasks
        self._joins = joins
        self._of_prompt = of_prompt
        self._ended: list[Choice] = []
        self._error: TritonError | None = None
        self._failed: tuple[Piece, ...] = ()
        """The piece of the first choice that failed, if any."""
        self._is_useless_taken = False

    def take_useless(self) -> Sequence[str]:
        with self._lock:
            if self._error is None or self._is_useless_taken or not self._num_live:
                return ()
            self._is_useless_taken = True
            return [str(self.number), *(f"{self.number}.{index}" for index in range(1, self._num_tasks))]

    def end(self, choice: Choice, times: TaskTimes) -> None:
        with self._lock:
            self._ended.append(choice)
            self._send_all_after(self._last_flags(), times)

    def fail(self, error: TritonError, times: TaskTimes, piece: Piece | None = None) -> None:
        with self._lock:
            self._error = self._error or error
            self._failed = self._failed or (() if piece is None else (piece,))
            self._send_all_after(self._last_flags(), times)

    def _send_all_after(self, flags: ResponseFlag, times: TaskTimes) -> None:
        if not flags & ResponseFlag.FINAL:
            return
        if self._error is not None:
            self._send_error(self._error, flags, times, self._failed)
            return
        *others, last = self._responses()
        pieces = tuple(piece for choice in self._ended for piece in choice.pieces)
        for outputs in others:
            self._send(outputs, ResponseFlag.NONE, times, pieces)
            pieces = ()
        self._send(last, flags, times, pieces)

    def _responses(self) -> list[list[Tensor]]:
        choices = sorted(self._ended, key=self._rank)[: self.num_choices]
        # The prompt's are those of the first choice, which may not be among the best: others find it in the cache.
        first = min(self._ended, key=lambda choice: choice.index).outputs
        of_prompt = {tensor.name: tensor for tensor in first if tensor.name in self._of_prompt}
        numbered = [_numbered(choice.outputs, index, of_prompt) for index, choice in enumerate(choices)]
        numbered[0] += [tensor for tensor in first if tensor.name in PROMPT_OUTPUTS]
        return [joined(numbered, self._of_prompt)] if self._joins else numbered

    def _rank(self, choice: Choice) -> tuple[float, int]:
        return -choice.cumulative_logprob if self._is_ranked else 0.0, choice.index


def joined(choices: Sequence[Sequence[Tensor]], of_prompt: frozenset[str]) -> list[Tensor]:
    """Each output of all choices concatenated; those in `of_prompt` only once."""
    names = [tensor.name for tensor in choices[0]]
    by_name = [{tensor.name: tensor for tensor in tensors} for tensors in choices]
    return [
        by_name[0][name] if name in of_prompt else _concatenated([tensors[name] for tensors in by_name])
        for name in names
    ]


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    data = np.concatenate([part.data for part in parts])
    return Tensor(parts[0].name, parts[0].datatype, tuple(data.shape), data)


def _numbered(tensors: Sequence[Tensor], index: int, of_prompt: Mapping[str, Tensor]) -> list[Tensor]:
    """The outputs of a choice with this index and those of the prompt, without PROMPT_OUTPUTS."""
    return [
        Tensor.of(tensor.name, np.full_like(tensor.data, index))
        if tensor.name == SEQUENCE_INDEX
        else of_prompt.get(tensor.name, tensor)
        for tensor in tensors
        if tensor.name not in PROMPT_OUTPUTS
    ]
