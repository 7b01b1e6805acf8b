"""The background loop through its five callbacks, as an owner of a queue sees it."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from llmbackend.engine.errors import EngineDeadError
from llmbackend.engine.llm_manager import Operation
from llmbackend.engine.messages import InferRequest, StepOutput
from llmbackend.engine.process import transport
from llmbackend.engine.process.supervisor import ForkedEngines
from llmbackend.engine.process.transport import ProcessTransport
from tests.helpers.manager_owner import Owner
from tests.helpers.mock_engine import Outcome, expect_oracle, make_core, make_request, random_requests, run_to_end
from tests.helpers.waiting import eventually


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


def test_control_signals_end_a_request(owner: Owner, kind: str) -> None:
    owner.start(transport=kind)
    owner.submit(endless("r"), endless("other"))
    owner.wait_for_tokens("r")
    owner.control("r")
    owner.wait_for_end("r")
    assert owner.reason("r") == "abort"
    assert owner.reason("other") is None
    owner.control("other")
    owner.wait_for_end("other")
    assert not owner.refusals
    owner.submit(make_request("next", max_tokens=1))
    owner.wait_for_end("next")
    owner.wait_for(lambda: bool(owner.stats) and owner.stats[-1].num_free_blocks == owner.stats[-1].num_blocks)


def test_a_stop_that_comes_with_its_request_still_stops_it(owner: Owner) -> None:
    owner.start(transport="inline")
    owner.controls.append(("r", Operation.STOP))
    owner.submit(endless("r"))
    owner.wait_for_end("r")
    assert owner.reason("r") == "abort"


def test_bad_ids_are_reported_and_harm_no_other_request(owner: Owner) -> None:
    owner.start(transport="inline")
    owner.submit(endless("r"))
    owner.wait_for_tokens("r")
    owner.submit(endless("r"))
    owner.control("ghost")
    owner.submit(make_request("last", max_tokens=1))
    owner.wait_for_end("last")
    assert owner.refusals == {"r": "request_id 'r' is already running, expected a unique id"}
    assert owner.reason("r") is None


def test_an_impossible_request_is_answered_with_the_reason(owner: Owner) -> None:
    owner.start(transport="inline", max_model_len=16)
    owner.submit(make_request("long", range(100)))
    owner.wait_for_end("long")
    assert owner.reason("long") == "error"
    assert "prompt_token_ids has 100 tokens, expected at most 15" in owner.outcomes["long"].error


def test_a_failing_callback_does_not_end_the_loop(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Sequence[tuple[str, Operation]]:
        raise ValueError("the owner's bug")

    owner.control_signal = fail  # type: ignore[method-assign]
    owner.start(transport="inline")
    owner.submit(make_request("r", max_tokens=4, ignore_eos=True))
    owner.wait_for_end("r")
    assert "the owner's bug" in caplog.text and not owner.deaths


@pytest.mark.parametrize("count", [1, 4])
def test_outputs_that_the_owner_did_not_take_are_computed_again(owner: Owner, kind: str, count: int) -> None:
    """The first one, which ends its request where it has one token; or the last one of several."""
    send, calls = owner.send_responses, []

    def fail_once(outputs: Sequence[StepOutput]) -> None:
        calls.append(outputs)
        if len(calls) == count:
            raise ValueError("the owner's bug")
        send(outputs)

    owner.send_responses = fail_once  # type: ignore[method-assign]
    owner.start(transport=kind)
    requests = [make_request(f"r{i}", [i, 2], max_tokens=count, min_tokens=count) for i in range(3)]
    owner.submit(*requests)
    expect_all(owner, requests)
    assert ["the owner's bug" in str(cause) for _, cause in owner.deaths] == [True]


def test_requests_whose_pull_failed_are_given_back(owner: Owner, kind: str) -> None:
    """An owner that has given out requests, and fails, is told that the engine is lost, and gives them out again."""
    get, lost = owner.get_requests, owner.engine_lost
    given: list[InferRequest] = []

    def fail_once(room: int) -> Sequence[InferRequest]:
        taken = get(room)
        if taken and not given:
            given.extend(taken)
            raise ValueError("the owner's bug")
        return taken

    def engine_lost(request_ids: Sequence[str], error: EngineDeadError) -> None:
        owner.queue[:0] = given
        lost(request_ids, error)

    owner.get_requests = fail_once  # type: ignore[method-assign]
    owner.engine_lost = engine_lost  # type: ignore[method-assign]
    owner.start(transport=kind)
    requests = long_requests(3)
    owner.submit(*requests)
    expect_all(owner, requests)
    assert [(ids, cause.kind) for ids, cause in owner.deaths] == [((), "loop")]


def engine_pid_of(owner: Owner) -> int:
    transport = owner.manager._supervisor._transport
    assert isinstance(transport, ProcessTransport) and transport._process is not None
    return transport._process.pid


def kill_engine(owner: Owner, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(engine_pid_of(owner), number)


def long_requests(count: int) -> list[InferRequest]:
    return [
        make_request(f"r{i}", [i, 1, 2], max_tokens=40, min_tokens=40, temperature=i % 2, seed=i, logprobs=i % 3)
        for i in range(count)
    ]


def expect_all(owner: Owner, requests: list[InferRequest]) -> None:
    owner.wait_for_end(*(request.request_id for request in requests))
    for request in requests:
        expect_oracle(owner.outcomes[request.request_id], request)


steps_in_flight = pytest.mark.parametrize("mock_steps_in_flight", [0, 2])
"""One step at a time, or steps that overlap."""


@steps_in_flight
def test_requests_survive_their_engine(owner: Owner, mock_steps_in_flight: int) -> None:
    requests = long_requests(6)
    owner.start(
        transport="process",
        mock_step_ms=5,
        mock_steps_in_flight=mock_steps_in_flight,
        max_num_seqs=4,
        num_kv_blocks=6,
        block_size=32,
    )
    owner.submit(*requests)
    for count in (3, 8, 20):
        owner.wait_for(lambda count=count: len(owner.outcomes.get("r0", Outcome()).token_ids) >= count)  # type: ignore[misc]
        kill_engine(owner)
        owner.wait_for(lambda: bool(owner.deaths))
        owner.deaths.clear()
    expect_all(owner, requests)
    owner.manager.check_ready()


def test_constrained_requests_survive_their_engine(owner: Owner) -> None:
    """Each engine gets the vocabulary with its first request that has a grammar."""
    owner.start(transport="process", mock_step_ms=5)
    owner.submit(make_request("plain", max_tokens=3))
    owner.wait_for_end("plain")
    assert owner.num_vocabularies == 0
    grammar = "start: /([a-z]{3}[0-9]{2},){20}/"
    requests = [
        msgspec.structs.replace(make_request(f"r{i}", [i], max_tokens=200, temperature=1.0, seed=i), grammar=grammar)
        for i in range(3)
    ]
    owner.submit(*requests)
    owner.wait_for_tokens("r0")
    kill_engine(owner)
    owner.wait_for_end("r0", "r1", "r2")
    core = make_core()
    core.set_vocabulary(owner.vocabulary())
    undisturbed = run_to_end(core, requests)
    core.close()
    for request in requests:
        found, expected = owner.outcomes[request.request_id], undisturbed[request.request_id]
        assert (found.token_ids, found.finish_reason) == (expected.token_ids, "stop"), found.error
    assert (owner.num_vocabularies, len(owner.deaths)) == (3, 1)


def test_an_engine_is_prepared_for_grammars_before_a_request_needs_it(owner: Owner) -> None:
    """Once; the engine behind it reads the vocabulary with its first request with a grammar, as ever."""
    owner.start(transport="process", mock_step_ms=5)
    owner.manager.prepare_grammars()
    owner.wait_for(lambda: owner.num_vocabularies == 1)
    request = msgspec.structs.replace(make_request("r", [1], max_tokens=50), grammar="start: /[a-z]{9}/")
    owner.submit(request)
    owner.wait_for_end("r")
    assert owner.outcomes["r"].finish_reason == "stop" and owner.num_vocabularies == 1
    owner.submit(endless("plain"))
    owner.wait_for_tokens("plain")
    kill_engine(owner)
    owner.wait_for(lambda: bool(owner.deaths))
    num_tokens = len(owner.outcomes["plain"].token_ids)
    owner.wait_for(lambda: len(owner.outcomes["plain"].token_ids) > num_tokens)
    assert owner.num_vocabularies == 1


def test_an_engine_on_a_thread_of_the_host_is_not_prepared(owner: Owner) -> None:
    owner.start(transport="inline")
    owner.manager.prepare_grammars()
    owner.submit(make_request("plain", max_tokens=3))
    owner.wait_for_end("plain")
    assert owner.num_vocabularies == 0


def test_what_was_live_is_given_back_in_order(owner: Owner) -> None:
    owner.start(transport="process", mock_step_ms=5, max_num_seqs=2)
    owner.submit(endless("b"), endless("a"), endless("queued"))
    owner.wait_for_tokens("a")
    kill_engine(owner)
    owner.wait_for(lambda: bool(owner.deaths))
    [(request_ids, error)] = owner.deaths
    assert request_ids == ("b", "a")
    assert (str(error), error.kind) == ("the engine process ended by signal SIGKILL", "killed")


FAULTS = [(fault, steps) for steps in (0, 2) for fault in ("exit", "segfault", "hang", "escape", "malformed")]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "mock_steps_in_flight"), [*FAULTS, ("lost", 2), ("device-lost", 0)])
def test_requests_survive_a_faulty_step(owner: Owner, tmp_path: Path, fault: str, mock_steps_in_flight: int) -> None:
    requests = long_requests(4)
    owner.start(
        transport="process",
        mock_step_ms=1,
        mock_steps_in_flight=mock_steps_in_flight,
        step_timeout_s=0.5 if fault == "hang" else 60.0,
        fault_directory=str(tmp_path),
    )
    owner.submit(*requests)
    owner.wait_for_tokens("r3")
    (tmp_path / fault).touch()
    expect_all(owner, requests)
    expected = {"exit": "exit", "segfault": "signal", "hang": "hang", "escape": "exit", "malformed": "message"}
    expected |= {"lost": "exit", "device-lost": "exit"}
    assert [error.kind for _, error in owner.deaths] == [expected[fault]]
    owner.manager.check_ready()


@steps_in_flight
@pytest.mark.parametrize("fault", ["exception", "out-of-memory"])
def test_a_step_that_fails_once_loses_no_request(
    owner: Owner, kind: str, tmp_path: Path, fault: str, mock_steps_in_flight: int
) -> None:
    requests = long_requests(4)
    owner.start(
        transport=kind, mock_step_ms=1, mock_steps_in_flight=mock_steps_in_flight, fault_directory=str(tmp_path)
    )
    owner.submit(*requests)
    owner.wait_for_tokens("r3")
    (tmp_path / fault).touch()
    expect_all(owner, requests)
    assert not owner.deaths and not list(tmp_path.iterdir())


@steps_in_flight
def test_a_row_without_logits_ends_alone(owner: Owner, tmp_path: Path, mock_steps_in_flight: int) -> None:
    requests = long_requests(4)
    owner.start(
        transport="inline", mock_step_ms=1, mock_steps_in_flight=mock_steps_in_flight, fault_directory=str(tmp_path)
    )
    owner.submit(*requests)
    owner.wait_for_tokens("r3")
    (tmp_path / "nan-logits").touch()
    owner.wait_for_end("r0", "r1", "r2", "r3")
    assert [owner.reason(request.request_id) for request in requests] == ["error", "length", "length", "length"]
    assert owner.outcomes["r0"].error == "the model computed logits that are not finite for this request"
    expect_all(owner, requests[1:])


def test_an_idle_engine_that_dies_is_replaced(owner: Owner) -> None:
    owner.start(transport="process")
    kill_engine(owner)
    owner.wait_for(lambda: bool(owner.deaths))
    requests = long_requests(2)
    owner.submit(*requests)
    expect_all(owner, requests)


def test_a_stop_while_the_engine_is_down_is_taken(owner: Owner, tmp_path: Path) -> None:
    owner.start(transport="process", mock_step_ms=5, fault_directory=str(tmp_path))
    owner.submit(endless("r"))
    owner.wait_for_tokens("r")
    (tmp_path / "poison").write_text("2")
    owner.wait_for(lambda: len(owner.deaths) >= 2)
    owner.control("r")
    owner.wait_for(lambda: not owner.controls)


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    """This process can open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(taken, soft), hard))
    fillers: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            fillers.append(os.dup(0))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in fillers:
            os.close(descriptor)


def test_a_lack_of_descriptors_is_no_failure_of_the_engine(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    owner.start(transport="process", max_engine_failures=2)
    with no_descriptors_left():
        kill_engine(owner)
        owner.wait_for(lambda: len(owner.deaths) >= 3)
    assert [error.kind for _, error in owner.deaths[1:]] == ["shortage"] * (len(owner.deaths) - 1)
    assert not owner.manager.is_given_up
    assert "the machine lacks resources, 2 times in a row" in caplog.text
    request = make_request("r")
    owner.submit(request)
    owner.wait_for_end("r")
    expect_oracle(owner.outcomes["r"], request)


def test_an_end_for_want_of_memory_is_no_failure_of_the_engine(
    owner: Owner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "num_ended_for_memory", itertools.count().__next__)  # each time there was one more
    owner.start(transport="process", max_engine_failures=2)
    for number in range(1, 4):
        eventually(lambda: owner.manager._supervisor.info is not None)
        kill_engine(owner)
        owner.wait_for(lambda number=number: len(owner.deaths) == number)  # type: ignore[misc]
    assert [error.kind for _, error in owner.deaths] == ["memory"] * 3
    assert not owner.manager.is_given_up
    assert "memory ran out" in caplog.text and "the machine lacks resources, 3 times in a row" in caplog.text


def test_a_fork_server_that_ends_is_noticed_and_replaced_at_once(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    owner.start(transport="process")
    source = owner.manager._supervisor._source
    assert isinstance(source, ForkedEngines)
    fork_server = source.fork_server
    assert fork_server is not None and fork_server._server is not None
    first, engine_pid = fork_server._server.process, engine_pid_of(owner)
    first.kill()
    eventually(lambda: fork_server._server is not None and fork_server._server.process is not first)
    assert not Path(f"/proc/{first.pid}").exists(), "a zombie"
    assert f"(process id {first.pid}) exited with -9: starting another one" in caplog.text
    request = make_request("before")
    owner.submit(request)
    owner.wait_for_end("before")
    expect_oracle(owner.outcomes["before"], request)
    assert engine_pid_of(owner) == engine_pid and not owner.deaths, "the engine went on"
    second = fork_server._server.process
    kill_engine(owner)
    owner.wait_for(lambda: bool(owner.deaths))
    request = make_request("after")
    owner.submit(request)
    owner.wait_for_end("after")
    expect_oracle(owner.outcomes["after"], request)
    assert fork_server._server.process is second and len(owner.deaths) == 1


def test_an_engine_that_keeps_dying_is_given_up_and_still_tried(owner: Owner, tmp_path: Path) -> None:
    owner.start(transport="process", fault_directory=str(tmp_path), max_engine_failures=2)
    (tmp_path / "poison").write_text("2")
    owner.submit(make_request("r"))
    owner.wait_for(lambda: len(owner.deaths) == 2)
    assert owner.manager.is_given_up
    with pytest.raises(RuntimeError, match=r"failed 2 times in a row, the last time: .*SIGSEGV"):
        owner.manager.check_ready()
    (tmp_path / "poison").unlink()
    owner.wait_for_end("r")
    owner.manager.check_ready()


def test_engines_that_die_before_a_step_are_given_up_whatever_else_they_say(owner: Owner) -> None:
    """Each one tells of its prefix cache before it is killed."""
    given_up, lost = [], owner.engine_lost

    def engine_lost(request_ids: Sequence[str], error: EngineDeadError) -> None:
        given_up.append(owner.manager.is_given_up)
        lost(request_ids, error)

    owner.engine_lost = engine_lost  # type: ignore[method-assign]
    owner.start(transport="process", max_engine_failures=2)
    owner.manager.follow_prefixes(True)
    for number in (1, 2):
        eventually(lambda number=number: len(owner.stats) == number)  # type: ignore[misc]
        kill_engine(owner)
        owner.wait_for(lambda number=number: len(owner.deaths) == number)  # type: ignore[misc]
    assert given_up == [False, True]
    owner.submit(request := make_request("r"))
    owner.wait_for_end("r")
    expect_oracle(owner.outcomes["r"], request)
    kill_engine(owner)
    owner.wait_for(lambda: len(owner.deaths) == 3)
    assert not given_up[2], "a step was finished"


def test_shutdown_while_the_engine_is_down(owner: Owner, tmp_path: Path) -> None:
    owner.start(transport="process", fault_directory=str(tmp_path))
    (tmp_path / "poison").write_text("2")
    owner.submit(make_request("r"))
    owner.wait_for(lambda: len(owner.deaths) >= 2)
    owner.manager.shutdown()
    with pytest.raises(RuntimeError, match="not running"):
        owner.manager.check_ready()


def test_a_stuck_engine_is_not_ready(owner: Owner) -> None:
    owner.start(transport="inline", mock_step_ms=500, stall_timeout_s=0.05)
    owner.manager.check_ready()
    time.sleep(0.1)
    owner.manager.check_ready()
    owner.submit(make_request("r", max_tokens=1))

    def is_stuck() -> bool:
        try:
            owner.manager.check_ready()
        except RuntimeError as error:
            assert "1 requests and finished no step" in str(error)
            return True
        return False

    eventually(is_stuck)
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


def test_a_loop_for_which_there_is_no_thread_leaves_nothing(owner: Owner) -> None:
    before = len(os.listdir("/proc/self/fd"))
    stack_bytes = threading.stack_size(1 << 48)  # more than there is address space
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            owner.start(transport="process")
    finally:
        threading.stack_size(stack_bytes)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_host_side_imports_no_torch() -> None:
    code = (
        "import sys, llmbackend.engine.llm_manager; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_managers_share_one_queue(owner: Owner) -> None:
    other = Owner()
    other.changed, other.outcomes, other.refusals = owner.changed, owner.outcomes, owner.refusals
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
