"""An error inside the adapter's callbacks loses no request: each goes on with the same tokens, or is answered once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbackend.adapter.activity import InstanceReports
from llmbackend.adapter.lora import LoraRegistry
from llmbackend.adapter.metrics import LlmMetrics
from llmbackend.adapter.model_instance_state import ModelInstanceState
from llmbackend.adapter.model_state import ModelState
from llmbackend.adapter.requests.conversion_pool import SHORT_BYTES
from llmbackend.adapter.tasks.infer_task import InferTask
from llmbackend.adapter.tasks.prefix_routing import PrefixRouting
from llmbackend.adapter.tasks.task_map import TaskMap
from llmbackend.core.backend_api import ErrorCode
from tests.helpers.llm_host import Call, LlmHost, llm_host
from tests.helpers.waiting import wait_for_self_check

GREEDY = {"max_tokens": 30, "min_tokens": 30, "temperature": 0}


class FailsOnce:
    """Takes the place of a method, and raises in its first call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        method: Callable[..., Any] = getattr(owner, name)
        self.num_failures = 0

        def failing(*arguments: Any) -> Any:
            if not self.num_failures:
                self.num_failures += 1
                raise KeyError("a bug")
            return method(*arguments)

        monkeypatch.setattr(owner, name, failing)


def start(host: LlmHost, count: int = 4, **changes: Any) -> list[Call]:
    """Every other one is a stream."""
    texts = [f"request {index}" for index in range(count)]
    return [
        host.start(text_input=text, stream=index % 2 == 0, sampling=GREEDY | changes)
        for index, text in enumerate(texts)
    ]


def texts(calls: list[Call]) -> list[str]:
    assert [call.wait().error for call in calls] == [None] * len(calls)
    assert [call.num_finals for call in calls] == [1] * len(calls)
    return [call.text for call in calls]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (LlmMetrics, "taken_by_engine"),
        (InstanceReports, "taken"),
        (TaskMap, "record_outputs"),
        (LlmMetrics, "outputs"),
    ],
)
def test_requests_go_on_with_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    with llm_host(tmp_path, mock_step_ms=1.0) as host:
        undisturbed = texts(start(host))
        fails = FailsOnce(monkeypatch, owner, name)
        assert texts(start(host)) == undisturbed
        assert fails.num_failures == 1
        wait_for_self_check()
        assert host.metric("llmbackend:invariant_breaches_total") == 0


def test_a_request_that_cannot_be_given_to_the_engine_is_answered_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with llm_host(tmp_path, mock_step_ms=1.0) as host:
        undisturbed = texts(start(host))
        FailsOnce(monkeypatch, InferTask, "resume_request")
        calls = start(host)
        errors = [call.wait().error for call in calls]
        failed = [error for error in errors if error is not None]
        assert [(error.code, error.message) for error in failed] == [
            (ErrorCode.INTERNAL, "the request could not be sent to an engine: 'a bug'")
        ]
        others = [(call.text, text) for call, text in zip(calls, undisturbed, strict=True) if call.error is None]
        assert len(others) == 3 and all(text == before for text, before in others)


@pytest.mark.parametrize(("name", "reason"), [("add_output", "error"), ("respond", "length")])
def test_a_request_whose_output_cannot_be_sent_is_answered_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    """It fails before its end is counted, or after that."""
    with llm_host(tmp_path) as host:
        FailsOnce(monkeypatch, InferTask, name)
        call = host.infer(text_input="a", sampling={"max_tokens": 1, "min_tokens": 1, "temperature": 0})
        assert call.num_finals == 1 and call.error is not None
        assert (call.error.code, call.error.message) == (
            ErrorCode.INTERNAL,
            "the response could not be built: 'a bug'",
        )
        assert host.metric("vllm:request_success_total", finished_reason=reason) == 1
        assert host.metric("vllm:e2e_request_latency_seconds_count") == 1


def test_each_cancelled_request_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the one whose end cannot be counted."""
    with llm_host(tmp_path, mock_step_ms=5.0) as host:
        calls = start(host, max_tokens=200, min_tokens=200)
        assert all(call.first.wait(20) for call in calls[::2])
        fails = FailsOnce(monkeypatch, LlmMetrics, "finished")
        for call in calls:
            call.handle.cancel()
        assert [call.wait().num_finals for call in calls] == [1] * len(calls)
        assert {call.error.code for call in calls if call.error} == {ErrorCode.CANCELLED}
        assert fails.num_failures == 1
        assert texts(start(host, count=1))


@pytest.mark.parametrize(
    ("owner", "name"),
    [(LoraRegistry, "engine_ended"), (LlmMetrics, "engine_lost"), (InferTask, "engine_died")],
)
def test_the_requests_of_a_dead_engine_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    with llm_host(tmp_path, mock_step_ms=3.0) as host:
        undisturbed = texts(start(host))
        fails = FailsOnce(monkeypatch, owner, name)
        dies = FailsOnce(monkeypatch, TaskMap, "record_outputs")
        assert texts(start(host)) == undisturbed
        assert fails.num_failures == dies.num_failures == 1


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(TaskMap, "admit"), (TaskMap, "enqueue"), (PrefixRouting, "place"), (ModelState, "wake_engines")],
)
def test_a_request_that_cannot_be_queued_is_answered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, is_long: bool
) -> None:
    """Long requests are converted, and queued, on another thread than the instance's."""
    text = "x" * (SHORT_BYTES + 1 if is_long else 3)
    with llm_host(tmp_path, max_model_len=8192, num_kv_blocks=4096) as host:
        fails = FailsOnce(monkeypatch, owner, name)
        call = host.start(text_input=text, sampling={"max_tokens": 3, "temperature": 0}).wait()
        assert fails.num_failures == 1 and call.num_finals == 1
        assert call.error is None or call.error.message == "the request could not be queued: 'a bug'"
        assert host.infer(text_input=text, sampling={"max_tokens": 3, "temperature": 0}).error is None
        assert host.metric("vllm:num_requests_waiting") == 0


def test_a_long_request_whose_conversion_fails_is_answered_and_its_place_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 'parameters { key: "max_queue_size" value { string_value: "1" } }'
    with llm_host(tmp_path, bound, max_model_len=8192, num_kv_blocks=4096) as host:
        FailsOnce(monkeypatch, ModelInstanceState, "_convert")
        text, sampling = "x" * (SHORT_BYTES + 1), {"max_tokens": 3, "temperature": 0}
        error = host.infer(text_input=text, sampling=sampling).error
        assert error is not None and error.message == "the request could not be converted: 'a bug'"
        assert host.infer(text_input=text, sampling=sampling).error is None
