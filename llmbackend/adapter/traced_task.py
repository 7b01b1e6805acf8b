"""Traced generations: what became of them, as spans below their request's, and attributes of OpenTelemetry's GenAI
conventions.

For: the request converter, which makes a TracedInferTask in place of an InferTask where the request is traced. Does not
know: where traces go. Invariant: no text and no token goes into a trace.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from llmbackend.core.backend_api import Attributes, ErrorCode, RequestTrace, SpanEvent, TraceSpan, TritonError
from llmbackend.engine.errors import DeathKind
from llmbackend.engine.messages import RequestEvent, SamplingParams, StepOutput

from .infer_task import InferTask

PROVIDER: Final = "llmbackend"
MAX_EVENTS: Final = 512
"""Of one generation; later ones are not recorded."""


class RequestSpans:
    """The trace of one request, which its generations share; their engines' loops may call at the same time."""

    def __init__(
        self, trace: RequestTrace, operation: str, sampling: SamplingParams, num_choices: int, num_generations: int
    ) -> None:
        """operation: GenAI's name of it, `chat` or `text_completion`. num_choices: that the client gets of a prompt."""
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
        """grammar_ns: when the host began and ended to check the request's grammar; None = it has none."""
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
    """A task that remembers what became of it, and tells its request's trace before its last response."""

    __slots__ = ("_causes", "_events", "_num_steps", "_recoveries", "_spans")

    def __init__(self, spans: RequestSpans, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._spans = spans
        self._events: list[RequestEvent] = []
        self._causes: list[DeathKind] = []
        self._recoveries: list[TraceSpan] = []
        self._num_steps = 0

    def engine_told(self, event: RequestEvent) -> None:
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
        if (reason := self.finish_reason) is not None and not self._finished:
            self._tell(reason)
        super().respond()

    def fail(self, error: TritonError) -> None:
        if not self._finished:
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
            "input_tokens": 0 if self._choice else self.num_prompt_tokens,
            "cache_read.input_tokens": 0 if self._choice else self.num_cached_tokens,
            "output_tokens": self.num_new_tokens,
        }
        self._spans.ended([*self._phases(time.monotonic_ns()), *self._recoveries], usage, finish_reason)

    def _phases(self, now_ns: int) -> Iterator[TraceSpan]:
        """Each phase that began, up to `now_ns` where it has not ended."""
        times, begin_ns = self.times, self._begin_ns()
        yield TraceSpan("queue", times.compute_start_ns, begin_ns or now_ns, self._which)
        yield from self._compiles(now_ns)
        if begin_ns:
            yield self._prefill(begin_ns, times.first_token_ns or now_ns)
        if times.first_token_ns:
            yield self._decode(times.first_token_ns, times.last_token_ns)
        yield from self._preemptions(now_ns)

    def _begin_ns(self) -> int:
        """When an engine began to compute it; 0 = none has."""
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

    def _compiles(self, now_ns: int) -> Iterator[TraceSpan]:
        yield from self._between("compile grammar", "compile", ("compiled",), now_ns, {})

    def _preemptions(self, now_ns: int) -> Iterator[TraceSpan]:
        reason = {"llmbackend.reason": "no free KV blocks"}
        yield from self._between("preemption", "preempted", ("prefill", "recompute"), now_ns, reason)

    def _between(
        self, name: str, first: str, last: Sequence[str], now_ns: int, attributes: dict[str, str]
    ) -> Iterator[TraceSpan]:
        """A span from each event `first` to the next one of `last`."""
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
    """As they hold, also where the client did not say."""
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
