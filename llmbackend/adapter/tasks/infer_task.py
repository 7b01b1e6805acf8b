"""InferTask: one generation, from its InferRequest to its last response, and its part of a trace.

Turns an engine's outputs into responses. Independent of tensors, other generations, queues, the engine, and where
traces go. Invariants: it ends its part of the request exactly once. It contains everything that another engine needs in
order to continue: the InferRequest and the tokens so far. Traces contain neither text nor tokens; their attributes
follow OpenTelemetry's GenAI conventions. Name and role are MindIE's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from llmbackend.core.backend_api import Attributes, ErrorCode, RequestTrace, SpanEvent, TraceSpan, TritonError
from llmbackend.engine.errors import DeathKind
from llmbackend.engine.messages import InferRequest, RequestEvent, SamplingParams, StepOutput
from llmbackend.waiting.timer import Alarm

from ..lora import NO_ADAPTER, AdapterHandle
from ..requests.response_sender import Choice, ResponseSender, TaskUsage
from ..requests.resuming import PieceRecord
from ..schemas.schema import Reply, TaskTimes
from ..text.output_assembler import OutputAssembler
from .placement import PlacementState


class InferTask:
    """A task is popped from the TaskMap before `fail` or the last `respond`, so only one thread at a time uses it."""

    # Slots, as in all objects on a token's path: after the pause between steps, they are no longer in the CPU's caches.
    __slots__ = (
        "_adapter", "_choice", "_num_cached_tokens", "_num_prior_tokens",
        "_num_prompt_logprobs", "_record", "_reply", "_stream", "alarms", "assembler", "has_ended", "infer_request",
        "is_counted", "is_delayed", "is_suspect", "isolated_deaths", "kv_block_size", "lost_ns",
        "num_accepted_draft_tokens", "num_draft_tokens", "num_preemptions", "output_token_ids", "placement", "sender",
        "times",
    )  # fmt: skip

    def __init__(
        self,
        sender: ResponseSender,
        infer_request: InferRequest,
        assembler: OutputAssembler,
        reply: Reply,
        *,
        stream: bool,
        times: TaskTimes,
        kv_block_size: int = 1,
        choice: int = 0,
        prior_output_ids: Sequence[int] = (),
        adapter: AdapterHandle = NO_ADAPTER,
        record: PieceRecord | None = None,
    ) -> None:
        """choice: index among the generations of its prompt
        kv_block_size: tokens per block of the engines' KV cache
        prior_output_ids: output tokens that its client already has; `assembler` has replayed them
        adapter: stays loaded as long as the task exists
        record: for the deltas of a resumable request
        """
        self.sender = sender
        """Shared with the request's other tasks."""
        self.infer_request = infer_request
        self.output_token_ids = list(prior_output_ids)
        self.assembler = assembler
        self.times = times
        self.is_delayed = False
        """Owner: TaskMap. Whether it has waited longer than its level's timeout."""
        self.is_suspect = False
        """Owner: FaultIsolation. Whether an engine died before this request was proven harmless."""
        self.isolated_deaths: list[DeathKind] = []
        """Owner: FaultIsolation. Deaths of engines that had no other unproven request."""
        self.lost_ns = 0
        """Owner: TaskMap. When it lost its engine; 0 = it has one, or never had one."""
        self.placement: PlacementState | None = None
        """Owner: TaskMap, once queued. Set if there are several engines."""
        self.alarms: list[Alarm] = []
        """For its deadlines."""
        self.num_preemptions = 0
        """Counted while a client is watching."""
        self.num_draft_tokens = self.num_accepted_draft_tokens = 0
        self._adapter = adapter
        self._record = record
        self._choice = choice
        self._num_prior_tokens = len(prior_output_ids)
        self.kv_block_size = kv_block_size
        self._num_cached_tokens: int | None = None
        self._num_prompt_logprobs = 0
        self._reply = reply
        self._stream = stream
        self.has_ended = False
        """Whether its last response has been created."""
        self.is_counted = False
        """Owner: ModelState. Whether it has been counted as finished."""

    @property
    def request_id(self) -> str:
        return self.infer_request.request_id

    @property
    def lora_name(self) -> str:
        """The clients' name for the adapter; "" = none."""
        return self._adapter.name

    @property
    def lane(self) -> tuple[int, bool]:
        """Its position class in the queue: priority level, then whether it is delayed."""
        return self.infer_request.priority, self.is_delayed

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.infer_request.prompt_token_ids)

    @property
    def num_own_prompt_tokens(self) -> int:
        """0 if another task of its request has the same prompt and counts it."""
        return 0 if self._choice else self.num_prompt_tokens

    @property
    def num_own_choices(self) -> int:
        """How many choices of the prompt its client gets; 0 if another task of the prompt counts them."""
        return 0 if self._choice else self.sender.num_choices

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache of the first engine."""
        return self._num_cached_tokens or 0

    @property
    def num_own_cached_tokens(self) -> int:
        """0 if another task of its request has the same prompt: this one's come from that task."""
        return 0 if self._choice else self.num_cached_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Excludes the tokens that its client had before."""
        return len(self.output_token_ids) - self._num_prior_tokens

    @property
    def finish_reason(self) -> str | None:
        """Why the generation ended; None while it continues."""
        return self.assembler.finish_reason

    def resume_request(self) -> InferRequest:
        """The request with which an engine continues after the tokens so far."""
        if not self.output_token_ids and not self._num_prompt_logprobs:
            return self.infer_request
        return msgspec.structs.replace(
            self.infer_request,
            output_token_ids=tuple(self.output_token_ids),
            num_prompt_logprobs=self._num_prompt_logprobs,
        )

    def add_output(self, output: StepOutput, now_ns: int) -> None:
        """Adds one step's output; afterwards `finish_reason` tells whether it was the last."""
        if self._record is not None:
            self._record.add(output)
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs:
            self._num_prompt_logprobs += len(output.prompt_logprobs)
            self._reply.add_prompt_logprobs(output.prompt_logprobs)
        if output.num_draft_tokens:
            self.num_draft_tokens += output.num_draft_tokens
            self.num_accepted_draft_tokens += len(output.token_ids) - 1
        tokens = self.assembler.push(output)
        self.output_token_ids.extend(tokens)
        if tokens:
            times = self.times
            times.last_token_ns = now_ns
            if not times.first_token_ns:
                times.first_token_ns = now_ns

    def repeat_output(self, output: StepOutput) -> None:
        """Adds an output that was computed before, for a response that its client may already have."""
        InferTask.add_output(self, output, 0)
        self._num_prior_tokens = len(self.output_token_ids)

    def engine_reported(self, event: RequestEvent) -> None:
        """Called when an engine's step has worked on it; for traced tasks."""

    def engine_died(self, cause: DeathKind) -> None:
        """Called when the task goes back into the queue."""

    def count_end(self, reason: str) -> None:
        """Called when the generation has ended, before its last response."""
        self.sender.count_end(
            TaskUsage(
                self.num_own_prompt_tokens, self.num_own_cached_tokens, self.num_new_tokens, self.num_preemptions
            ),
            reason,
        )

    def respond(self) -> None:
        """Sends a response if one is due: at the end, and in a stream also whenever there are tokens or text. Logprobs
        of prompt tokens wait for them: they are sent together."""
        assembler = self.assembler
        if assembler.finish_reason is not None:
            outputs = self._reply.outputs(assembler.take(), self)
            self.has_ended = True
            pieces = () if self._record is None else (self._record.take(),)
            self.sender.end(Choice(self._choice, assembler.cumulative_logprob, outputs, pieces), self.times)
        elif self._stream and (assembler.chunk.text or (assembler.chunk.token_ids and not self._reply.waits_for_text)):
            outputs = self._reply.outputs(assembler.take(), self)
            self.sender.send(outputs, None if self._record is None else self._record.take())

    def fail(self, error: TritonError) -> None:
        """Ends the generation with `error`, unless it has ended."""
        if not self.has_ended:
            self.has_ended = True
            self.sender.fail(error, self.times, None if self._record is None else self._record.failed(error))


PROVIDER: Final = "llmbackend"
MAX_EVENTS: Final = 512
"""Maximum number of recorded events per generation."""


class RequestSpans:
    """The trace of one request. Thread-safe, because the request's generations may be on several engines' loops."""

    def __init__(
        self, trace: RequestTrace, operation: str, sampling: SamplingParams, num_choices: int, num_generations: int
    ) -> None:
        """operation: GenAI's name for it, `chat` or `text_completion`. num_choices: choices per prompt."""
        self._trace = trace
        self._lock = threading.Lock()
        self._finish_reasons: list[str] = []
        self._usage = {"input_tokens": 0, "cache_read.input_tokens": 0, "output_tokens": 0}
        self.num_generations = num_generations
        trace.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": trace.model_name,
                "gen_ai.response.model": trace.model_name,
                **_request_attributes(sampling),
                **({"gen_ai.request.choice.count": num_choices} if num_choices > 1 else {}),
            }
        )

    def converted(self, start_ns: int, end_ns: int, grammar_ns: tuple[int, int] | None) -> None:
        """grammar_ns: when the host began and ended checking the request's grammar; None = no grammar."""
        self._trace.add_span(TraceSpan("prepare", start_ns, end_ns))
        if grammar_ns is not None:
            self._trace.add_span(TraceSpan("check grammar", *grammar_ns))

    def ended(self, spans: Sequence[TraceSpan], usage: dict[str, int], finish_reason: str) -> None:
        """One generation has ended."""
        with self._lock:
            for span in spans:
                self._trace.add_span(span)
            self._finish_reasons.append(finish_reason)
            for name, count in usage.items():
                self._usage[name] += count
            self._trace.set_attributes(
                {
                    "gen_ai.response.finish_reasons": tuple(self._finish_reasons),
                    **{f"gen_ai.usage.{name}": count for name, count in self._usage.items()},
                }
            )


class TracedInferTask(InferTask):
    """A task that records its phases and adds them to its request's trace before its last response."""

    __slots__ = ("_causes", "_events", "_num_steps", "_recoveries", "_spans")

    def __init__(self, spans: RequestSpans, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._spans = spans
        self._events: list[RequestEvent] = []
        self._causes: list[DeathKind] = []
        self._recoveries: list[TraceSpan] = []
        self._num_steps = 0

    def engine_reported(self, event: RequestEvent) -> None:
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)

    def engine_died(self, cause: DeathKind) -> None:
        self._causes.append(cause)

    def add_output(self, output: StepOutput, now_ns: int) -> None:
        if output.token_ids:
            self._num_steps += 1
        if self.lost_ns:
            self._recoveries.append(self._recovery(now_ns))
        super().add_output(output, now_ns)

    def respond(self) -> None:
        if (reason := self.finish_reason) is not None and not self.has_ended:
            self._tell(reason)
        super().respond()

    def fail(self, error: TritonError) -> None:
        if not self.has_ended:
            if self.lost_ns:
                self._recoveries.append(self._recovery(time.monotonic_ns(), is_error=True))
            self._tell("abort" if error.code is ErrorCode.CANCELLED else "error")
        super().fail(error)

    def _recovery(self, now_ns: int, is_error: bool = False) -> TraceSpan:
        causes, self._causes = self._causes, []
        attributes: Attributes = {
            **self._which,
            "llmbackend.causes": tuple(causes),
            "llmbackend.output_tokens": self.num_output_tokens,
        }
        return TraceSpan("recovery", self.lost_ns, now_ns, attributes, is_error=is_error)

    @property
    def _which(self) -> dict[str, int]:
        return {"llmbackend.choice": self._choice} if self._spans.num_generations > 1 else {}

    def _tell(self, finish_reason: str) -> None:
        usage = {
            "input_tokens": self.num_own_prompt_tokens,
            "cache_read.input_tokens": self.num_own_cached_tokens,
            "output_tokens": self.num_new_tokens,
        }
        self._spans.ended([*self._phases(time.monotonic_ns()), *self._recoveries], usage, finish_reason)

    def _phases(self, now_ns: int) -> Iterator[TraceSpan]:
        """Each phase that has begun, up to `now_ns` if it has not ended."""
        times, begin_ns = self.times, self._begin_ns()
        yield TraceSpan("queue", times.compute_start_ns, begin_ns or now_ns, self._which)
        yield from self._between("compile grammar", "compile", ("compiled",), now_ns, {})
        if begin_ns:
            yield self._prefill(begin_ns, times.first_token_ns or now_ns)
        if times.first_token_ns:
            yield self._decode(times.first_token_ns, times.last_token_ns)
        reason = {"llmbackend.reason": "no free KV blocks"}
        yield from self._between("preemption", "preempted", ("prefill", "recompute"), now_ns, reason)

    def _begin_ns(self) -> int:
        """When an engine began to compute it; 0 = not yet."""
        chunks = (event.time_ns for event in self._events if event.name in ("prefill", "recompute"))
        return next(chunks, self.times.taken_ns if self.times.first_token_ns else 0)

    def _prefill(self, start_ns: int, end_ns: int) -> TraceSpan:
        chunks = [event for event in self._events if event.name == "prefill"]
        attributes = {
            **self._which,
            "llmbackend.prompt_tokens": self.num_prompt_tokens,
            "llmbackend.cached_tokens": self.num_cached_tokens,
            "llmbackend.chunks": len(chunks),
        }
        events = [SpanEvent("chunk", event.time_ns, {"llmbackend.tokens": event.num_tokens}) for event in chunks]
        return TraceSpan("prefill", start_ns, end_ns, attributes, events)

    def _decode(self, start_ns: int, end_ns: int) -> TraceSpan:
        attributes = {
            **self._which,
            "llmbackend.output_tokens": self.num_new_tokens,
            "llmbackend.steps": self._num_steps,
        }
        return TraceSpan("decode", start_ns, end_ns, attributes)

    def _between(
        self, name: str, first: str, last: Sequence[str], now_ns: int, attributes: dict[str, str]
    ) -> Iterator[TraceSpan]:
        """A span from each event `first` to the next event in `last`."""
        start_ns = 0
        for event in self._events:
            if event.name == first:
                start_ns = event.time_ns
            elif start_ns and event.name in last:
                yield TraceSpan(name, start_ns, event.time_ns, {**self._which, **attributes})
                start_ns = 0
        if start_ns:
            yield TraceSpan(name, start_ns, now_ns, {**self._which, **attributes})


def _request_attributes(sampling: SamplingParams) -> dict[str, int | float]:
    """The effective parameters, including defaults."""
    found: dict[str, int | float] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "seed": sampling.seed,
    }
    if sampling.top_k:
        found["top_k"] = float(sampling.top_k)
    return {f"gen_ai.request.{name}": value for name, value in found.items()}
