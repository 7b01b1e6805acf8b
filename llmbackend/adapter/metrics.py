"""The model's metrics: vLLM's, and TensorRT-LLM's metrics of KV-cache blocks.

For dashboards and autoscalers that use those names, and for the host's ORCA header. Independent of how metrics are
exported. Invariants: counters continue across engine restarts; for KV blocks, used + free = max.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import get_args

from llmbackend.core.backend_api import Backend, MetricFamily, MetricKind
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.errors import DeathKind
from llmbackend.engine.messages import EngineStats, ModelInfo

from .tasks.infer_task import InferTask

_LABELS = ("model", "version")
_VLLM_LABELS = (*_LABELS, "model_name", "engine")
"""Labels of vLLM's metrics, both vllm_backend's and those of vLLM's own server, which gateways and dashboards use: the
name used by clients, and the engine, always 0 because each series covers all engines."""
_SECONDS_SHORT = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_SECONDS_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_SECONDS_REQUEST = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_SECONDS_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

_RECOVERED = "llmbackend:recovered_requests_total"
_POISON = "llmbackend:poison_requests_total"
_REFUSED = "llmbackend:refused_requests_total"
_BREACHES = "llmbackend:invariant_breaches_total"
_RECOVERY = "llmbackend:engine_recovery_seconds"
_CONTEXT = "llmbackend:max_model_len_tokens"
_LOAD = "llmbackend:engine_load_seconds"
_RESTARTS = "llmbackend:engine_restarts_total"
_ADAPTERS = "llmbackend:lora_adapters"
_PER_TOKEN = "vllm:time_per_output_token_seconds"
_CHOICES_ASKED = "vllm:request_params_n"
_GAUGES = {
    "vllm:num_requests_running": "Requests in the engines' batches.",
    "vllm:num_requests_waiting": "Requests waiting for an engine, in the model's queue or in an engine.",
    _CONTEXT: "Maximum tokens of a prompt and its answer.",
    _LOAD: "Time to start and load the model's latest engine.",
    "vllm:kv_cache_usage_perc": "Share of KV-cache blocks in use; 1 means all of them.",
}
_COUNTED_BY_ENGINES = {
    "vllm:num_preemptions_total": ("num_preemptions", "Preemptions of running requests."),
    "vllm:prompt_tokens_total": ("prompt_tokens", "Prompt tokens processed."),
    "vllm:generation_tokens_total": ("generation_tokens", "Tokens generated."),
    "vllm:prefix_cache_queries_total": (
        "prefix_cache_queries",
        "Tokens of admitted requests that were looked up in the prefix cache.",
    ),
    "vllm:prefix_cache_hits_total": ("prefix_cache_hits", "Tokens found in the prefix cache."),
    "llmbackend:kv_blocks_offloaded_total": ("num_offloaded_blocks", "KV blocks copied to host memory."),
    "llmbackend:kv_blocks_reloaded_total": ("num_reloaded_blocks", "KV blocks copied back from host memory."),
    "vllm:spec_decode_num_drafts_total": ("num_drafts", "Steps of a request with draft tokens."),
    "vllm:spec_decode_num_draft_tokens_total": ("num_draft_tokens", "Draft tokens."),
    "vllm:spec_decode_num_accepted_tokens_total": ("num_accepted_tokens", "Accepted draft tokens."),
    _BREACHES: ("num_invariant_breaches", "Self-checks that found something lost or left behind."),
}
"""Counters derived from fields of the engines' EngineStats."""
_COUNTERS = {
    _RECOVERED: "Requests that continued after their engine died.",
    _POISON: "Requests that were ended because they killed the engine.",
    _REFUSED: "Requests that ended before an engine took them: full queue, timeout, or no engine.",
    **{name: description for name, (_, description) in _COUNTED_BY_ENGINES.items()},
}
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("Arrival to first token.", _SECONDS_FIRST_TOKEN),
    "vllm:inter_token_latency_seconds": ("Time between two outputs of a request.", _SECONDS_SHORT),
    _PER_TOKEN: ("Time between two outputs of a request, by vllm_backend's name.", _SECONDS_PER_TOKEN),
    "vllm:e2e_request_latency_seconds": ("Arrival to last token.", _SECONDS_REQUEST),
    "vllm:request_queue_time_seconds": ("Arrival to being taken by an engine.", _SECONDS_REQUEST),
    "vllm:request_prefill_time_seconds": ("Being taken by an engine to the first token.", _SECONDS_REQUEST),
    "vllm:request_decode_time_seconds": ("First token to the last.", _SECONDS_REQUEST),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    _RECOVERY: ("Death of a request's engine to its next output.", _SECONDS_FIRST_TOKEN),
    "vllm:request_generation_tokens": ("Tokens generated for a request.", _TOKENS),
    _CHOICES_ASKED: ("Choices asked for of a prompt: the parameter n.", _CHOICES),
}
_SUCCESS = "vllm:request_success_total"
_CACHE_CONFIG = "vllm:cache_config_info"
_CACHE_LABELS = ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization")
_LORA_LABELS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
_LORA_REQUESTS = "vllm:lora_requests_info"
_DEATHS = get_args(DeathKind)
_FINISH_REASONS = ("stop", "length", "abort", "error")
REFUSED = "refused"
"""The finish reason of a request that no engine took, which vLLM's metrics do not count."""

KV_BLOCK_FAMILY = "nv_trt_llm_kv_cache_block_metrics"
_KV_LABELS = ("model", "version", "kv_cache_block_type")
_KV_TYPES = ("max", "used", "free", "tokens_per", "fraction")


NumQueued = Callable[[], int]
"""Returns how many requests are in the model's queue. Called under a lock."""


class SeriesUsers:
    """Counts the loaded models that write each series: during a reload, the new one starts before the old one ends.
    Creates and removes series under its lock: otherwise a model could remove a series that another one has just
    created.

    Owner: the backend's state slot.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, ...]] = Counter()

    def enter(self, labels: Mapping[str, str], create: Callable[[], None]) -> None:
        with self._lock:
            self._counts[tuple(labels.values())] += 1
            create()

    def leave(self, labels: Mapping[str, str], remove: Callable[[], None]) -> None:
        """Calls `remove` if no model writes the series any more."""
        key = tuple(labels.values())
        with self._lock:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
                remove()


class _Unreported:
    """A metric family that is not exported."""

    def declare(self, buckets: Sequence[float] | None = None, /, **labels: str) -> None: ...
    def increment(self, value: float = 1.0, /, **labels: str) -> None: ...
    def set(self, value: float, /, **labels: str) -> None: ...
    def observe(self, value: float, /, **labels: str) -> None: ...
    def observe_all(self, values: Sequence[float], /, **labels: str) -> None: ...
    def value(self, **labels: str) -> float:
        return 0.0

    def remove(self, **labels: str) -> None: ...


class LlmMetrics:
    """The metrics of one model version, written once per step. `_lock` guards the engines' latest snapshots, the names
    of adapters, and the gauges made from them, so that the latest values are written last."""

    def __init__(self, backend: Backend, model: str, version: int, reports_vllm: bool, client_name: str) -> None:
        """reports_vllm: whether to write metrics with vLLM's names. client_name: the model's name for clients."""

        def family(
            kind: MetricKind, name: str, description: str, more: Sequence[str] = (), *buckets: Sequence[float]
        ) -> MetricFamily:
            is_vllm = name.startswith("vllm:")
            if is_vllm and not reports_vllm:
                return _Unreported()
            labels = _VLLM_LABELS if is_vllm else _LABELS
            return backend.metric_family(kind, name, description, (*labels, *more), *buckets)

        self._labels = {"model": model, "version": str(version)}
        self._vllm_labels = {**self._labels, "model_name": client_name, "engine": "0"}
        self._cache_labels: dict[int, dict[str, str]] = {}
        self._lora_labels: dict[str, str] = {}
        self._served_adapters: set[str] = set()
        self._users: SeriesUsers = backend.state
        self._lock = threading.Lock()
        self._engines: dict[int, EngineStats] = {}
        self._families: dict[str, MetricFamily] = {}
        for name, description in _GAUGES.items():
            self._families[name] = family(MetricKind.GAUGE, name, description)
        for name, description in _COUNTERS.items():
            self._families[name] = family(MetricKind.COUNTER, name, description)
        for name, (description, buckets) in _HISTOGRAMS.items():
            self._families[name] = family(MetricKind.HISTOGRAM, name, description, (), buckets)
        self._success = family(MetricKind.COUNTER, _SUCCESS, "Requests that ended, by reason.", ("finished_reason",))
        self._cache_config = family(MetricKind.GAUGE, _CACHE_CONFIG, "1: an engine's KV cache.", _CACHE_LABELS)
        self._lora_requests = family(
            MetricKind.GAUGE, _LORA_REQUESTS, "Unix time of the last change: adapters with requests.", _LORA_LABELS
        )
        self._restarts = family(
            MetricKind.COUNTER, _RESTARTS, "Engines that were replaced, by how they were lost.", ("cause",)
        )
        self._adapters = family(
            MetricKind.GAUGE, _ADAPTERS, "1: LoRA adapters that were loaded at run time.", ("lora_name",)
        )
        self._first_token = self._families["vllm:time_to_first_token_seconds"]
        self._next_token = [self._families[name] for name in ("vllm:inter_token_latency_seconds", _PER_TOKEN)]
        self._kv_blocks = KvBlockMetrics(backend, self._labels)
        self._users.enter(self._labels, self._create_series)

    def set_max_tokens(self, max_tokens: int) -> None:
        """Sets the model's context length, known once an engine has been loaded."""
        self._set(_CONTEXT, max_tokens)

    def set_adapter(self, name: str, is_served: bool) -> None:
        """Called when an adapter is loaded, also in place of one with its name, or unloaded at run time."""
        labels = {"lora_name": name, **self._labels}
        with self._lock:
            if is_served == (name in self._served_adapters):
                return
            self._served_adapters ^= {name}
            if is_served:
                self._users.enter(labels, partial(self._adapters.set, 1, **labels))
            else:
                self._users.leave(labels, partial(self._adapters.remove, **labels))

    def engine_started(self, engine: int, info: ModelInfo, config: EngineConfig) -> None:
        self._set(_LOAD, info.load_s)
        labels = {**self._vllm_labels, "engine": str(engine), "block_size": str(info.block_size)}
        labels |= {"num_gpu_blocks": str(info.num_blocks), "cache_dtype": config.kv_cache_dtype}
        labels |= {name: str(getattr(config, name)) for name in ("enable_prefix_caching", "gpu_memory_utilization")}
        self._remove_cache_config(engine)
        self._cache_labels[engine] = labels
        self._users.enter(labels, partial(self._cache_config.set, 1, **labels))
        self._kv_blocks.engine_started(engine, info.num_blocks, info.block_size)

    def _remove_cache_config(self, engine: int) -> None:
        labels = self._cache_labels.pop(engine, None)
        if labels is not None:
            self._users.leave(labels, partial(self._cache_config.remove, **labels))

    def set_lora_requests(self, names: Callable[[], tuple[Collection[str], Collection[str]]], max_loras: int) -> None:
        """names: returns the adapters of running requests, and of waiting requests"""
        with self._lock:
            running, waiting = names()
            labels = {**self._vllm_labels, "max_lora": str(max_loras)}
            labels |= {"running_lora_adapters": ",".join(sorted(running))}
            labels |= {"waiting_lora_adapters": ",".join(sorted(waiting))}
            if labels != self._lora_labels:
                self._remove_lora_requests()
                self._lora_labels = labels
                self._users.enter(labels, partial(self._lora_requests.set, time.time(), **labels))

    def _remove_lora_requests(self) -> None:
        """The caller holds the lock."""
        if labels := self._lora_labels:
            self._users.leave(labels, partial(self._lora_requests.remove, **labels))

    def engine_stats(self, engine: int, stats: EngineStats, num_queued: NumQueued) -> None:
        """Records one engine's snapshot after a step."""
        with self._lock:
            before = self._engines.get(engine, EngineStats())
            self._engines[engine] = stats
            self._update_gauges(num_queued)
        self._kv_blocks.engine_stats(engine, stats)
        for name, (field, _) in _COUNTED_BY_ENGINES.items():
            if (after := getattr(stats, field)) != (earlier := getattr(before, field)):
                grown = after - earlier if after > earlier else after
                self._families[name].increment(grown, **self._labels_of(name))

    def engine_removed(self, engine: int, num_queued: NumQueued) -> None:
        """Called when an engine was stopped while others continue: its requests and blocks no longer count."""
        with self._lock:
            self._engines.pop(engine, None)
            self._update_gauges(num_queued)
        self._kv_blocks.engine_removed(engine)
        self._remove_cache_config(engine)

    def engine_lost(self, engine: int, cause: DeathKind, num_queued: NumQueued) -> None:
        """Called when an engine has died; its successor with the same index counts from zero."""
        self.engine_stats(engine, EngineStats(), num_queued)
        self._restarts.increment(1, cause=cause, **self._labels)

    def poisoned(self) -> None:
        self._families[_POISON].increment(1, **self._labels)

    def refused(self) -> None:
        self._families[_REFUSED].increment(1, **self._labels)

    def recovered(self, duration_ns: int) -> None:
        """Called when a request gets output again, `duration_ns` after its engine died."""
        self._families[_RECOVERED].increment(1, **self._labels)
        self._observe_seconds(_RECOVERY, duration_ns)

    def invariant_broken(self) -> None:
        self._families[_BREACHES].increment(1, **self._labels)

    def queue_changed(self, num_queued: NumQueued) -> None:
        """Updates the waiting gauge between steps."""
        with self._lock:
            in_engines = sum(stats.num_requests_waiting for stats in self._engines.values())
            self._set("vllm:num_requests_waiting", num_queued() + in_engines)

    def taken_by_engine(self, task: InferTask, now_ns: int) -> None:
        self._observe_seconds("vllm:request_queue_time_seconds", now_ns - task.times.exec_start_ns)

    def outputs(self, first_s: Sequence[float], next_s: Sequence[float]) -> None:
        """Records a step's latencies. first_s: from arrival to first token; next_s: between outputs."""
        if first_s:
            self._first_token.observe_all(first_s, **self._vllm_labels)
        if next_s:
            for family in self._next_token:
                family.observe_all(next_s, **self._vllm_labels)

    def finished(self, task: InferTask, reason: str, now_ns: int) -> None:
        if reason == REFUSED:
            if task.num_own_choices:  # the request's first choice
                self.refused()
            return
        self._success.increment(1, finished_reason=reason, **self._vllm_labels)
        self._families["vllm:request_prompt_tokens"].observe(task.num_prompt_tokens, **self._vllm_labels)
        self._families["vllm:request_generation_tokens"].observe(task.num_new_tokens, **self._vllm_labels)
        if task.num_own_choices:
            self._families[_CHOICES_ASKED].observe(task.num_own_choices, **self._vllm_labels)
        times = task.times
        self._observe_seconds("vllm:e2e_request_latency_seconds", now_ns - times.exec_start_ns)
        if times.first_token_ns:
            self._observe_seconds("vllm:request_prefill_time_seconds", times.first_token_ns - times.taken_ns)
            self._observe_seconds("vllm:request_decode_time_seconds", times.last_token_ns - times.first_token_ns)

    def close(self) -> None:
        """Removes the model's series, except those that another load of the same version writes."""
        with self._lock:
            self._remove_lora_requests()
        for engine in list(self._cache_labels):
            self._remove_cache_config(engine)
        self._users.leave(self._labels, self._remove_series)

    def _create_series(self) -> None:
        """Creates all series at 0, so that rates are correct from the first request on."""
        for name in _GAUGES:
            self._set(name, 0)
        for name in _COUNTERS:
            self._families[name].increment(0, **self._labels_of(name))
        for name in _HISTOGRAMS:
            self._families[name].declare(**self._labels_of(name))
        for reason in _FINISH_REASONS:
            self._success.increment(0, finished_reason=reason, **self._vllm_labels)
        for cause in _DEATHS:
            self._restarts.increment(0, cause=cause, **self._labels)

    def _remove_series(self) -> None:
        self._kv_blocks.close()
        for name, family in self._families.items():
            family.remove(**self._labels_of(name))
        for reason in _FINISH_REASONS:
            self._success.remove(finished_reason=reason, **self._vllm_labels)
        for cause in _DEATHS:
            self._restarts.remove(cause=cause, **self._labels)

    def _update_gauges(self, num_queued: NumQueued) -> None:
        """The caller holds the lock."""
        running = waiting = 0
        usage = 0.0
        for one in self._engines.values():
            running += one.num_requests_running
            waiting += one.num_requests_waiting
            usage += one.kv_cache_usage
        self._set("vllm:num_requests_running", running)
        self._set("vllm:num_requests_waiting", num_queued() + waiting)
        self._set("vllm:kv_cache_usage_perc", usage / max(len(self._engines), 1))

    def _set(self, name: str, value: float) -> None:
        self._families[name].set(value, **self._labels_of(name))

    def _observe_seconds(self, name: str, duration_ns: int) -> None:
        self._families[name].observe(duration_ns * 1e-9, **self._labels_of(name))

    def _labels_of(self, name: str) -> dict[str, str]:
        return self._vllm_labels if name.startswith("vllm:") else self._labels


class KvBlockMetrics:
    """TensorRT-LLM's gauges of KV-cache blocks, summed over the model's engines. `_lock` guards all fields."""

    def __init__(self, backend: Backend, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._family = backend.metric_family(MetricKind.GAUGE, KV_BLOCK_FAMILY, "KV cache blocks, by type.", _KV_LABELS)
        self._lock = threading.Lock()
        self._max: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._written = (-1, -1)

    def engine_started(self, engine: int, num_blocks: int, tokens_per_block: int) -> None:
        self._set("tokens_per", tokens_per_block)
        with self._lock:
            self._max[engine], self._used[engine] = num_blocks, 0
            self._update_gauges()

    def engine_stats(self, engine: int, stats: EngineStats) -> None:
        with self._lock:
            if engine in self._max:
                self._used[engine] = stats.num_blocks - stats.num_free_blocks
                self._update_gauges()

    def engine_removed(self, engine: int) -> None:
        with self._lock:
            self._max.pop(engine, None)
            self._used.pop(engine, None)
            self._update_gauges()

    def close(self) -> None:
        for kind in _KV_TYPES:
            self._family.remove(kv_cache_block_type=kind, **self._labels)

    def _update_gauges(self) -> None:
        """Called after each step while holding the lock; writes only what has changed."""
        now = total, used = sum(self._max.values()), sum(self._used.values())
        if now == self._written:
            return
        self._written = now
        self._set("max", total)
        self._set("used", used)
        self._set("free", total - used)
        self._set("fraction", used / total if total else 0.0)

    def _set(self, kind: str, value: float) -> None:
        self._family.set(value, kv_cache_block_type=kind, **self._labels)
