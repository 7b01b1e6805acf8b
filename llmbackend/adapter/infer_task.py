"""InferTask: one generation's whole life outside the engine.

For: turning engine outputs into the answer of a request. Does not know: tensors, other generations, queues, the engine.
Invariant: it ends its part of the answer exactly once. With the InferRequest and the tokens so far it holds all that
another engine needs to go on. Name and role are MindIE's.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from llmbackend.core.backend_api import Tenant, TritonError
from llmbackend.engine.infer_request import InferRequest, StepOutput
from llmbackend.engine.transport import DeathKind
from llmbackend.waiting.timer import Alarm

from .answer import Answer
from .output_assembler import OutputAssembler
from .task_times import TaskTimes
from .tensor_schema import Reply


class InferTask:
    """Owner of `_finished` and everything below it: the map of ModelState. A task is popped from the map before `fail`
    or the last `deliver`, so one thread at a time uses it."""

    def __init__(
        self,
        answer: Answer,
        infer_request: InferRequest,
        assembler: OutputAssembler,
        reply: Reply,
        *,
        stream: bool,
        times: TaskTimes,
        kv_block_size: int = 1,
        makes_drafts: bool = False,
    ) -> None:
        """Attributes that others own, under the TaskMap's lock: is_delayed (TaskQueue), is_suspect and trial_deaths
        (Probation). lost_ns: when the engine that had it died, until the next output; 0 otherwise. alarms: what its
        deadlines have set."""
        self.infer_request = infer_request
        self.output_token_ids: list[int] = []
        self.assembler = assembler
        self.times = times
        self.timeout_us = answer.timeout_us
        self.is_delayed = False
        self.is_suspect = False
        self.trial_deaths: list[DeathKind] = []
        self.lost_ns = 0
        self.alarms: list[Alarm] = []
        self.makes_drafts = makes_drafts
        self._kv_block_size = kv_block_size
        self._num_cached_tokens: int | None = None
        self._answer = answer
        self._reply = reply
        self._stream = stream
        self._finished = False

    @property
    def request_id(self) -> str:
        return self.infer_request.request_id

    @property
    def client_id(self) -> str:
        """The id that the client gave its request, which need not be unique; "" when it gave none."""
        return self._answer.client_id

    @property
    def tenant(self) -> Tenant:
        """Whose request it is."""
        return self._answer.tenant

    @property
    def lane(self) -> tuple[int, bool]:
        """Its place in the order of the queue: priority level first, then whether it waited too long."""
        return self.infer_request.priority, self.is_delayed

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.infer_request.prompt_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, as the first engine said that had it."""
        return self._num_cached_tokens or 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_kv_blocks(self) -> int:
        """Those that its tokens so far fill; the last token needs no room before the next one is computed."""
        return -(-(self.num_prompt_tokens + max(self.num_output_tokens - 1, 0)) // self._kv_block_size)

    @property
    def num_reused_kv_blocks(self) -> int:
        """Of its prompt, found in the prefix cache of the first engine that had it."""
        return self.num_cached_tokens // self._kv_block_size

    @property
    def finish_reason(self) -> str | None:
        """Why the generation ended; None while it goes on."""
        return self.assembler.finish_reason

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Registers what a cancel of the request calls; only before the task is queued."""
        self._answer.on_cancel(callback)

    def resume_request(self) -> InferRequest:
        """The request with which an engine goes on after the tokens so far."""
        if not self.output_token_ids:
            return self.infer_request
        return msgspec.structs.replace(self.infer_request, output_token_ids=tuple(self.output_token_ids))

    def take_in(self, output: StepOutput, now_ns: int) -> None:
        """Takes one step's output in; `finish_reason` says afterwards whether it was the last."""
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        tokens = self.assembler.push(output)
        self.output_token_ids.extend(tokens)
        if tokens:
            self.times.first_token_ns = self.times.first_token_ns or now_ns
            self.times.last_token_ns = now_ns

    def deliver(self) -> None:
        """Sends what there is to send: in a stream whenever there is something to show, otherwise at the end."""
        if self.finish_reason is not None:
            tensors = self._reply.tensors(self.assembler.take(), self)
            self._finished = True
            self._answer.send(tensors, self.times, is_last=True)
        elif self._stream and self._reply.is_due(self):
            self._answer.send(self._reply.tensors(self.assembler.take(), self), self.times, is_last=False)

    def fail(self, error: TritonError) -> None:
        """Ends the generation with `error`; does nothing when it has ended."""
        if not self._finished:
            self._finished = True
            self._answer.fail(error, self.times)
