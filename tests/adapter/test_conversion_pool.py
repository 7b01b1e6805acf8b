"""Long requests are converted beside the instance thread: others do not wait for them, and they end like any other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmbackend.adapter.requests.conversion_pool import MAX_THREADS, SHORT_BYTES, Conversion, ConversionPool, is_short
from llmbackend.adapter.requests.request_conversion import RequestConverter
from llmbackend.adapter.tasks.placement import Placement, PrefixIndex
from llmbackend.adapter.tasks.task_map import TaskMap
from llmbackend.core.backend_api import ErrorCode, Tenant, Tensor, TritonError, unavailable
from llmbackend.waiting.queue_policy import QueuePolicies
from llmbackend.waiting.timer import Timer
from tests.helpers.llm_host import MODEL, Call, LlmHost, llm_host
from tests.helpers.thread_shortage import no_new_threads

LONG = "x" * (SHORT_BYTES + 1)
GREEDY = {"max_tokens": 3, "temperature": 0}
ROOM: dict[str, Any] = {"max_model_len": 8192, "num_kv_blocks": 4096}


class Gate:
    """Long conversions wait for `open`; `begun` counts those that have started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.begun = threading.Semaphore(0)
        convert = RequestConverter.convert

        def waiting(converter: RequestConverter, request: Any, *others: Any) -> Any:
            if not is_short(request):
                self.begun.release()
                assert self.open.wait(20)
            return convert(converter, request, *others)

        monkeypatch.setattr(RequestConverter, "convert", waiting)

    def fill(self, host: LlmHost) -> list[Call]:
        """As many long requests as there are threads, all being converted."""
        calls = [host.start(text_input=LONG, sampling=GREEDY) for _ in range(MAX_THREADS)]
        assert all(self.begun.acquire(timeout=20) for _ in calls)
        return calls


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def error_of(call: Call) -> TritonError:
    error = call.wait().error
    assert error is not None
    return error


def test_others_are_served_while_long_requests_are_converted(tmp_path: Path, gate: Gate) -> None:
    with llm_host(tmp_path, **ROOM) as host:
        long = gate.fill(host)
        assert host.infer(text_input="short", sampling=GREEDY).error is None
        gate.open.set()
        texts = {call.wait().text for call in long}
        assert len(texts) == 1 and texts.pop().startswith(LONG)


class NeverSearched(bytes):
    def __contains__(self, part: object) -> bool:
        pytest.fail("a long text was searched, which holds the GIL")


def test_a_long_request_is_recognised_by_its_size_alone() -> None:
    text = np.array([NeverSearched(LONG.encode())], np.object_)
    inputs = {"sampling_parameters": Tensor("sampling_parameters", "BYTES", text.shape, text)}
    request: Any = SimpleNamespace(resume=None, inputs=inputs, parameters={})
    assert not is_short(request)


def test_a_request_ends_at_its_cancel_or_deadline_before_its_conversion_begins(tmp_path: Path, gate: Gate) -> None:
    with llm_host(tmp_path, **ROOM) as host:
        running = gate.fill(host)
        waiting = host.start(text_input=LONG, sampling=GREEDY)
        late = host.start(text_input=LONG, sampling=GREEDY, timeout_us=1000)
        waiting.handle.cancel()
        assert error_of(waiting).code is ErrorCode.CANCELLED
        assert error_of(late).message == "Request timeout expired"
        running[0].handle.cancel()
        gate.open.set()
        assert error_of(running[0]).code is ErrorCode.CANCELLED
        assert running[1].wait().error is None
        assert [call.num_finals for call in (*running, waiting, late)] == [1, 1, 1, 1]
        assert host.metric("llmbackend:refused_requests_total") == 1


def test_what_is_converted_has_a_place_in_the_queue(tmp_path: Path, gate: Gate) -> None:
    bound = 'parameters { key: "max_queue_size" value { string_value: "3" } }'
    with llm_host(tmp_path, bound, **ROOM) as host:
        accepted = [*gate.fill(host), host.start(text_input=LONG, sampling=GREEDY)]
        for text in (LONG, "short"):
            refused = host.infer(text_input=text, sampling=GREEDY).error
            assert refused is not None and refused.code is ErrorCode.UNAVAILABLE
            assert "accepts no more requests: its queue holds 3 requests" in refused.message
        assert host.metric("vllm:num_requests_waiting") == 3
        assert host.metric("llmbackend:refused_requests_total") == 2
        assert host.metric("vllm:request_success_total", finished_reason="error") == 0
        gate.open.set()
        assert [call.wait().error for call in accepted] == [None] * 3
        assert host.infer(text_input=LONG, sampling=GREEDY).error is None


def test_a_long_request_that_is_wrong_is_refused_and_its_place_given_back(tmp_path: Path) -> None:
    bound = 'parameters { key: "max_queue_size" value { string_value: "1" } }'
    with llm_host(tmp_path, bound, **ROOM) as host:
        for _ in range(3):
            error = host.infer(text_input=LONG, sampling={"top_k": -7}).error
            assert error is not None and "'top_k' is -7" in error.message
        assert host.infer(text_input=LONG, sampling=GREEDY).error is None


def test_a_request_for_which_no_thread_can_be_started_is_refused(tmp_path: Path) -> None:
    with llm_host(tmp_path, **ROOM) as host:
        with no_new_threads(f"{MODEL}-conversion"):
            error = error_of(host.infer(text_input=LONG, sampling=GREEDY))
        assert error.code is ErrorCode.UNAVAILABLE and "can't start new thread" in error.message
        assert host.infer(text_input=LONG, sampling=GREEDY).error is None


def test_stop_reaches_requests_that_are_being_converted(tmp_path: Path, gate: Gate) -> None:
    pbtxt = 'parameters { key: "tensor_schema" value { string_value: "tensorrtllm_core" } }'
    with llm_host(tmp_path, pbtxt, mock_step_ms=1.0, **ROOM) as host:
        ids = [65] * SHORT_BYTES
        mine = start_core(host, "me", input_ids=ids, request_output_len=[2000], end_id=[-1])
        other = start_core(host, "you", input_ids=ids, request_output_len=[3], end_id=[-1])
        assert all(gate.begun.acquire(timeout=20) for _ in range(2))
        start_core(host, "me", input_ids=[0], request_output_len=[0], stop=[True]).wait()
        gate.open.set()
        assert mine.wait().error is None
        (length,) = mine.all("sequence_length")
        assert length < len(ids) + 2000
        assert other.wait().all("sequence_length") == [len(ids) + 3]


def start_core(host: LlmHost, request_id: str, **inputs: Any) -> Call:
    kinds = {"stop": np.bool_}
    tensors = tuple(Tensor.of(name, np.array(value, kinds.get(name, np.int32))) for name, value in inputs.items())
    return host.start_tensors(tensors, request_id)


def test_an_unload_refuses_what_waits_and_lets_the_rest_go_on() -> None:
    tasks = TaskMap(QueuePolicies(), 10, Placement(PrefixIndex()))
    begun, go_on = threading.Event(), threading.Event()
    refused: list[str] = []
    handed_on: list[Any] = []
    pool = ConversionPool(
        "m",
        tasks,
        Timer(),
        submit=handed_on.extend,
        stop=lambda task: None,
        on_change=lambda: None,
        on_refused=lambda: None,
    )

    def conversion(number: int) -> Conversion:
        def convert() -> list[Any]:
            begun.set()
            assert go_on.wait(20)
            return [number]

        request: Any = SimpleNamespace(id="", tenant=Tenant(), on_cancel=lambda callback: None)
        refuse = lambda error: refused.append(error.message)  # noqa: E731
        return Conversion(request, 0, 0, convert, refuse)

    for number in range(MAX_THREADS + 2):
        assert pool.start(conversion(number)) == ""
    assert begun.wait(20)
    drain = threading.Thread(target=pool.drain, args=[unavailable("unloaded")])
    drain.start()
    drain.join(0.1)
    assert drain.is_alive()
    go_on.set()
    drain.join(20)
    pool.close()
    assert refused == ["unloaded"] * (MAX_THREADS + 2 - len(handed_on))
    assert 1 <= len(handed_on) <= MAX_THREADS
    assert not tasks.leaked_resources([])
    assert [tasks.reserve(0) for _ in range(10)] == [""] * 10, "places were lost"
