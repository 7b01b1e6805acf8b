"""Tracing in the core: which requests are sampled, what a trace holds, where and when it is written."""

from __future__ import annotations

import json
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.tensors import Tensor
from llmbackend.core.tracing.manager import TraceFile, TraceManager
from llmbackend.core.tracing.trace import (
    MAX_REPORTS,
    UNLIMITED_COUNT,
    RequestTrace,
    TraceLevel,
    TraceSettings,
    tensor_fields,
)
from tests.helpers.core_host import ECHO_BACKEND, KEEPING_BACKEND, STAGE, Repository, send, serving, x
from tests.helpers.ensemble_host import chain, part
from tests.helpers.waiting import eventually

TIMES = TraceLevel.TIMESTAMPS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.fixture
def manager(path: Path) -> Iterator[TraceManager]:
    manager = TraceManager(TraceSettings(level=TIMES, rate=1, file=str(path)))
    manager.start()
    yield manager
    manager.close()
    assert manager.open_count == 0


def no_headers(name: str) -> str | None:
    return None


def sampled(manager: TraceManager, model: str = "m", count: int = 1) -> list[bool]:
    """Which of `count` requests are traced; each trace is closed at once."""
    found = []
    for _ in range(count):
        trace = manager.sample(model, no_headers)
        found.append(trace is not None)
        if trace is not None:
            trace.mark("HTTP_RECV_START")
            trace.close()
    return found


def one(manager: TraceManager, model: str = "m") -> RequestTrace:
    trace = manager.sample(model, no_headers)
    assert trace is not None
    return trace


def items(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())
    assert isinstance(found, list)
    return found


def names(found: list[dict[str, Any]], trace_id: int) -> list[str]:
    """The activities of one id, in the order of the file."""
    return [
        item["timestamps"][0]["name"] if "timestamps" in item else item.get("activity", "model")
        for item in found
        if item["id"] == trace_id
    ]


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_nothing_is_traced_by_default() -> None:
    manager = TraceManager(TraceSettings())
    manager.start()
    assert manager.is_idle and sampled(manager, count=3) == [False] * 3


def test_an_unsampled_request_costs_next_to_nothing() -> None:
    """Measured: 0.1 µs when tracing is off, 0.5 µs when the rate lets a request pass."""
    manager = TraceManager(TraceSettings(level=TIMES, rate=1 << 31, file="unused"))
    manager.start()
    began_s = time.perf_counter()
    for _ in range(10_000):
        manager.sample("m", no_headers)
    assert (time.perf_counter() - began_s) / 10_000 < 50e-6


@pytest.mark.parametrize(("rate", "expected"), [(1, [True] * 4), (2, [False, True, False, True])])
def test_every_rate_th_request_is_traced(manager: TraceManager, rate: int, expected: list[bool]) -> None:
    manager.update("", {"rate": rate})
    assert sampled(manager, count=4) == expected


def test_count_ends_sampling_and_is_shown_as_what_is_left(manager: TraceManager) -> None:
    manager.update("", {"count": 2})
    assert sampled(manager) == [True]
    assert manager.settings().count == 1
    assert sampled(manager, count=3) == [True, False, False]
    assert manager.settings().count == 0


def test_a_model_whose_count_is_used_up_does_not_block_others(manager: TraceManager) -> None:
    """Triton refuses every change, of the model and of the server, once a model has no traces left."""
    manager.update("m", {"count": 1})
    assert sampled(manager, "m") == [True]
    manager.update("", {"rate": 2})
    manager.update("m", {"log_frequency": 3})
    assert sampled(manager, "m", 4) == [False] * 4 and sampled(manager, "other", 2) == [False, True]
    manager.update("m", {"count": 1})
    assert sampled(manager, "m", 4) == [False, True, False, False]


def test_one_model_alone_can_be_traced(path: Path) -> None:
    manager = TraceManager(TraceSettings(rate=1, file=str(path)))
    manager.start()
    manager.update("a", {"level": TIMES})
    assert sampled(manager, "a") == [True] and sampled(manager, "b") == [False]
    manager.close()


def test_threads_that_sample_at_once_get_each_rate_th_request(manager: TraceManager) -> None:
    manager.update("", {"rate": 7})
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.extend(sampled(manager, count=70))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(found) == 40


# --- settings ---------------------------------------------------------------------------------------------------------


def test_a_model_inherits_what_it_does_not_set(manager: TraceManager, path: Path) -> None:
    manager.update("m", {"rate": 5})
    manager.update("", {"log_frequency": 3, "rate": 2})
    assert manager.settings("m") == TraceSettings(level=TIMES, rate=5, log_frequency=3, file=str(path))
    assert manager.settings("other") == manager.settings()
    assert manager.settings().rate == 2


def test_null_takes_a_setting_back(manager: TraceManager) -> None:
    manager.update("", {"rate": 2})
    manager.update("m", {"rate": 5, "count": 9})
    manager.update("m", {"rate": None})
    assert (manager.settings("m").rate, manager.settings("m").count) == (2, 9)
    manager.update("m", {"count": None})
    manager.update("", {"rate": None})
    assert manager.settings("m").rate == manager.settings().rate == 1  # the command line's
    assert manager.settings("m").count == UNLIMITED_COUNT


def test_what_is_left_of_a_models_count_survives_changes_of_other_settings(manager: TraceManager) -> None:
    manager.update("m", {"count": 3})
    assert sampled(manager, "m", 2) == [True, True]
    manager.update("m", {"log_frequency": 4})
    manager.update("", {"rate": 1})
    assert manager.settings("m").count == 1
    assert sampled(manager, "m", 2) == [True, False]


@pytest.mark.parametrize(
    ("settings", "changes", "reason"),
    [
        (TraceSettings(), {"level": TIMES}, "trace file name is not given"),
        (TraceSettings(file="f", level=TIMES), {"rate": 0}, "sample rate must be non-zero"),
    ],
)
def test_settings_that_could_not_trace_are_refused_whole(settings: TraceSettings, changes: Any, reason: str) -> None:
    manager = TraceManager(settings)
    manager.start()
    with pytest.raises(TritonError) as caught:
        manager.update("", changes)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == f"Attempting to set invalid trace setting :{reason}"
    assert manager.settings() == settings


def test_a_change_that_would_break_a_models_setting_changes_nothing(manager: TraceManager) -> None:
    manager.update("m", {"level": TIMES})
    with pytest.raises(TritonError):
        manager.update("", {"level": TraceLevel.OFF, "rate": 0})  # fine for the server, not for m
    assert manager.settings().rate == manager.settings("m").rate == 1
    assert manager.settings().level is TIMES


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_file_is_written_when_the_server_stops(manager: TraceManager, path: Path) -> None:
    sampled(manager, count=2)
    assert not path.exists()
    manager.close()
    assert [item["id"] for item in items(path)] == [1, 2]


def test_a_trace_that_is_open_when_the_server_stops_is_written_later(manager: TraceManager, path: Path) -> None:
    late = one(manager)
    sampled(manager)
    manager.close()
    assert manager.sample("m", no_headers) is None
    late.mark("HTTP_SEND_END")
    late.close()
    assert {item["id"] for item in items(path)} == {1, 2}


def test_log_frequency_makes_numbered_files(manager: TraceManager, path: Path) -> None:
    manager.update("", {"log_frequency": 2})
    sampled(manager, count=5)
    numbered = [Path(f"{path}.{index}") for index in range(3)]
    assert [len(items(each)) for each in numbered[:2]] == [2, 2] and not numbered[2].exists()
    manager.close()
    assert len(items(numbered[2])) == 1 and not path.exists()


def test_the_last_trace_of_a_count_writes_them_all(manager: TraceManager, path: Path) -> None:
    manager.update("", {"count": 2})
    sampled(manager, count=3)
    assert len(items(Path(f"{path}.0"))) == 2


def test_a_replaced_setting_writes_what_it_has_collected(manager: TraceManager, path: Path) -> None:
    sampled(manager)
    manager.update("", {"level": TraceLevel.OFF})
    assert len(items(path)) == 1
    manager.update("", {"level": TIMES})
    sampled(manager)
    manager.close()
    assert len(items(path)) == 2


def test_waiting_traces_are_bounded_and_the_file_is_whole_json_at_all_times(
    manager: TraceManager, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmbackend.core.tracing.manager.MAX_WAITING_BYTES", 1000)
    most = 0
    for count in range(1, 101):
        sampled(manager)
        most = max(most, count - (len(items(path)) if path.exists() else 0))
    assert most < 20
    manager.close()
    assert len(items(path)) == 100


def test_a_file_that_can_not_be_written_costs_a_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = TraceManager(TraceSettings(level=TIMES, rate=1, file=str(tmp_path / "no" / "dir")))
    manager.start()
    sampled(manager)
    manager.close()
    assert "failed creating trace file" in caplog.text


def test_a_file_that_was_moved_or_emptied_is_begun_again(path: Path) -> None:
    """As logrotate does."""
    file, moved = TraceFile(str(path)), path.with_suffix(".1")
    file.append(['{"id":1}'])
    path.rename(moved)
    file.append(['{"id":2}'])
    assert (items(moved), items(path)) == ([{"id": 1}], [{"id": 2}])
    path.write_bytes(b"")
    file.append(['{"id":3}'])
    file.append(['{"id":4}'])
    assert items(path) == [{"id": 3}, {"id": 4}]


# --- what a trace holds -----------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_whole_json(path: Path) -> None:
    file = TraceFile(str(path))
    file.append(['{"id": 1}'])
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        file.append([json.dumps({"id": "x" * 200})])
        assert json.loads(path.read_text()) == [{"id": 1}]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    file.append(['{"id": 2}'])
    assert json.loads(path.read_text()) == [{"id": 1}, {"id": 2}]


def test_a_request_is_traced_through_the_host(repository: Repository, path: Path) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo")
    with serving(repository, "m", trace=TraceSettings(level=TIMES, rate=1, file=str(path))) as server:
        trace = server.tracing.sample("m", no_headers)
        assert trace is not None
        trace.mark("HTTP_RECV_START")
        send(server, "m", id="r1", trace=trace).responses()
        trace.mark("HTTP_SEND_END")
        trace.close()
        send(server, "m").responses()  # not sampled: a frontend asks
    found = items(path)
    assert {"id": 1, "model_name": "m", "model_version": 1, "request_id": "r1"} in found
    assert {item["id"] for item in found} == {1}
    in_order = names(found, 1)
    assert in_order[:5] == ["HTTP_RECV_START", "model", "REQUEST_START", "QUEUE_START", "COMPUTE_START"]
    assert sorted(in_order[5:]) == sorted(
        [
            *("COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"),
            *("INFER_RESPONSE_COMPLETE", "REQUEST_END", "HTTP_SEND_END"),
        ]
    )
    times = [item["timestamps"][0]["ns"] for item in found if "timestamps" in item]
    assert times == sorted(times) and times[-1] <= time.monotonic_ns()


def test_a_composing_model_is_a_child_of_the_trace(repository: Repository, path: Path) -> None:
    """What ensembles and BLS do: another model's request carries `child()` of the request it is made for."""
    repository.backend("echo", ECHO_BACKEND)
    repository.backend("keep", KEEPING_BACKEND)
    repository.model("inner", "echo")
    repository.model("outer", "keep")
    with serving(repository, "inner", "outer", trace=TraceSettings(level=TIMES, rate=1, file=str(path))) as server:
        trace = server.tracing.sample("outer", no_headers)
        assert trace is not None
        client = send(server, "outer", id="o", trace=trace)
        STAGE.wait("executed o")
        send(server, "inner", id="i", trace=trace.child()).responses()
        ((_, request),) = STAGE.kept
        STAGE.kept.clear()
        request.new_response().send(ResponseFlag.FINAL)
        trace.close()
        client.responses()
        assert server.tracing.open_count == 1  # the outer request is not over
        request.release()
        del request
    found = items(path)
    assert {"id": 2, "model_name": "inner", "model_version": 1, "request_id": "i", "parent_id": 1} in found
    assert "INFER_RESPONSE_COMPLETE" in names(found, 1) and "INFER_RESPONSE_COMPLETE" not in names(found, 2)
    assert "COMPUTE_START" in names(found, 2)


def test_an_ensembles_steps_are_children_of_its_trace(repository: Repository, path: Path) -> None:
    part(repository, "add", "add")
    chain(repository, "e", "add", "add")
    with serving(repository, "e", trace=TraceSettings(level=TIMES, rate=1, file=str(path))) as server:
        trace = server.tracing.sample("e", no_headers)
        assert trace is not None
        send(server, "e", id="7", trace=trace).responses()
        trace.close()
    found = items(path)
    models = [(item["id"], item["model_name"], item.get("parent_id")) for item in found if "model_name" in item]
    assert models == [(1, "e", None), (2, "add", 1), (3, "add", 1)]
    assert names(found, 1)[1:3] == ["REQUEST_START", "QUEUE_START"] and "COMPUTE_START" not in names(found, 1)
    assert "COMPUTE_START" in names(found, 2) and "COMPUTE_START" in names(found, 3)


def test_an_ensemble_goes_on_when_its_trace_is_full(
    repository: Repository, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmbackend.core.tracing.trace.MAX_REPORTS", 2)
    part(repository, "add", "add")
    chain(repository, "e", "add", "add")
    with serving(repository, "e", trace=TraceSettings(level=TIMES, rate=1, file=str(path))) as server:
        trace = server.tracing.sample("e", no_headers)
        assert trace is not None
        (response,) = send(server, "e", x(3), trace=trace).responses()
        assert response.outputs[0].data.tolist() == [5]
        trace.close()
    assert [item["model_name"] for item in items(path) if "model_name" in item] == ["e", "add"]


def test_a_request_that_is_refused_leaves_no_trace_open(repository: Repository, path: Path) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo")
    with serving(repository, "m", trace=TraceSettings(level=TIMES, rate=1, file=str(path))) as server:
        for tensor in (x(1), Tensor.of("WRONG", np.zeros(1, np.float32))):
            trace = server.tracing.sample("m", no_headers)
            assert trace is not None
            if tensor.name == "WRONG":
                with pytest.raises(TritonError):
                    send(server, "m", tensor, trace=trace)
            else:
                send(server, "m", tensor, trace=trace).responses()
            trace.close()
        eventually(lambda: server.tracing.open_count == 0)
    assert "model" in names(items(path), 1) and "model" not in names(items(path), 2)


def test_tensors_are_traced_going_in_and_coming_out(repository: Repository, path: Path) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo")
    with serving(repository, "m", trace=TraceSettings(level=TraceLevel.TENSORS, rate=1, file=str(path))) as server:
        trace = server.tracing.sample("m", no_headers)
        assert trace is not None
        send(server, "m", x(1, 0.1), trace=trace).responses()
        trace.close()
    tensor = {"data": "1,0.1", "shape": "2", "dtype": "FP32"}
    assert items(path) == [
        {"id": 1, "activity": "TENSOR_QUEUE_INPUT", "tensor": {"name": "X"} | tensor},
        {"id": 1, "activity": "TENSOR_BACKEND_OUTPUT", "tensor": {"name": "Y"} | tensor},
    ]


@pytest.mark.parametrize(
    ("tensor", "data"),
    [
        (Tensor.text("T", "a", b"\xff"), '"a","�"'),
        (Tensor.of("T", np.array([True, False])), "1,0"),
        (Tensor.of("T", np.array([[65], [2]], np.uint8)), "65,2"),
        (Tensor.of("T", np.array([1 / 3, 1e30])), "0.333333,1e+30"),
        (Tensor.of("T", np.array([0.5], np.float16)), "0.5"),
    ],
)
def test_tensors_as_text(tensor: Tensor, data: str) -> None:
    fields = tensor_fields(tensor)
    assert fields["data"] == data and fields["shape"] == ",".join(map(str, tensor.shape))
    json.dumps(fields)


def test_a_long_streams_trace_is_bounded_and_has_its_end(manager: TraceManager, path: Path) -> None:
    trace = one(manager)
    trace.begin("m", 1, "", 1)
    for _ in range(MAX_REPORTS + 100):
        trace.responded(())
    trace.end()
    trace.close()
    manager.close()
    found = names(items(path), 1)
    assert len(found) < MAX_REPORTS + 10 and found[-1] == "REQUEST_END"


def test_the_requests_of_a_trace_are_bounded(manager: TraceManager) -> None:
    trace = one(manager)
    children = [trace.child() for _ in range(MAX_REPORTS + 100)]
    assert children.count(None) == 101 and None not in children[: MAX_REPORTS - 1]
    trace.close()


def test_a_child_that_comes_too_late_is_not_traced(manager: TraceManager, path: Path) -> None:
    trace = one(manager)
    trace.mark("HTTP_RECV_START")
    child = trace.child()
    assert child is not None
    trace.close()
    child.begin("m", 1, "", 1)
    child.end()
    manager.close()
    assert {item["id"] for item in items(path)} == {1}
