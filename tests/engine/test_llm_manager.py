"""The background loop through its five callbacks, as an owner of a queue sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mock_engine import Outcome, expect_oracle, make_request, random_requests

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.infer_request import EngineStats, InferRequest, StepOutput
from llmbackend.engine.llm_manager import LlmManager, Operation, StatusType
from llmbackend.engine.transport import ProcessTransport


class Owner:
    """What ModelState is to a manager: a queue, a map of outcomes, a list of control signals."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queue: list[InferRequest] = []
        self.controls: list[tuple[str, Operation]] = []
        self.outcomes: dict[str, Outcome] = {}
        self.statuses: list[tuple[str, str, StatusType]] = []
        self.stats: list[EngineStats] = []
        self.rooms: list[int] = []
        self.manager: LlmManager

    def start(self, **arguments: Any) -> Owner:
        stall_timeout_s = arguments.pop("stall_timeout_s", 60.0)
        self.manager = LlmManager(
            EngineConfig(model="mock", **arguments),
            self.get_requests,
            self.send_responses,
            self.control_signal,
            self.stats.append,
            lambda *status: self.statuses.append(status),
            stall_timeout_s=stall_timeout_s,
        )
        self.manager.start()
        return self

    def get_requests(self, room: int) -> Sequence[InferRequest]:
        self.rooms.append(room)
        with self.changed:
            taken, self.queue = self.queue[:room], self.queue[room:]
        return taken

    def send_responses(self, outputs: Sequence[StepOutput]) -> None:
        with self.changed:
            for output in outputs:
                self.outcomes.setdefault(output.request_id, Outcome()).add(output)
            self.changed.notify_all()

    def control_signal(self) -> Sequence[tuple[str, Operation]]:
        taken, self.controls = self.controls, []
        return taken

    def submit(self, *requests: InferRequest) -> None:
        with self.changed:
            self.queue.extend(requests)
        self.manager.wake()

    def control(self, request_id: str, operation: Operation = Operation.STOP) -> None:
        self.controls.append((request_id, operation))
        self.manager.wake()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=20), "it did not come about"

    def wait_for_end(self, *request_ids: str) -> None:
        self.wait_for(lambda: all(self.reason(request_id) for request_id in request_ids))

    def wait_for_tokens(self, request_id: str) -> None:
        self.wait_for(lambda: bool(self.outcomes.get(request_id, Outcome()).token_ids))

    def reason(self, request_id: str) -> str | None:
        return self.outcomes.get(request_id, Outcome()).finish_reason


@pytest.fixture(params=["inline", "process"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.manager.shutdown()
    assert not {thread.name for thread in threading.enumerate()} & {"llm-manager", "llm-engine", "llm-engine-stderr"}


def endless(request_id: str) -> InferRequest:
    return make_request(request_id, max_tokens=4000, ignore_eos=True)


def test_requests_come_back_with_the_right_tokens(owner: Owner, kind: str) -> None:
    requests = random_requests(seed=2, count=60)
    owner.start(transport=kind, max_num_seqs=8)
    owner.submit(*requests)
    owner.wait_for_end(*(request.request_id for request in requests))
    for request in requests:
        expect_oracle(owner.outcomes[request.request_id], request)
    owner.manager.check_ready()


def test_it_pulls_no_more_than_it_has_room_for(owner: Owner) -> None:
    owner.start(transport="inline", max_num_seqs=3)
    owner.submit(*(endless(str(i)) for i in range(5)))
    owner.wait_for_tokens("2")
    assert [request.request_id for request in owner.queue] == ["3", "4"]
    assert max(owner.rooms) <= 3
    owner.control("1")
    owner.wait_for_tokens("3")
    assert [request.request_id for request in owner.queue] == ["4"]


def test_requests_that_waited_before_the_start_are_pulled(owner: Owner) -> None:
    request = make_request("early")
    owner.queue.append(request)
    owner.start(transport="inline")
    owner.wait_for_end("early")
    expect_oracle(owner.outcomes["early"], request)


@pytest.mark.parametrize("operation", list(Operation))
def test_control_signals_end_a_request(owner: Owner, kind: str, operation: Operation) -> None:
    owner.start(transport=kind)
    owner.submit(endless("r"), endless("other"))
    owner.wait_for_tokens("r")
    owner.control("r", operation)
    owner.wait_for_end("r")
    assert owner.reason("r") == "abort"
    assert owner.reason("other") is None
    owner.control("other", operation)
    owner.wait_for_end("other")
    assert owner.statuses[-1] == ("other", "", StatusType.CONTROL_SIGNAL_STATUS)
    owner.submit(make_request("next", max_tokens=1))
    owner.wait_for_end("next")
    owner.wait_for(lambda: bool(owner.stats) and owner.stats[-1].num_free_blocks == owner.stats[-1].num_blocks)


def test_a_stop_that_comes_with_its_request_still_stops_it(owner: Owner) -> None:
    owner.start(transport="inline")
    owner.controls.append(("r", Operation.STOP))
    owner.submit(endless("r"))
    owner.wait_for_end("r")
    assert owner.reason("r") == "abort"


def test_bad_ids_are_reported_and_hurt_nobody(owner: Owner) -> None:
    owner.start(transport="inline")
    owner.submit(endless("r"))
    owner.wait_for_tokens("r")
    owner.submit(endless("r"))
    owner.control("ghost")
    owner.submit(make_request("last", max_tokens=1))
    owner.wait_for_end("last")
    texts = {(request_id, kind): text for request_id, text, kind in owner.statuses}
    assert "already live" in texts["r", StatusType.REQUEST_ENQUEUE_STATUS]
    assert "'ghost' is not live" in texts["ghost", StatusType.CONTROL_SIGNAL_STATUS]
    assert texts["last", StatusType.REQUEST_ENQUEUE_STATUS] == ""
    assert owner.reason("r") is None


def test_an_impossible_request_is_answered_with_the_reason(owner: Owner) -> None:
    owner.start(transport="inline", max_model_len=16)
    owner.submit(make_request("long", range(100)))
    owner.wait_for_end("long")
    assert owner.reason("long") == "error"
    assert "prompt_token_ids has 100 tokens, expected at most 15" in owner.outcomes["long"].error


def test_a_failing_callback_does_not_end_the_loop(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    send = owner.send_responses
    failures: list[bool] = []

    def fail_once(outputs: Sequence[StepOutput]) -> None:
        if not failures:
            failures.append(True)
            raise ValueError("the owner's bug")
        send(outputs)

    owner.send_responses = fail_once  # type: ignore[method-assign]
    owner.start(transport="inline")
    owner.submit(make_request("lost", max_tokens=1))
    owner.submit(make_request("r", max_tokens=4, ignore_eos=True))
    owner.wait_for_end("r")
    assert "the owner's bug" in caplog.text


def test_a_dead_engine_ends_its_requests_and_is_not_ready(owner: Owner) -> None:
    owner.start(transport="process", mock_step_ms=1, max_num_seqs=2)
    queued = [f"queued {i}" for i in range(5)]
    owner.submit(endless("a"), endless("b"), *map(endless, queued))
    owner.wait_for_tokens("a")
    transport = owner.manager._transport
    assert isinstance(transport, ProcessTransport) and transport._process is not None
    os.kill(transport._process.pid, signal.SIGKILL)
    owner.wait_for_end("a", "b", *queued)
    assert {owner.reason(name) for name in ("a", "b", *queued)} == {"error"}
    assert owner.outcomes["a"].error == "the engine died: the engine process ended by signal SIGKILL"
    with pytest.raises(RuntimeError, match="the engine died"):
        owner.manager.check_ready()
    owner.submit(make_request("late"))
    owner.wait_for_end("late")
    assert "the engine died" in owner.outcomes["late"].error


def test_a_stuck_engine_is_not_ready(owner: Owner) -> None:
    owner.start(transport="inline", mock_step_ms=500, stall_timeout_s=0.05)
    owner.manager.check_ready()
    time.sleep(0.1)
    owner.manager.check_ready()
    owner.submit(make_request("r", max_tokens=1))
    deadline_s = time.monotonic() + 20
    with pytest.raises(RuntimeError, match="1 requests and finished no step"):
        while time.monotonic() < deadline_s:
            owner.manager.check_ready()
            time.sleep(0.01)
    owner.wait_for_end("r")
    owner.manager.check_ready()


def test_shutdown_ends_what_is_outstanding(owner: Owner, kind: str) -> None:
    owner.start(transport=kind)
    owner.submit(endless("a"), endless("b"))
    owner.wait_for_tokens("b")
    owner.manager.shutdown()
    assert owner.reason("a") == owner.reason("b") == "abort"
    with pytest.raises(RuntimeError, match="not running"):
        owner.manager.check_ready()
    owner.manager.wake()
    owner.manager.shutdown()


def test_a_model_that_cannot_load_leaves_nothing(owner: Owner, kind: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="'mock_vocab_size' is 1"):
        owner.start(transport=kind, mock_vocab_size=1)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(RuntimeError, match="not running"):
        owner.manager.check_ready()


def test_the_host_side_imports_no_torch() -> None:
    code = (
        "import sys, llmbackend.engine.llm_manager; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_managers_share_one_queue(owner: Owner) -> None:
    other = Owner()
    other.changed, other.outcomes, other.statuses = owner.changed, owner.outcomes, owner.statuses
    other.get_requests = lambda room: owner.get_requests(min(room, 2))  # type: ignore[method-assign]
    owner.start(transport="inline", max_num_seqs=4)
    other.start(transport="inline", max_num_seqs=4)
    try:
        requests = random_requests(seed=3, count=40)
        owner.submit(*requests)
        other.manager.wake()
        owner.wait_for_end(*(request.request_id for request in requests))
        for request in requests:
            expect_oracle(owner.outcomes[request.request_id], request)
    finally:
        other.manager.shutdown()


def test_the_loop_sleeps_while_nothing_happens(owner: Owner) -> None:
    owner.start(transport="process")
    owner.submit(make_request("r"))
    owner.wait_for_end("r")
    time.sleep(0.2)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "llm-manager"]
    stat = Path(f"/proc/self/task/{thread.native_id}/stat")

    def ticks() -> int:
        fields = stat.read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    time.sleep(0.5)
    assert ticks() - before <= 1
