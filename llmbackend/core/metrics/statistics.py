"""Counts and times of one model version, as Triton's statistics extension reports them.

For: the statistics RPC and the nv_* metrics, which read the same counters. Does not know: Prometheus, protocols.
Invariant: every request is counted at most once, as a success or as a failure with one reason.
Source: Triton's statistics extension and infer_stats.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from enum import Enum

from tritonclient.grpc.service_pb2 import (
    InferBatchStatistics,
    InferResponseStatistics,
    InferStatistics,
    ModelStatistics,
    StatisticDuration,
)

from .model_metrics import Summaries

PhaseTimes = tuple[int, int, int, int]
"""exec_start, compute_start, compute_end, exec_end: monotonic ns."""


class FailureReason(Enum):
    """Label values of nv_inference_request_failure, in Triton's order."""

    REJECTED = "REJECTED"
    OTHER = "OTHER"
    BACKEND = "BACKEND"
    CANCELED = "CANCELED"


@dataclass(slots=True)
class Duration:
    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        if ns > 0:
            self.ns += ns

    def write(self, message: StatisticDuration) -> None:
        message.SetInParent()
        message.count = self.count
        message.ns = self.ns


@dataclass(slots=True)
class ComputeTimes:
    """The three phases of executions: exec_start → compute_start → compute_end → exec_end."""

    count: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0

    def add(self, exec_start_ns: int, compute_start_ns: int, compute_end_ns: int, exec_end_ns: int) -> None:
        self.count += 1
        if compute_start_ns > exec_start_ns:
            self.input_ns += compute_start_ns - exec_start_ns
        if compute_end_ns > compute_start_ns:
            self.infer_ns += compute_end_ns - compute_start_ns
        if exec_end_ns > compute_end_ns:
            self.output_ns += exec_end_ns - compute_end_ns

    def write(self, message: InferStatistics | InferBatchStatistics) -> None:
        Duration(self.count, self.input_ns).write(message.compute_input)
        Duration(self.count, self.infer_ns).write(message.compute_infer)
        Duration(self.count, self.output_ns).write(message.compute_output)


@dataclass(slots=True)
class ResponseTimes:
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    empty_response: Duration = field(default_factory=Duration)
    cancel: Duration = field(default_factory=Duration)


class Statistics:
    """Owner of one model version's counters; any thread may write or read.

    By design different from Triton: a request's duration ends at its FINAL response, not at its release, so that
    durations are right for a backend that releases early.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.last_inference_ms = 0
        self.inference_count = 0
        self.execution_count = 0
        self.pending_count = 0
        self.load_duration_s = 0.0
        self.success = Duration()
        self.fail = Duration()
        self.queue = Duration()
        self.is_cached = False  # whether a response cache is asked before the queue
        self.cache_hit = Duration()
        self.cache_miss = Duration()
        self.compute = ComputeTimes()
        self.failures: dict[FailureReason, int] = dict.fromkeys(FailureReason, 0)
        self._batches: dict[int, ComputeTimes] = {}
        self._responses: dict[int, ResponseTimes] = {}
        self.summaries: Summaries | None = None

    def add_pending(self, change: int) -> None:
        with self._lock:
            self.pending_count += change

    def record_success(self, batch_size: int, duration_ns: int, queue_ns: int, times_ns: PhaseTimes) -> None:
        with self._lock:
            self.last_inference_ms = time.time_ns() // 1_000_000
            self.inference_count += batch_size
            self.success.add(duration_ns)
            self.queue.add(queue_ns)
            self.compute.add(*times_ns)
        if self.summaries is not None:
            self.summaries.observe_success(duration_ns, queue_ns, times_ns)

    def record_cache_hit(self, duration_ns: int, lookup_ns: int) -> None:
        """Counts a success without an inference."""
        with self._lock:
            self.success.add(duration_ns)
            self.queue.add(0)
            self.cache_hit.add(lookup_ns)
        if self.summaries is not None:
            self.summaries.queue.observe(0)
            self.summaries.cache_hit.observe(lookup_ns // 1000)

    def record_cache_miss(self, lookup_ns: int, insertion_ns: int) -> None:
        """Adds the cache times of a request that was counted as a success before its response was stored."""
        with self._lock:
            self.success.ns += insertion_ns
            self.cache_miss.add(lookup_ns + insertion_ns)
        if self.summaries is not None:
            self.summaries.cache_miss.observe((lookup_ns + insertion_ns) // 1000)

    def record_failure(self, duration_ns: int, reason: FailureReason) -> None:
        with self._lock:
            self.last_inference_ms = time.time_ns() // 1_000_000
            self.fail.add(duration_ns)
            self.failures[reason] += 1

    def record_batch(self, batch_size: int, times_ns: PhaseTimes) -> None:
        with self._lock:
            self.last_inference_ms = time.time_ns() // 1_000_000
            self.execution_count += 1
            times = self._batches.get(batch_size)
            if times is None:
                times = self._batches[batch_size] = ComputeTimes()
            times.add(*times_ns)

    def record_response(self, index: int, start_ns: int, output_start_ns: int, end_ns: int, outcome: str) -> None:
        """outcome: success, fail, empty_response or cancel, the name of the counter."""
        with self._lock:
            times = self._responses.get(index)
            if times is None:
                times = self._responses[index] = ResponseTimes()
            if outcome == "success":  # written out, since this runs once per token
                success, infer, output = times.success, times.compute_infer, times.compute_output
                success.count += 1
                infer.count += 1
                output.count += 1
                success.ns += end_ns - start_ns if end_ns > start_ns else 0
                infer.ns += output_start_ns - start_ns if output_start_ns > start_ns else 0
                output.ns += end_ns - output_start_ns if end_ns > output_start_ns else 0
                return
            duration: Duration = getattr(times, outcome)
            duration.add(end_ns - start_ns)
            if output_start_ns > 0:
                times.compute_infer.add(output_start_ns - start_ns)
                times.compute_output.add(end_ns - output_start_ns)

    def snapshot(self, name: str, version: int) -> ModelStatistics:
        """All counters as the protocol's message; as in Triton, duration fields are present even when zero."""
        with self._lock:
            message = ModelStatistics(
                name=name,
                version=str(version),
                last_inference=self.last_inference_ms,
                inference_count=self.inference_count,
                execution_count=self.execution_count,
            )
            totals = message.inference_stats
            self.success.write(totals.success)
            self.fail.write(totals.fail)
            self.queue.write(totals.queue)
            self.compute.write(totals)
            self.cache_hit.write(totals.cache_hit)
            self.cache_miss.write(totals.cache_miss)
            for batch_size, times in sorted(self._batches.items()):
                times.write(message.batch_stats.add(batch_size=batch_size))
            for index, response in sorted(self._responses.items()):
                _write_response(response, message.response_stats[str(index)])
        return message


def _write_response(times: ResponseTimes, message: InferResponseStatistics) -> None:
    for name in ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel"):
        getattr(times, name).write(getattr(message, name))
