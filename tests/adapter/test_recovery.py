"""Streams survive the death of their engine: in the real host, with real engine processes that really die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbackend.core.backend_api import ErrorCode
from tests.helpers.llm_host import MODEL, Call, LlmHost, llm_host
from tests.helpers.waiting import eventually, wait_for_self_check

POISON = 1
"""A byte that is no text: the mock model's token of chr(1)."""
TWO = "instance_group [ { kind: KIND_CPU, count: 2 } ]"


def children() -> set[int]:
    """The fork servers: processes that this one started and that have not ended."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


def engines(before: set[int]) -> set[int]:
    """What those fork servers that came since `before` have forked."""
    found: set[int] = set()
    for fork_server in children() - before:
        found |= set(map(int, Path(f"/proc/{fork_server}/task/{fork_server}/children").read_text().split()))
    return found


def sampling(index: int) -> dict[str, Any]:
    """Greedy and seeded, with all that must be carried over: penalties, logprobs, stop strings, minimum length."""
    return {
        "max_tokens": 40,
        "min_tokens": 20,
        "temperature": [0, 1.0, 0.7][index % 3],
        "seed": index,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "logprobs": index % 2,
        "stop": ["zzz", f"{index}"],
    }


def run_all(host: LlmHost, count: int, disturb: Callable[[list[Call]], None] | None = None) -> list[Any]:
    """Text, ids, logprobs and ends of `count` requests, half of them streams."""
    calls = [
        host.start(
            text_input=f"request {index}",
            stream=index % 2 == 0,
            sampling=sampling(index),
            return_output_ids=True,
            return_logprobs=True,
            return_finish_reason=True,
            return_cumulative_logprob=True,
        )
        for index in range(count)
    ]
    if disturb is not None:
        disturb(calls)
    for call in calls:
        call.wait()
        assert call.error is None, call.error
        assert call.num_finals == 1
    return [
        (call.text, call.all("output_ids"), call.all("finish_reason")[-1], call.all("cumulative_logprob")[-1])
        for call in calls
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("group", "steps_in_flight"), [("", 2), (TWO, 0)])
def test_kills_change_no_token(tmp_path: Path, group: str, steps_in_flight: int) -> None:
    """One engine whose steps overlap, or two that compute one step at a time."""
    before = children()
    engine: dict[str, Any] = {"transport": "process", "mock_step_ms": 4.0, "max_num_seqs": 6, "num_kv_blocks": 40}
    engine["mock_steps_in_flight"] = steps_in_flight

    def kill_thrice(calls: list[Call]) -> None:
        calls[0].first.wait(10)
        for number in range(1, 4):
            os.kill(min(engines(before)), signal.SIGKILL)
            eventually(lambda number=number: host.metric("llmbackend:engine_restarts_total", cause="killed") == number)  # type: ignore[misc]
            eventually(lambda: len(engines(before)) == (2 if group else 1))
            time.sleep(0.3)

    with llm_host(tmp_path, group, **engine) as host:
        undisturbed = run_all(host, 12)
        assert run_all(host, 12, kill_thrice) == undisturbed
        assert host.server.model_is_ready(MODEL)
        recovered = host.metric("llmbackend:recovered_requests_total")
        assert recovered and recovered == host.metric("llmbackend:engine_recovery_seconds_count")
        wait_for_self_check()
        assert host.metric("llmbackend:invariant_breaches_total") == 0


def test_the_other_instance_takes_over_at_once(tmp_path: Path) -> None:
    before = children()
    with llm_host(tmp_path, TWO, transport="process", max_num_seqs=1, mock_step_ms=5.0) as host:
        calls = [host.start(text_input="a", stream=True, sampling={**sampling(0), "min_tokens": 40}) for _ in range(2)]
        assert all(call.first.wait(10) for call in calls)
        os.kill(min(engines(before)), signal.SIGKILL)
        assert host.server.model_is_ready(MODEL)
        assert calls[0].wait().text == calls[1].wait().text


def test_a_request_that_kills_the_engine_fails_alone(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    engine: dict[str, Any] = {"transport": "process", "mock_step_ms": 3.0, "fault_directory": str(faults)}
    with llm_host(tmp_path / "repository", **engine) as host:
        undisturbed = run_all(host, 8)
        (faults / "poison").write_text(str(POISON))
        poison: list[Call] = []

        def submit_poison(calls: list[Call]) -> None:
            calls[0].first.wait(10)
            poison.append(host.start(text_input="bad \x01 text", stream=True, sampling=sampling(0)))

        assert run_all(host, 8, submit_poison) == undisturbed
        error = poison[0].wait().error
        assert error is not None and error.code is ErrorCode.INTERNAL
        assert error.message == (
            "the request was ended because the engine died 2 times while running it: "
            "the engine process ended by signal SIGSEGV"
        )
        assert host.metric("llmbackend:poison_requests_total") == 1
        assert host.server.model_is_ready(MODEL)


def test_a_model_whose_engine_stays_dead_refuses_and_comes_back(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    engine: dict[str, Any] = {
        "transport": "process",
        "fault_directory": str(faults),
        "max_engine_failures": 2,
        "max_num_seqs": 1,
    }
    with llm_host(tmp_path / "repository", **engine) as host:
        (faults / "poison").write_text("32")
        calls = [host.start(text_input="a b", sampling=sampling(0)) for _ in range(3)]
        errors = [call.wait().error for call in calls]
        assert all(error is not None for error in errors)
        assert ErrorCode.UNAVAILABLE in {error.code for error in errors if error is not None}
        eventually(lambda: not host.server.model_is_ready(MODEL))
        refused = host.infer(text_input="a b", sampling=sampling(0)).error
        assert refused is not None and refused.code is ErrorCode.UNAVAILABLE
        assert "failed 2 times in a row" in refused.message
        (faults / "poison").unlink()
        eventually(lambda: host.server.model_is_ready(MODEL))
        assert host.infer(text_input="a b", sampling=sampling(0)).error is None


def test_a_request_is_cancelled_while_its_engine_is_down(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    engine: dict[str, Any] = {"transport": "process", "mock_step_ms": 3.0, "fault_directory": str(faults)}
    with llm_host(tmp_path / "repository", **engine) as host:
        call = host.start(text_input="a b", stream=True, sampling={"max_tokens": 200, "ignore_eos": True})
        call.first.wait(10)
        (faults / "poison").write_text("32")
        eventually(lambda: (host.metric("llmbackend:engine_restarts_total", cause="signal") or 0) >= 1)
        call.handle.cancel()
        error = call.wait().error
        assert error is not None and error.code is ErrorCode.CANCELLED
        (faults / "poison").unlink()
        assert host.infer(text_input="a b", sampling=sampling(0)).error is None


def test_a_request_ends_at_its_deadline_running_or_queued(tmp_path: Path) -> None:
    with llm_host(tmp_path, max_num_seqs=1, mock_step_ms=20.0) as host:
        long = {"max_tokens": 200, "ignore_eos": True}
        running = host.start(text_input="a", stream=True, sampling=long)
        running.first.wait(10)
        queued = host.start(text_input="a", sampling=long, timeout_us=50_000)
        error = queued.wait().error
        assert error is not None
        assert (error.code, error.message) == (ErrorCode.UNAVAILABLE, "Request timeout expired")
        assert not running.num_finals
        running.handle.cancel()
        late = host.start(text_input="a", stream=True, sampling=long, timeout_us=200_000)
        error = late.wait().error
        assert error is not None and error.message == "Request timeout expired"
        assert len(late.responses) > 1
        assert host.metric("llmbackend:refused_requests_total") == 1
        assert host.metric("vllm:request_success_total", finished_reason="abort") == 2


def test_the_model_limits_every_request(tmp_path: Path) -> None:
    limits = {"request_timeout_s": "0.2", "max_prompt_tokens": "5", "max_output_tokens": "3"}
    entries = "".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in limits.items())
    with llm_host(tmp_path, entries, mock_step_ms=1.0) as host:
        error = host.infer(text_input="too long").error
        assert error is not None and error.message == "the prompt has 8 tokens, expected at most 5 (max_prompt_tokens)"
        short = host.infer(text_input="ok", sampling={"max_tokens": 99, "ignore_eos": True}, return_output_ids=True)
        assert len(short.all("output_ids")) == 3


@pytest.mark.parametrize("action", ["REJECT", "DELAY"])
def test_the_queue_policy_of_the_model_holds_in_the_backends_queue(tmp_path: Path, action: str) -> None:
    policy = f"default_queue_policy {{ timeout_action: {action} default_timeout_microseconds: 60000 }}"
    with llm_host(tmp_path, f"dynamic_batching {{ {policy} }}", max_num_seqs=1, mock_step_ms=10.0) as host:
        running = host.start(text_input="a", stream=True, sampling={"max_tokens": 20, "ignore_eos": True})
        running.first.wait(10)
        error = host.start(text_input="a", sampling={"max_tokens": 1}).wait().error
        assert (error is None) == (action == "DELAY")
        assert host.metric("llmbackend:refused_requests_total") == (0 if action == "DELAY" else 1)
        assert running.wait().error is None


def test_a_choice_that_expires_in_the_queue_ends_the_others_of_its_answer(tmp_path: Path) -> None:
    policy = "default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 60000 }"
    with llm_host(tmp_path, f"dynamic_batching {{ {policy} }}", max_num_seqs=1, mock_step_ms=10.0) as host:
        call = host.infer(text_input="a", sampling={"n": 2, "max_tokens": 200, "ignore_eos": True, "seed": 1})
        assert call.error is not None and "Request timeout expired" in call.error.message
        assert host.metric("vllm:generation_tokens_total") < 100  # type: ignore[operator]


def test_a_level_of_its_own_goes_first_and_has_its_own_bound(tmp_path: Path) -> None:
    batching = """dynamic_batching { priority_levels: 2 default_priority_level: 2
      priority_queue_policy { key: 1 value { max_queue_size: 1 } } }"""
    with llm_host(tmp_path, batching, max_num_seqs=1, mock_step_ms=10.0) as host:
        running = host.start(text_input="a", stream=True, sampling={"max_tokens": 10, "ignore_eos": True})
        running.first.wait(10)
        ends: list[str] = []
        ordinary = host.start(text_input="b", sampling={"max_tokens": 2}, on_final=lambda: ends.append("ordinary"))
        eventually(lambda: host.metric("vllm:num_requests_waiting") == 1)
        urgent = host.start(
            text_input="c", sampling={"max_tokens": 2}, priority=1, on_final=lambda: ends.append("urgent")
        )
        eventually(lambda: host.metric("vllm:num_requests_waiting") == 2)
        refused = host.infer(text_input="d", sampling={"max_tokens": 2}, priority=1).error
        assert refused is not None and "its queue holds 1 requests of this priority" in refused.message
        assert ordinary.wait().error is None and urgent.wait().error is None
        assert ends == ["urgent", "ordinary"]
