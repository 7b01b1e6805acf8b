"""The KV cache's blocks, under TensorRT-LLM's name for them.

For: autoscalers that read TensorRT-LLM's metrics, and the host's ORCA header, which reads the same family whoever
reports it. Does not know: requests, the other metrics. Invariant: used + free = max, summed over the model's engines.
Labels: model, version, kv_cache_block_type (max, used, free, tokens_per, fraction).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from llmbackend.core.backend_api import Backend, MetricKind
from llmbackend.engine.infer_request import EngineStats

FAMILY = "nv_trt_llm_kv_cache_block_metrics"
_LABELS = ("model", "version", "kv_cache_block_type")
_TYPES = ("max", "used", "free", "tokens_per", "fraction")


class KvBlockMetrics:
    def __init__(self, backend: Backend, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._family = backend.metric_family(MetricKind.GAUGE, FAMILY, "KV cache blocks, by type.", _LABELS)
        self._lock = threading.Lock()
        self._max: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._shown = (-1, -1)

    def engine_started(self, engine: int, num_blocks: int, tokens_per_block: int) -> None:
        self._set("tokens_per", tokens_per_block)
        with self._lock:
            self._max[engine], self._used[engine] = num_blocks, 0
            self._show()

    def engine_stats(self, engine: int, stats: EngineStats) -> None:
        with self._lock:
            if engine in self._max:
                self._used[engine] = stats.num_blocks - stats.num_free_blocks
                self._show()

    def engine_removed(self, engine: int) -> None:
        with self._lock:
            self._max.pop(engine, None)
            self._used.pop(engine, None)
            self._show()

    def close(self) -> None:
        for kind in _TYPES:
            self._family.remove(kv_cache_block_type=kind, **self._labels)

    def _show(self) -> None:
        """Runs after each step; does nothing when nothing moved. Holds the lock."""
        now = most, used = sum(self._max.values()), sum(self._used.values())
        if now == self._shown:
            return
        self._shown = now
        self._set("max", most)
        self._set("used", used)
        self._set("free", most - used)
        self._set("fraction", used / most if most else 0.0)

    def _set(self, kind: str, value: float) -> None:
        self._family.set(value, kv_cache_block_type=kind, **self._labels)
