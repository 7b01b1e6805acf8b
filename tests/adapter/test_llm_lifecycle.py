"""Cancel, sharing between instances, full queues, unload, and models that cannot load: in the real host."""

from __future__ import annotations

import json
import random
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from llmbackend.adapter.device_placement import HOST_DEVICES
from llmbackend.adapter.metrics import LlmMetrics, SeriesUsers
from llmbackend.core.backend_api import ErrorCode, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.metrics.metric_family import MetricFamilies
from llmbackend.core.server_options import ServerOptions
from llmbackend.engine import llm_manager
from tests.helpers.llm_host import ENGINE, MODEL, Call, LlmHost, llm_host, write_model
from tests.helpers.waiting import eventually

LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
SLOW_STEP_MS = 20.0


def start_long(host: LlmHost, **inputs: Any) -> Call:
    return host.start(text_input="long", sampling=LONG, **inputs)


def until_waiting(host: LlmHost, count: int) -> None:
    """Until `count` requests are in the model's queue: before that, a cancel is the host's own affair."""
    eventually(lambda: (host.metric("vllm:num_requests_waiting") or 0) >= count)


def assert_cancelled(call: Call) -> None:
    error = call.wait().error
    assert error is not None
    assert (error.code, error.message) == (ErrorCode.CANCELLED, "Request was cancelled")
    assert call.num_finals == 1


def assert_nothing_left(host: LlmHost) -> None:
    """The next request is served, and then no request waits and every KV block is free."""
    assert host.infer(text_input="a", sampling=SHORT).error is None
    names = [f"vllm:{name}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
    eventually(lambda: not any(map(host.metric, names)))  # the engine's snapshot follows its last response


@pytest.mark.parametrize("stream", [True, False])
def test_a_running_request_is_cancelled(tmp_path: Path, stream: bool) -> None:
    with llm_host(tmp_path, mock_step_ms=SLOW_STEP_MS) as host:
        call = start_long(host, stream=stream)
        beside = host.start(text_input="b", stream=True, sampling={**SHORT, "max_tokens": 8})
        beside.first.wait(10)
        call.handle.cancel()
        call.handle.cancel()
        assert_cancelled(call)
        assert beside.wait().error is None
        assert host.metric("vllm:request_success_total", finished_reason="abort") == 1
        assert_nothing_left(host)


def test_a_queued_request_is_cancelled_and_the_others_go_on(tmp_path: Path) -> None:
    with llm_host(tmp_path, max_num_seqs=1, mock_step_ms=SLOW_STEP_MS) as host:
        running = host.start(text_input="r", stream=True, sampling={**SHORT, "max_tokens": 10})
        running.first.wait(10)
        queued, after = start_long(host), host.start(text_input="a", sampling=SHORT)
        until_waiting(host, 2)
        queued.handle.cancel()
        assert_cancelled(queued)
        assert running.wait().error is None
        assert after.wait().error is None
        assert_nothing_left(host)


def test_instances_share_one_queue(tmp_path: Path) -> None:
    group = "instance_group [ { kind: KIND_CPU, count: 2 } ]"
    with llm_host(tmp_path, group, max_num_seqs=2, mock_step_ms=5.0) as host:
        calls = [host.start(text_input=f"{index}", sampling={**SHORT, "max_tokens": 10}) for index in range(12)]
        cancelled = start_long(host)
        cancelled.handle.cancel()
        error = cancelled.wait().error
        assert error is not None and error.code is ErrorCode.CANCELLED
        assert all(call.wait().error is None for call in calls)
        alone = [host.infer(text_input=f"{index}", sampling={**SHORT, "max_tokens": 10}) for index in range(12)]
        assert [call.text for call in calls] == [call.text for call in alone]
        assert host.metric("vllm:request_success_total", finished_reason="length") == 24


def test_an_instance_per_gpu_is_an_engine_per_gpu_for_one_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engines would compute on: the mock model computes nowhere."""
    monkeypatch.setenv("LLMBACKEND_GPUS", "0,1,2")
    group = "instance_group [ { kind: KIND_GPU, gpus: [ 0, 2 ], count: 2 } ]"
    with llm_host(tmp_path, group, max_num_seqs=2) as host:
        [model] = host.server._versions.ready_models()
        assert sorted(engine.config.device for engine in model.state._engines) == ["cuda:0"] * 2 + ["cuda:2"] * 2
        calls = [host.start(text_input=f"{index}", sampling=SHORT) for index in range(12)]
        assert all(call.wait().error is None for call in calls)
        assert_nothing_left(host)


def test_each_request_ends_once_whenever_it_is_cancelled(tmp_path: Path) -> None:
    draw = random.Random(1)
    group = "instance_group [ { kind: KIND_CPU, count: 2 } ]"
    with llm_host(tmp_path, group, max_num_seqs=4, num_kv_blocks=40, mock_step_ms=0.2) as host:
        calls: list[Call] = []
        for index in range(120):
            calls.append(host.start(text_input="p" * draw.randint(1, 60), stream=index % 2 == 0, sampling=LONG))
            if draw.random() < 0.7:
                draw.choice(calls).handle.cancel()
        for call in draw.sample(calls, 60):
            call.handle.cancel()
        for call in calls:
            error = call.wait().error
            assert call.num_finals == 1
            assert error is None or error.code is ErrorCode.CANCELLED
        assert_nothing_left(host)


def test_requests_of_an_engine_go_to_one_that_still_runs_when_it_has_ended(tmp_path: Path) -> None:
    """Another engine is stopped meanwhile, and then one of its requests is cancelled."""
    group = "instance_group [ { kind: KIND_CPU, count: 3 } ]"
    with llm_host(tmp_path, group, max_num_seqs=1, mock_step_ms=SLOW_STEP_MS) as host:
        [model] = host.server._versions.ready_models()
        state = model.state
        first, second, third = state._engines
        calls = [start_long(host, stream=True) for _ in range(3)]
        assert all(call.first.wait(10) for call in calls)
        [of_first] = [
            call for call, owner in zip(calls, _engines_of_requests(state), strict=True) if owner is first.assignment
        ]
        shutdown = first.manager.shutdown

        def shutdown_with_others() -> None:
            shutdown()
            state.stop_engine(second)
            of_first.handle.cancel()

        first.manager.shutdown = shutdown_with_others
        state.stop_engine(first)
        assert_cancelled(of_first)
        for call in calls:
            call.handle.cancel()
            assert_cancelled(call)
        assert state.assignments() == [third.assignment]
        assert_nothing_left(host)


def _engines_of_requests(state: Any) -> list[Any]:
    """The engine of each request, in the order in which they came."""
    return [state.tasks._engine_of[request_id] for request_id in state.tasks._tasks]


def test_a_full_queue_refuses_with_unavailable(tmp_path: Path) -> None:
    parameters = 'parameters { key: "max_queue_size" value { string_value: "2" } }'
    with llm_host(tmp_path, parameters, max_num_seqs=1, mock_step_ms=SLOW_STEP_MS) as host:
        running = start_long(host, stream=True)
        running.first.wait(10)
        waiting = [start_long(host) for _ in range(2)]
        refused = start_long(host).wait().error
        assert refused is not None
        assert refused.code is ErrorCode.UNAVAILABLE
        assert "its queue holds 2 requests" in refused.message
        assert host.metric("llmbackend:refused_requests_total") == 1
        assert host.metric("vllm:request_success_total", finished_reason="error") == 0
        for call in (running, *waiting):
            call.handle.cancel()
        for call in (running, *waiting):
            assert_cancelled(call)
        assert_nothing_left(host)


def test_a_model_that_is_not_decoupled_answers_once_and_refuses_to_stream(tmp_path: Path) -> None:
    with llm_host(tmp_path, "model_transaction_policy { decoupled: false }") as host:
        assert host.infer(text_input="a", sampling=SHORT).num_finals == 1
        error = host.infer(text_input="a", stream=True, sampling=SHORT).error
        assert error is not None
        assert error.code is ErrorCode.UNSUPPORTED


def test_the_engine_in_its_own_process_gives_the_same_tokens(tmp_path: Path) -> None:
    def ids(directory: Path, transport: str) -> list[int]:
        directory.mkdir()
        with llm_host(directory, transport=transport) as host:
            return host.infer(text_input="same", sampling=LONG, return_output_ids=True).all("output_ids")

    assert ids(tmp_path / "a", "process") == ids(tmp_path / "b", "inline")


def explicit_server(repository: Path) -> InferenceServer:
    server = InferenceServer(ServerOptions(model_repositories=(repository,), model_control_mode="explicit"))
    server.start()
    return server


def test_unload_ends_the_series_and_the_model_loads_again(tmp_path: Path) -> None:
    write_model(tmp_path)
    server = explicit_server(tmp_path)
    for _ in range(2):
        server.load_model(MODEL)
        host = LlmHost(server)
        assert host.infer(text_input="a", sampling=SHORT).error is None
        assert host.metric("vllm:request_success_total", finished_reason="length") == 1
        server.unload_model(MODEL)
        eventually(lambda: all(row.state != "UNLOADING" for row in server.repository_index()))
    assert server.stop(10)
    assert host.metric("vllm:request_success_total", finished_reason="length") is None


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"modle": 1}, "unknown engine argument 'modle'"),
        ({"model": "./nowhere"}, "does not exist"),
        ({"tokenizer": "/nowhere"}, "does not exist"),
        ({"model": ""}, "'model.json' containing vllm engine args must be provided"),
        ({"num_kv_blocks": "few"}, "'num_kv_blocks' is 'few'"),
    ],
)
def test_a_model_that_cannot_load_says_why(tmp_path: Path, engine: dict[str, Any], expected: str) -> None:
    write_model(tmp_path)
    (tmp_path / MODEL / "1" / "model.json").write_text(json.dumps({**ENGINE, **engine}))
    server = explicit_server(tmp_path)
    with pytest.raises(TritonError) as caught:
        server.load_model(MODEL)
    assert expected in caught.value.message
    assert not server.model_is_ready(MODEL)
    assert server.stop(10)


@pytest.mark.parametrize("failing", [(LlmMetrics, "engine_started"), (llm_manager, "Wakeup")])
def test_a_start_that_fails_leaves_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: tuple[Any, str]
) -> None:
    def no_memory(*_: Any) -> None:
        raise MemoryError

    write_model(tmp_path)
    server = explicit_server(tmp_path)
    devices = HOST_DEVICES._ranks_at.copy()
    with monkeypatch.context() as patched:
        patched.setattr(*failing, no_memory)
        with pytest.raises(TritonError, match="MemoryError"):
            server.load_model(MODEL)
    assert not any(thread.name == "llm-manager" for thread in threading.enumerate())
    assert HOST_DEVICES._ranks_at == devices
    server.load_model(MODEL)
    assert LlmHost(server).infer(text_input="a", sampling=SHORT).error is None
    assert server.stop(10)


def test_a_model_whose_tokenizer_cannot_be_read_leaves_no_series(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{")
    write_model(tmp_path / "models", tokenizer=str(tmp_path / "tokenizer"))
    server = explicit_server(tmp_path / "models")
    with pytest.raises(TritonError, match=r"'tokenizer_config.json' is not JSON"):
        server.load_model(MODEL)
    assert LlmHost(server).metric("vllm:num_requests_waiting") is None
    assert server.stop(10)


def test_a_reload_keeps_the_series(tmp_path: Path) -> None:
    write_model(tmp_path)
    server = explicit_server(tmp_path)
    host = LlmHost(server)
    override = json.dumps({"backend": "llm", "parameters": {"max_num_seqs": {"string_value": "3"}}})
    for parameters in (None, {"config": override}):
        server.load_model(MODEL, parameters)
        assert host.infer(text_input="a", sampling=SHORT).error is None
    assert host.metric("vllm:request_success_total", finished_reason="length") == 2
    assert server.stop(10)


def test_an_adapters_series_stays_while_one_of_two_loads_has_it() -> None:
    """During a reload, the new version begins before the old one ends."""
    registry = CollectorRegistry()
    backend: Any = SimpleNamespace(state=SeriesUsers(), metric_family=MetricFamilies(registry).get)
    old, new = (LlmMetrics(backend, "m", 1, True, "m") for _ in range(2))
    labels = {"lora_name": "cat", "model": "m", "version": "1"}
    for metrics in (old, new, new):  # the last one in place
        metrics.set_adapter("cat", True)
    old.set_adapter("cat", False)
    assert registry.get_sample_value("llmbackend:lora_adapters", labels) == 1
    new.set_adapter("cat", False)
    assert registry.get_sample_value("llmbackend:lora_adapters", labels) is None


def test_a_reload_removes_the_series_of_a_cache_that_is_gone(tmp_path: Path) -> None:
    write_model(tmp_path)
    server = explicit_server(tmp_path)

    def num_blocks() -> list[str]:
        return [sample.labels["num_gpu_blocks"] for sample in server.metric_samples("vllm:cache_config_info")]

    for count, rows in (("128", "3"), ("64", "3"), ("64", "4")):
        values = {"num_kv_blocks": count, "max_num_seqs": rows}
        config = {"backend": "llm", "parameters": {name: {"string_value": text} for name, text in values.items()}}
        server.load_model(MODEL, {"config": json.dumps(config)})
        eventually(lambda count=count: num_blocks() == [count])  # type: ignore[misc]
    assert server.stop(10)
    assert num_blocks() == []


def test_an_unloaded_model_is_freed_without_the_garbage_collector(tmp_path: Path, no_garbage_collector: None) -> None:
    server = explicit_server(tmp_path)
    files: dict[str, Any] = {"config": json.dumps({"backend": "llm"}), "file:1/model.json": json.dumps(ENGINE).encode()}
    server.load_model(MODEL, files)
    model = weakref.ref(server._versions.live_models()[0])
    directory = model().directory  # type: ignore[union-attr]
    server.unload_model(MODEL)
    eventually(lambda: model() is None and not directory.exists())
    assert server.stop(10)
