"""Counters of one model version: Triton's statistics, latency histogram and summaries, metric labels.

Read by the statistics RPC and by the metrics page. Invariants: a request is counted at most once, either as a success
or as a failure with one reason; disabled options cost nothing; memory is bounded; all labels are valid. Source:
Triton's statistics extension and infer_stats; metric_model_reporter.cc.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import (
    InferBatchStatistics,
    InferStatistics,
    ModelStatistics,
    StatisticDuration,
)

from ..backend_api import MetricKind, ResponseFlag
from ..errors import invalid_argument
from ..messages import InferenceResponse, ResponseCallback
from .metric_family import Family
from .metrics_options import MetricsOptions

log = logging.getLogger(__name__)

FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
FIRST_RESPONSE_DESCRIPTION = "Duration from request to first response in milliseconds"
DEFAULT_BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)
WINDOW_S = 60.0
SLICES = 5
SAMPLES_PER_SLICE = 2000
MAX_RESPONSE_INDICES = 1024
"""Rows of the statistics by response; the last one counts all further responses of longer streams."""
_TAG = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_]*")


class Latencies:
    """Histogram and summaries as enabled by the server's options and the model's configuration; None = off."""

    def __init__(self, config: ModelConfig, options: MetricsOptions) -> None:
        buckets = _buckets(config)
        self.first_response: Family | None = None
        if options.histogram_latencies:
            self.first_response = Family(
                MetricKind.HISTOGRAM, FIRST_RESPONSE, FIRST_RESPONSE_DESCRIPTION, (), tuple(buckets)
            )
            self.first_response.declare()
        self.summaries = Summaries() if options.summary_latencies else None


def _buckets(config: ModelConfig) -> Sequence[float]:
    """The histogram's buckets (ms) from `model_metrics`. Logs a WARNING for families that cannot be configured."""
    buckets: Sequence[float] = DEFAULT_BUCKETS_MS
    for control in config.model_metrics.metric_control:
        family = control.metric_identifier.family
        if family == FIRST_RESPONSE:
            buckets = sorted({bound for bound in control.histogram_options.buckets if math.isfinite(bound)})
        else:
            log.warning(
                "Metric family '%s' in 'metric_identifier' is not a customizable metric in Triton core.", family
            )
    return buckets


class FirstResponse:
    """A response callback that observes the time to the first response, in whole milliseconds."""

    __slots__ = ("_callback", "_histogram", "_start_ns")

    def __init__(self, callback: ResponseCallback, histogram: Family) -> None:
        self._callback = callback
        self._histogram: Family | None = histogram
        self._start_ns = time.monotonic_ns()

    def __call__(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        if self._histogram is not None and response is not None:
            self._histogram.observe((time.monotonic_ns() - self._start_ns) // 1_000_000)
            self._histogram = None
        self._callback(response, flags)


class Summaries:
    """Durations of a model's successful requests, in microseconds."""

    def __init__(self) -> None:
        self.request = Summary()
        self.queue = Summary()
        self.compute_input = Summary()
        self.compute_infer = Summary()
        self.compute_output = Summary()
        self.cache_hit = Summary()
        self.cache_miss = Summary()

    def observe_success(self, duration_ns: int, queue_ns: int, times_ns: tuple[int, int, int, int]) -> None:
        """times_ns: exec_start, compute_start, compute_end, exec_end."""
        self.request.observe(duration_ns // 1000)
        self.queue.observe(queue_ns // 1000)
        phases = (self.compute_input, self.compute_infer, self.compute_output)
        for phase, (begin_ns, end_ns) in zip(phases, itertools.pairwise(times_ns), strict=True):
            phase.observe((end_ns - begin_ns) // 1000)


class Summary:
    """Count and sum since the start, and a sample of the last minute's values. Thread-safe.

    Deliberate difference: prometheus-cpp estimates the quantiles of the last minute with a streaming algorithm; here
    they are exact for up to SAMPLES_PER_SLICE requests per twelve seconds and otherwise those of a uniform sample.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._count = 0
        self._sum = 0.0
        self._slices: deque[_Slice] = deque(maxlen=SLICES)
        self._random = random.Random(0)

    def observe(self, value: float) -> None:
        with self._lock:
            self._count += 1
            self._sum += value
            self._current().add(value, self._random)

    def snapshot(self, quantiles: Sequence[float]) -> tuple[int, float, list[float]]:
        """The count, the sum, and the quantiles of the last minute (NaN if there are no values)."""
        with self._lock:
            oldest_s = self._clock() - WINDOW_S
            values = [value for each in self._slices if each.begin_s > oldest_s for value in each.values]
            count, total = self._count, self._sum
        if not values:
            return count, total, [math.nan] * len(quantiles)
        # "inverted_cdf": measured values, no interpolation.
        return count, total, np.quantile(values, list(quantiles), method="inverted_cdf").tolist()

    def _current(self) -> _Slice:
        now_s = self._clock()
        if not self._slices or now_s >= self._slices[-1].begin_s + WINDOW_S / SLICES:
            self._slices.append(_Slice(now_s))
        return self._slices[-1]


class _Slice:
    """A uniform sample (reservoir sampling) of the values in one fifth of a minute."""

    def __init__(self, begin_s: float) -> None:
        self.begin_s = begin_s
        self.values: list[float] = []
        self._seen = 0

    def add(self, value: float, source: random.Random) -> None:
        self._seen += 1
        if len(self.values) < SAMPLES_PER_SLICE:
            self.values.append(value)
        elif (index := source.randrange(self._seen)) < SAMPLES_PER_SLICE:
            self.values[index] = value


def metric_tags(config: ModelConfig) -> Mapping[str, str]:
    """The labels in `metric_tags`, each prefixed with an underscore. Raises TritonError INVALID_ARG for an invalid
    name."""
    for tag in config.metric_tags:
        if not _TAG.fullmatch(tag):
            raise invalid_argument(
                f"metric tag {tag!a} of model '{config.name}' is not a valid label name, expected letters, digits and _"
            )
    return {f"_{tag}": value for tag, value in config.metric_tags.items()}


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


_RESPONSE_DURATIONS = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
_durations_of = operator.attrgetter(*_RESPONSE_DURATIONS)


class Statistics:
    """Counters of one model version. Thread-safe.

    Deliberate difference from Triton: a request's duration ends with its FINAL response rather than with its release,
    which a backend may do early.
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
        self.is_cached = False  # whether the model uses a response cache
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
            self.inference_count += batch_size
            self.success.add(duration_ns)
            self.queue.add(queue_ns)
            self.compute.add(*times_ns)
        if self.summaries is not None:
            self.summaries.observe_success(duration_ns, queue_ns, times_ns)

    def record_cache_hit(self, duration_ns: int, lookup_ns: int) -> None:
        """Counts a success that needed no inference."""
        with self._lock:
            self.success.add(duration_ns)
            self.queue.add(0)
            self.cache_hit.add(lookup_ns)
        if self.summaries is not None:
            self.summaries.queue.observe(0)
            self.summaries.cache_hit.observe(lookup_ns // 1000)

    def record_cache_miss(self, lookup_ns: int, insertion_ns: int) -> None:
        """Adds the cache times of a request that has already been counted as a success."""
        with self._lock:
            self.success.ns += insertion_ns
            self.cache_miss.add(lookup_ns + insertion_ns)
        if self.summaries is not None:
            self.summaries.cache_miss.observe((lookup_ns + insertion_ns) // 1000)

    def record_failure(self, duration_ns: int, reason: FailureReason) -> None:
        with self._lock:
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
        """outcome: the counter's name: success, fail, empty_response or cancel. output_start_ns: 0 = no output.
        Source: UpdateResponseFail, UpdateResponseEmpty and UpdateResponseCancel in Triton's infer_stats.cc."""
        index = min(index, MAX_RESPONSE_INDICES - 1)
        with self._lock:
            times = self._responses.get(index)
            if times is None:
                times = self._responses[index] = ResponseTimes()
            if outcome == "success":  # written out because this runs once per token
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
            if outcome == "cancel":
                return
            infer_end_ns = output_start_ns if output_start_ns > 0 else end_ns
            times.compute_infer.add(infer_end_ns - start_ns)
            if end_ns > infer_end_ns:
                times.compute_output.add(end_ns - infer_end_ns)

    def snapshot(self, name: str, version: int) -> ModelStatistics:
        """All counters as the protocol's message. As in Triton, durations are present even if zero."""
        with self._lock:  # every token takes it: long tables are copied, and written afterwards
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
            batches = [(batch_size, replace(times)) for batch_size, times in self._batches.items()]
            responses = [
                (index, [(each.count, each.ns) for each in _durations_of(times)])
                for index, times in self._responses.items()
            ]
        for batch_size, times in sorted(batches):
            times.write(message.batch_stats.add(batch_size=batch_size))
        for index, numbers in sorted(responses):
            row = message.response_stats[str(index)]
            for duration, (count, ns) in zip(_RESPONSE_DURATIONS, numbers, strict=True):
                Duration(count, ns).write(getattr(row, duration))
        return message
