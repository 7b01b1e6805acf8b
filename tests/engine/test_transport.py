"""Both places where an engine can run: the same messages, the same ends, and nothing left behind."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.errors import EngineDeadError
from llmbackend.engine.llm_manager import RUNNERS
from llmbackend.engine.messages import EngineInput
from llmbackend.engine.process import engine_process
from llmbackend.engine.process import transport as transport_module
from llmbackend.engine.process.engine_link import Transport
from llmbackend.engine.process.supervisor import ForkServers
from llmbackend.engine.process.transport import EngineForkServer, ProcessTransport, make_transport
from llmbackend.testing.mock_model import MockRunner
from llmbackend.waiting.wakeup import Wakeup
from tests.helpers.mock_engine import Outcomes, expect_oracle, make_core, make_request, random_requests
from tests.helpers.processes import is_alive
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow

MakeForkServer = Callable[..., EngineForkServer]


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    wakeup = Wakeup()
    yield wakeup
    wakeup.close()


@pytest.fixture
def make_fork_server() -> Iterator[MakeForkServer]:
    made: list[EngineForkServer] = []

    def make(**arguments: Any) -> EngineForkServer:
        made.append(EngineForkServer(EngineConfig(model="mock", **arguments), RUNNERS))
        return made[-1]

    yield make
    for fork_server in made:
        fork_server.close()


@pytest.fixture
def fork_server(make_fork_server: MakeForkServer) -> EngineForkServer:
    return make_fork_server()


@pytest.fixture(params=["inline", "process"])
def transport(request: pytest.FixtureRequest, wakeup: Wakeup, make_fork_server: MakeForkServer) -> Iterator[Transport]:
    transport = make_transport(make_fork_server(transport=request.param), wakeup.fileno())
    start(transport)
    yield transport
    transport.close()


@pytest.fixture
def process(wakeup: Wakeup, fork_server: EngineForkServer) -> Iterator[ProcessTransport]:
    transport = ProcessTransport(fork_server, wakeup.fileno())
    start(transport)
    yield transport
    transport.close()


def start(transport: Transport) -> None:
    transport.launch()
    while transport.receive_started(None) is None:
        pass


def pid_of(transport: ProcessTransport) -> int:
    assert transport._process is not None
    return transport._process.pid


def collect(transport: Transport, count: int) -> Outcomes:
    """Receives until that many requests have ended."""
    outcomes = Outcomes()
    while sum(outcome.finish_reason is not None for outcome in outcomes.of.values()) < count:
        for result in transport.receive():
            outcomes.add(result)
    return outcomes


def test_the_same_tokens_in_both_places(transport: Transport) -> None:
    requests = random_requests(seed=1, count=20)
    transport.send(EngineInput(tuple(requests)))
    outcomes = collect(transport, len(requests))
    for request in requests:
        expect_oracle(outcomes[request.request_id], request)


def test_a_wakeup_ends_the_wait(transport: Transport, wakeup: Wakeup) -> None:
    threading.Timer(0.05, wakeup.set).start()
    assert transport.receive() == []


def test_an_abort_while_it_runs(transport: Transport) -> None:
    transport.send(EngineInput((make_request("r", max_tokens=4000, ignore_eos=True),)))
    transport.receive()
    transport.send(EngineInput(abort=("r",)))
    outcome = collect(transport, 1)["r"]
    assert outcome.finish_reason == "abort"


def folder_of(transport: ProcessTransport) -> Path:
    assert transport._folder is not None
    return transport._folder.path


def test_close_in_the_middle_of_work_leaves_nothing(transport: Transport) -> None:
    transport.send(EngineInput((make_request("r", max_tokens=4000, ignore_eos=True),)))
    transport.receive()
    transport.close()
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"llm-engine", "llm-engine-stderr"}
    if isinstance(transport, ProcessTransport):
        assert not is_alive(pid_of(transport))
        assert not folder_of(transport).exists()


def test_a_kill_waits_for_no_fork_server_that_hangs(
    process: ProcessTransport, fork_server: EngineForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fork server would say how a process ended; while it is stopped it says nothing."""
    monkeypatch.setattr(transport_module, "KILLED_TIMEOUT_S", 0.2)
    assert fork_server._server is not None
    os.kill(fork_server._server.process.pid, signal.SIGSTOP)
    pid = pid_of(process)
    process.close(force=True)
    eventually(lambda: not is_alive(pid))
    assert not folder_of(process).exists()


@pytest.mark.parametrize("kind", ["inline", "process"])
def test_a_model_that_cannot_load_is_one_clear_error(
    kind: str, wakeup: Wakeup, make_fork_server: MakeForkServer
) -> None:
    transport = make_transport(make_fork_server(mock_vocab_size=1, transport=kind), wakeup.fileno())
    with pytest.raises(RuntimeError, match=r"^engine argument 'mock_vocab_size' is 1, expected at least 130$"):
        start(transport)
    transport.close()


def test_descriptors_do_not_leak(wakeup: Wakeup, make_fork_server: MakeForkServer) -> None:
    fork_server = make_fork_server(transport="inline")

    def cycle() -> None:
        transport = make_transport(fork_server, wakeup.fileno())
        start(transport)
        transport.close()

    cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        cycle()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_running_engine_has_no_files_that_a_crash_could_leave(process: ProcessTransport) -> None:
    assert folder_of(process).is_relative_to(tempfile.gettempdir())
    assert not folder_of(process).exists()
    request = make_request("r")
    process.send(EngineInput((request,)))
    expect_oracle(collect(process, 1)["r"], request)


def test_an_engine_whose_socket_was_removed_from_tmp_after_it_connected_is_used(
    wakeup: Wakeup, fork_server: EngineForkServer
) -> None:
    transport = ProcessTransport(fork_server, wakeup.fileno())
    transport.launch()
    assert transport._socket.poll(60_000)
    shutil.rmtree(folder_of(transport))
    while transport.receive_started(None) is None:
        pass
    request = make_request("r")
    transport.send(EngineInput((request,)))
    expect_oracle(collect(transport, 1)["r"], request)
    transport.close()


def test_a_process_id_that_is_not_known_yet_is_not_waited_for(
    process: ProcessTransport, fork_server: EngineForkServer, wakeup: Wakeup
) -> None:
    assert process.pid == pid_of(process) and fork_server._server is not None
    server_pid = fork_server._server.process.pid
    os.kill(server_pid, signal.SIGSTOP)
    transport = ProcessTransport(fork_server, wakeup.fileno())
    transport.launch()
    assert transport.pid is None
    os.kill(server_pid, signal.SIGCONT)
    while transport.receive_started(None) is None:
        pass
    assert transport.pid == pid_of(transport)
    transport.close()


class ScriptedLink:
    """A host that sends a message while the engine has nothing to do; the last one is the shutdown."""

    def __init__(self, *messages: EngineInput) -> None:
        self.messages = deque(map(msgspec.msgpack.encode, messages))

    def recv(self, flags: int = 0) -> bytes:
        if flags:
            raise zmq.Again
        return self.messages.popleft()

    def send(self, data: bytes, flags: int = 0) -> None:
        """Nobody reads it."""

    def poll(self, timeout: int) -> int:
        return len(self.messages) - 1


def test_the_self_check_of_an_engine_delays_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    requests = [EngineInput((make_request(f"r{i}", max_tokens=2),)) for i in range(3)]
    link, num_left = ScriptedLink(*requests, EngineInput(shutdown=True)), []
    monkeypatch.setattr(core, "check_idle", lambda: num_left.append(len(link.messages) - 1))
    engine_process.run(core, link, "")
    assert num_left == [0]


def test_an_idle_engine_tells_of_what_its_self_check_found(
    wakeup: Wakeup, make_fork_server: MakeForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = make_transport(make_fork_server(transport="inline"), wakeup.fileno())
    start(transport)

    def fail(*_: object) -> None:
        raise AssertionError("a block is lost")

    with monkeypatch.context() as broken:
        broken.setattr(EngineCore, "check", fail)
        transport.send(EngineInput((make_request("r", max_tokens=1),)))
        while not any(result.stats.num_invariant_breaches for result in transport.receive()):
            pass
    transport.close()


# --- unexpected ends --------------------------------------------------------------------------------------------------


def test_a_killed_engine_is_noticed_at_once(process: ProcessTransport) -> None:
    process.send(EngineInput((make_request("r", max_tokens=4000, ignore_eos=True),)))
    process.receive()
    os.kill(pid_of(process), signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"^the engine process ended by signal SIGKILL$"):
        while True:
            process.receive()


def test_an_idle_engine_that_is_killed_is_noticed_too(process: ProcessTransport) -> None:
    os.kill(pid_of(process), signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        process.receive()


def test_a_fork_server_that_cannot_start_is_a_dead_engine(
    wakeup: Wakeup, fork_server: EngineForkServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken_interpreter = tmp_path / "python"
    broken_interpreter.write_text("#!/bin/sh\nexit 3\n")
    broken_interpreter.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(broken_interpreter))
    transport = ProcessTransport(fork_server, wakeup.fileno())
    with pytest.raises(EngineDeadError, match=r"ended with exit code 3|could not be started"):
        start(transport)
    transport.close()


def test_an_engine_that_dies_leaves_its_last_words(
    wakeup: Wakeup, make_fork_server: MakeForkServer, tmp_path: Path
) -> None:
    transport = ProcessTransport(make_fork_server(fault_directory=str(tmp_path)), wakeup.fileno())
    start(transport)
    (tmp_path / "escape").touch()
    transport.send(EngineInput((make_request("r"),)))
    with pytest.raises(EngineDeadError, match="ended with exit code 1") as caught:
        while True:
            transport.receive()
    assert caught.value.kind == "exit" and "expected 1 tokens of step 1" in caught.value.details
    transport.close()


def test_one_fork_server_raises_one_engine_after_the_other(wakeup: Wakeup, fork_server: EngineForkServer) -> None:
    pids = []
    for _ in range(3):
        transport = ProcessTransport(fork_server, wakeup.fileno())
        start(transport)
        pids.append(pid_of(transport))
        os.kill(pids[-1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            transport.receive()
        transport.close()
    assert len(set(pids)) == 3 and not any(map(is_alive, pids))


def test_a_fork_server_that_was_killed_is_replaced(wakeup: Wakeup, fork_server: EngineForkServer) -> None:
    for _ in range(2):
        transport = ProcessTransport(fork_server, wakeup.fileno())
        start(transport)
        request = make_request("r")
        assert fork_server._server is not None
        fork_server._server.process.kill()
        transport.send(EngineInput((request,)))
        expect_oracle(collect(transport, 1)["r"], request)
        transport.close()
        assert not is_alive(pid_of(transport))


def test_a_message_to_a_dead_engine_does_not_block(process: ProcessTransport) -> None:
    os.kill(pid_of(process), signal.SIGKILL)

    def is_refused() -> bool:
        try:
            process.send(EngineInput(abort=("unknown",)))
        except EngineDeadError as error:
            assert "SIGKILL" in str(error)
            return True
        return False

    eventually(is_refused)


def test_nonsense_from_the_engine_comes_after_the_results_before_it(
    wakeup: Wakeup, make_fork_server: MakeForkServer, tmp_path: Path
) -> None:
    transport = ProcessTransport(make_fork_server(fault_directory=str(tmp_path)), wakeup.fileno())
    start(transport)
    transport.send(EngineInput((make_request("r", max_tokens=4000, ignore_eos=True),)))
    assert transport.receive()[0].outputs[0].request_id == "r"
    (tmp_path / "malformed").touch()
    with pytest.raises(EngineDeadError, match="a message that cannot be read") as caught:
        while True:
            transport.receive()
    assert caught.value.kind == "message"
    transport.close(force=True)


def test_a_wait_ends_in_time(transport: Transport) -> None:
    assert transport.receive(0.01) == []


def test_an_inline_engine_that_raises_is_a_dead_engine(
    wakeup: Wakeup, make_fork_server: MakeForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("broken table")

    transport = make_transport(make_fork_server(transport="inline"), wakeup.fileno())
    start(transport)
    monkeypatch.setattr(MockRunner, "remove_row", fail)
    transport.send(EngineInput((make_request("r", max_tokens=1),)))
    with pytest.raises(EngineDeadError, match="ArithmeticError: broken table"):
        while True:
            transport.receive()
    transport.close()


def test_signals_that_stop_the_host_do_not_stop_the_engine(process: ProcessTransport) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid_of(process), number)
    request = make_request("r")
    process.send(EngineInput((request,)))
    expect_oracle(collect(process, 1)["r"], request)


HOST = """
import sys, time
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.llm_manager import RUNNERS
from llmbackend.engine.process.transport import EngineForkServer, ProcessTransport
from llmbackend.waiting.wakeup import Wakeup
wakeup = Wakeup()
transport = ProcessTransport(EngineForkServer(EngineConfig(model="mock"), RUNNERS), wakeup.fileno())
transport.launch()
while transport.receive_started(None) is None:
    pass
print(transport._process.pid, flush=True)
transport.receive()
"""


def test_the_engine_does_not_outlive_a_killed_host() -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    engine_pid = int(host.stdout.readline())
    assert is_alive(engine_pid)
    host.kill()
    host.wait()
    host.stdout.close()
    eventually(lambda: not is_alive(engine_pid))


# --- waiting costs nothing --------------------------------------------------------------------------------------------


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_an_idle_engine_uses_no_cpu(process: ProcessTransport) -> None:
    request = make_request("r")
    process.send(EngineInput((request,)))
    collect(process, 1)
    time.sleep(0.2)
    before = cpu_ticks(pid_of(process))
    time.sleep(1.0)
    used = cpu_ticks(pid_of(process)) - before
    assert used <= os.sysconf("SC_CLK_TCK") * 0.03, "a loop that polls or spins would use far more"


def test_wakeups_between_two_clears_are_one(wakeup: Wakeup) -> None:
    for _ in range(1000):
        wakeup.set()
    assert os.eventfd_read(wakeup.fileno()) == 1
    wakeup.clear()
    assert not select.select([wakeup], [], [], 0)[0]
    wakeup.set()
    assert select.select([wakeup], [], [], 0)[0]


def test_a_wakeup_after_close_is_ignored() -> None:
    wakeup = Wakeup()
    wakeup.close()
    wakeup.set()


def test_models_that_differ_in_their_text_alone_share_a_fork_server() -> None:
    """The server of these engines is never started: an inline engine has none."""
    servers = ForkServers()
    config = EngineConfig(model="mock", transport="inline", default_chat_template_kwargs={"a": 1})
    other = EngineConfig(model="mock", transport="inline", chat_template="{{ messages }}", max_logprobs=5)
    first = servers.acquire(config.of_instance(0), RUNNERS)
    assert servers.acquire(other.of_instance(1), RUNNERS) is first
    third = servers.acquire(EngineConfig(model="mock", transport="inline", max_num_seqs=3).of_instance(0), RUNNERS)
    assert third is not first
    for server in (first, first, third):
        servers.release(server)
