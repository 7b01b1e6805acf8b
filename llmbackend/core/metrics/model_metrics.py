"""What one model version adds to the metrics: labels, and how long its requests took.

For: LoadedModel, Statistics (reports each success) and the registry's collectors. Does not know: the text format.
Invariants: what is switched off costs nothing; memory is bounded however many requests come; labels can always be
printed.
Source: Triton's metric_model_reporter.cc.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.errors import invalid_argument
from llmbackend.core.messages import InferenceResponse, ResponseCallback

from .metrics_options import MetricsOptions

log = logging.getLogger(__name__)

FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
DEFAULT_BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)
WINDOW_S = 60.0
SLICES = 5
SAMPLES_PER_SLICE = 2000
_TAG = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_]*")


class Latencies:
    """The histogram and summaries that the server's options and the model's configuration ask for; None = off."""

    def __init__(self, config: ModelConfig, options: MetricsOptions) -> None:
        buckets = _buckets(config)
        self.first_response = Histogram(buckets) if options.histogram_latencies else None
        self.summaries = Summaries() if options.summary_latencies else None


def _buckets(config: ModelConfig) -> Sequence[float]:
    """The histogram's buckets (ms) from `model_metrics`; logs a WARNING for families that cannot be configured."""
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


class Histogram:
    """Counts of values by upper bound. Any thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = (*bounds, math.inf)
        self._lock = threading.Lock()
        self._counts = [0] * len(self.bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        with self._lock:
            self._counts[bisect.bisect_left(self.bounds, value)] += 1
            self._sum += value

    def snapshot(self) -> tuple[list[int], float]:
        """The count of each bucket (not cumulative), and the sum of all values."""
        with self._lock:
            return list(self._counts), self._sum


class FirstResponse:
    """A response callback that reports the time to the first response, in whole milliseconds, to a histogram."""

    __slots__ = ("_callback", "_histogram", "_start_ns")

    def __init__(self, callback: ResponseCallback, histogram: Histogram) -> None:
        self._callback = callback
        self._histogram: Histogram | None = histogram
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
    """Count and sum since the start, and a sample of the values of the last minute. Any thread.

    By design different: prometheus-cpp estimates quantiles over the last minute with a stream algorithm; here they are
    exact up to SAMPLES_PER_SLICE requests in each fifth of it, and beyond that from a uniform sample of so many.
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
        """The count, the sum, and the quantiles of the last minute (NaN without values)."""
        with self._lock:
            oldest_s = self._clock() - WINDOW_S
            values = [value for each in self._slices if each.begin_s > oldest_s for value in each.values]
            count, total = self._count, self._sum
        if not values:
            return count, total, [math.nan] * len(quantiles)
        # "inverted_cdf": the result is a measured value, not an interpolation.
        return count, total, np.quantile(values, list(quantiles), method="inverted_cdf").tolist()

    def _current(self) -> _Slice:
        now_s = self._clock()
        if not self._slices or now_s >= self._slices[-1].begin_s + WINDOW_S / SLICES:
            self._slices.append(_Slice(now_s))
        return self._slices[-1]


class _Slice:
    """A uniform sample (reservoir sampling) of the values of one fifth of the window."""

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
    """The labels of `metric_tags`, each name with an underscore before it. Raises TritonError INVALID_ARG for a name
    that cannot be a label."""
    for tag in config.metric_tags:
        if not _TAG.fullmatch(tag):
            raise invalid_argument(
                f"metric tag {tag!a} of model '{config.name}' is not a valid label name, expected letters, digits and _"
            )
    return {f"_{tag}": value for tag, value in config.metric_tags.items()}
