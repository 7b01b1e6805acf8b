"""InferTask: one request's whole life outside the engine.

For: turning engine outputs into Triton responses, and a request's end into statistics and release. Does not know:
queues, other requests, the engine. Invariant: exactly one FINAL, then statistics, release and the factory's end, in
this order, once. With the InferRequest and the tokens so far it holds all that another engine needs to go on. Name and
role are MindIE's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from llmbackend.core.backend_api import ModelInstance, Request, ResponseFlag, Tensor, TritonError
from llmbackend.engine.infer_request import InferRequest, StepOutput, TokenLogprobs
from llmbackend.engine.transport import DeathKind
from llmbackend.waiting.timer import Alarm

from .output_assembler import Chunk, OutputAssembler
from .tensor_interface import OutputOptions

_encode_json = msgspec.json.encode


@dataclass(slots=True)
class TaskTimes:
    """time.monotonic_ns() of a request's stations; 0 = not reached."""

    exec_start_ns: int
    compute_start_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0


class InferTask:
    """Owner of `_finished` and everything below it: the map of ModelState. A task is popped from the map before `fail`
    or the last `deliver`, so one thread at a time uses it."""

    def __init__(
        self,
        request: Request,
        instance: ModelInstance,
        infer_request: InferRequest,
        assembler: OutputAssembler,
        options: OutputOptions,
        *,
        prompt_text: str,
        wants_logprobs: bool,
        token_text: Callable[[int], str],
        times: TaskTimes,
    ) -> None:
        """prompt_text: what is prepended to the first text, "" for nothing. wants_logprobs: `logprobs` was asked for.

        Attributes that others own, under the TaskMap's lock: is_delayed (TaskQueue), is_suspect and trial_deaths
        (Probation). lost_ns: when the engine that had it died, until the next output; 0 otherwise. alarms: what its
        deadlines have set. num_cached_tokens: of the prompt, as the first engine said that had it."""
        self.infer_request = infer_request
        self.output_token_ids: list[int] = []
        self.num_cached_tokens: int | None = None
        self.times = times
        self.timeout_us = request.timeout_us
        self.is_delayed = False
        self.is_suspect = False
        self.trial_deaths: list[DeathKind] = []
        self.lost_ns = 0
        self.alarms: list[Alarm] = []
        self._request = request
        self._instance = instance
        self._factory = request.response_factory()
        self._assembler = assembler
        self._options = options
        self._prompt_text = prompt_text
        self._wants_logprobs = wants_logprobs
        self._token_text = token_text
        self._response_start_ns = times.exec_start_ns
        self._finished = False

    @property
    def request_id(self) -> str:
        return self.infer_request.request_id

    @property
    def lane(self) -> tuple[int, bool]:
        """Its place in the order of the queue: priority level first, then whether it waited too long."""
        return self.infer_request.priority, self.is_delayed

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.infer_request.prompt_token_ids)

    @property
    def finish_reason(self) -> str | None:
        """Why the generation ended; None while it goes on."""
        return self._assembler.finish_reason

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Registers what a cancel of the request calls; only before the task is queued."""
        self._request.on_cancel(callback)

    def resume_request(self) -> InferRequest:
        """The request with which an engine goes on after the tokens so far."""
        if not self.output_token_ids:
            return self.infer_request
        return msgspec.structs.replace(self.infer_request, output_token_ids=tuple(self.output_token_ids))

    def take_in(self, output: StepOutput, now_ns: int) -> None:
        """Takes one step's output in; `finish_reason` says afterwards whether it was the last."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
        tokens = self._assembler.push(output)
        self.output_token_ids.extend(tokens)
        if tokens:
            self.times.first_token_ns = self.times.first_token_ns or now_ns
            self.times.last_token_ns = now_ns

    def deliver(self) -> None:
        """Sends what there is to send: in a stream whenever there is something to show, otherwise at the end."""
        if self.finish_reason is not None:
            tensors = self._tensors(self._assembler.take())
            self._finished = True
            self._send(tensors, ResponseFlag.FINAL)
            self._give_back(success=True)
        elif self._options.stream and self._has_something_to_show():
            self._send(self._tensors(self._assembler.take()), ResponseFlag.NONE)

    def fail(self, error: TritonError) -> None:
        """Answers with `error` and ends the request; does nothing when it has ended."""
        if self._finished:
            return
        self._finished = True
        start_ns = self._response_start_ns
        self._factory.new_response().send(ResponseFlag.FINAL, error)
        now_ns = time.monotonic_ns()
        self._instance.report_response_statistics(self._factory, start_ns, now_ns, now_ns, error)
        self._give_back(success=False)

    def _has_something_to_show(self) -> bool:
        """A chunk whose text is still held back waits for it, so that text and tokens of a chunk belong together."""
        return self._assembler.has_text or "text_output" not in self._options.outputs

    def _send(self, tensors: Sequence[Tensor], flags: ResponseFlag) -> None:
        output_start_ns = time.monotonic_ns()
        response = self._factory.new_response()
        for tensor in tensors:
            response.add_output(tensor)
        response.send(flags)
        end_ns = time.monotonic_ns()
        self._instance.report_response_statistics(self._factory, self._response_start_ns, output_start_ns, end_ns)
        self._response_start_ns = end_ns

    def _tensors(self, chunk: Chunk) -> list[Tensor]:
        wanted = self._options.outputs
        tensors: list[Tensor] = []
        if "text_output" in wanted:
            prompt, self._prompt_text = self._prompt_text, ""
            tensors.append(Tensor.text("text_output", prompt + "".join(chunk.text)))
        if len(wanted) > len(tensors):
            tensors.extend(self._additional(chunk, wanted))
        return tensors

    def _additional(self, chunk: Chunk, wanted: frozenset[str]) -> list[Tensor]:
        tensors: list[Tensor] = []
        if "finish_reason" in wanted:
            tensors.append(Tensor.text("finish_reason", str(chunk.finish_reason)))
        if "cumulative_logprob" in wanted:
            tensors.append(Tensor.of("cumulative_logprob", np.array([self._assembler.cumulative_logprob], np.float32)))
        if "logprobs" in wanted:
            tensors.append(Tensor.text("logprobs", self._logprobs_json(chunk) if self._wants_logprobs else b"null"))
        if "num_input_tokens" in wanted:
            tensors.append(Tensor.of("num_input_tokens", np.array([self.num_prompt_tokens], np.uint32)))
        if "num_output_tokens" in wanted:
            tensors.append(Tensor.of("num_output_tokens", np.array([len(chunk.token_ids)], np.uint32)))
        if "num_cached_tokens" in wanted:
            tensors.append(Tensor.of("num_cached_tokens", np.array([self.num_cached_tokens or 0], np.uint32)))
        if "output_ids" in wanted:
            tensors.append(Tensor.of("output_ids", np.array(chunk.token_ids, np.int32)))
        return tensors

    def _logprobs_json(self, chunk: Chunk) -> bytes:
        return _encode_json([self._position(entry) for entry in chunk.logprobs])

    def _position(self, entry: TokenLogprobs) -> dict[str, dict[str, object]]:
        """The sampled token first, then the most likely ones."""
        position = {str(entry.token_id): self._logprob(entry.token_id, entry.logprob, entry.rank)}
        for index, (token_id, logprob) in enumerate(entry.top):
            position.setdefault(str(token_id), self._logprob(token_id, logprob, index + 1))
        return position

    def _logprob(self, token_id: int, logprob: float, rank: int) -> dict[str, object]:
        return {"logprob": logprob, "rank": rank, "decoded_token": self._token_text(token_id)}

    def _give_back(self, *, success: bool) -> None:
        times = self.times
        exec_end_ns = time.monotonic_ns()
        stations = (times.exec_start_ns, times.compute_start_ns, times.last_token_ns or exec_end_ns, exec_end_ns)
        self._instance.report_statistics(self._request, success, *stations)
        if success:
            self._instance.report_batch_statistics(1, *stations)
        self._request.release()
        self._factory.close()
