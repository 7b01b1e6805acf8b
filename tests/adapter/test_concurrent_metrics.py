"""The model's metrics when several engines, or two loads of a model, write them at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from llmbackend.adapter.metrics import KvBlockMetrics, LlmMetrics, SeriesUsers
from llmbackend.core.metrics.metric_family import MetricFamilies
from llmbackend.engine.messages import EngineStats


class Model:
    """Loads of one model version."""

    def __init__(self) -> None:
        families = MetricFamilies(CollectorRegistry())
        self._backend: Any = SimpleNamespace(state=SeriesUsers(), metric_family=families.get)
        self.samples = families.samples

    def load(self) -> LlmMetrics:
        return LlmMetrics(self._backend, "m", 1, True, "m")


class Pause:
    """A place in the middle of the first of two concurrent calls."""

    def __init__(self) -> None:
        self._is_reached, self._is_over = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self._is_reached.set()
        assert self._is_over.wait(20)

    def run(self, first: Callable[[], object], second: Callable[[], object]) -> None:
        """The second begins when the first one pauses, which goes on when the second has ended or waits."""
        threads = [threading.Thread(target=call, daemon=True) for call in (first, second)]
        threads[0].start()
        assert self._is_reached.wait(20)
        threads[1].start()
        threads[1].join(0.1)
        self._is_over.set()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def test_gauges_are_those_of_the_latest_step_of_any_engine() -> None:
    model, pause = Model(), Pause()
    metrics = model.load()
    for engine in (0, 1):
        metrics.engine_stats(engine, EngineStats(num_requests_running=2, num_requests_waiting=1), lambda: 1)

    def num_queued_before() -> int:
        pause()
        return 0

    pause.run(
        lambda: metrics.engine_stats(0, EngineStats(), num_queued_before),
        lambda: metrics.engine_stats(1, EngineStats(), lambda: 0),
    )
    assert [one.value for one in model.samples("vllm:num_requests_running")] == [0]
    assert [one.value for one in model.samples("vllm:num_requests_waiting")] == [0]


def test_the_queues_length_is_the_latest_one() -> None:
    model, pause, queue = Model(), Pause(), ["request"]
    metrics = model.load()

    def num_queued_before() -> int:
        num_queued = len(queue)
        pause()
        return num_queued

    def dequeue() -> None:
        queue.clear()
        metrics.queue_changed(lambda: len(queue))

    pause.run(lambda: metrics.queue_changed(num_queued_before), dequeue)
    assert [one.value for one in model.samples("vllm:num_requests_waiting")] == [0]


def test_the_adapters_of_requests_are_the_latest_ones() -> None:
    model, pause, running = Model(), Pause(), {"cat"}
    metrics = model.load()

    def names_before() -> tuple[set[str], set[str]]:
        names = set(running)
        pause()
        return names, set()

    def finish() -> None:
        running.clear()
        metrics.set_lora_requests(lambda: (running, set()), 4)

    pause.run(lambda: metrics.set_lora_requests(names_before, 4), finish)
    assert [one.labels["running_lora_adapters"] for one in model.samples("vllm:lora_requests_info")] == [""]
    metrics.close()
    assert not model.samples("vllm:lora_requests_info")


def test_a_load_after_an_unload_keeps_its_series(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pause = Model(), Pause()
    old, new = model.load(), list[LlmMetrics]()
    monkeypatch.setattr(KvBlockMetrics, "close", lambda self: pause())
    pause.run(old.close, lambda: new.append(model.load()))
    for name in ("vllm:num_requests_running", "vllm:prompt_tokens_total"):
        assert [one.value for one in model.samples(name)] == [0]
