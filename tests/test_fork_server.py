"""Fork servers: children get their order, their ends are seen, and nothing is left, whichever process dies first."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmbackend.fork_server import client
from llmbackend.fork_server.client import (
    ForkedProcess,
    ForkServer,
    OutputReader,
    Program,
    restart_pause_s,
    wait_readable,
)
from tests.helpers.processes import is_alive
from tests.helpers.waiting import eventually

PROGRAM = """
import os, signal, subprocess, sys

def prepare(greeting):
    def run(order, gate):
        child = subprocess.Popen(["sleep", "600"]) if order == b"parent" else None
        print(greeting, order.decode(), child.pid if child else "-", flush=True)
        os.read(gate, 1)
        if order == b"abort":
            os.abort()
        sys.exit(3 if order == b"fail" else 0)
    return run
"""


class Child:
    """A forked process, the read end of its output, and the gate that lets it end."""

    def __init__(self, server: ForkServer, order: str) -> None:
        output, output_fd = os.pipe()
        gate_fd, self._gate = os.pipe()
        self.process: ForkedProcess = server.fork(order, output_fd, gate_fd)
        os.close(output_fd)
        os.close(gate_fd)
        with os.fdopen(output) as lines:
            self.said = lines.readline().split()

    def open_gate(self) -> None:
        os.write(self._gate, b"x")

    def close(self) -> None:
        self.process.kill(5.0)
        assert self.process.wait(10.0)
        os.close(self._gate)


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., ForkServer]]:
    (tmp_path / "__init__.py").touch()
    (tmp_path / "program.py").write_text(PROGRAM)
    made: list[ForkServer] = []

    def make(*, ends_children: bool = False) -> ForkServer:
        package = ("a_package", str(tmp_path))
        program = Program("children", "a_package.program", ("hello",), package=package, ends_children=ends_children)
        made.append(ForkServer(program, lambda line: None))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.mark.parametrize(
    ("order", "returncode", "cause"),
    [
        ("end", 0, "It ended with exit code 0."),
        ("fail", 3, "It ended with exit code 3."),
        ("abort", -signal.SIGABRT, "It ended by signal SIGABRT."),
    ],
)
def test_a_child_gets_its_order_and_its_end_is_seen(
    make_server: Callable[..., ForkServer], order: str, returncode: int, cause: str
) -> None:
    child = Child(make_server(), order)
    assert child.said == ["hello", order, "-"] and child.process.pid != os.getpid()
    assert not child.process.wait(0.0)
    child.open_gate()
    assert child.process.wait(10.0)
    assert (child.process.returncode, child.process.cause) == (returncode, cause)
    child.close()


def test_the_kernel_ends_a_child_before_its_host_when_memory_runs_out(make_server: Callable[..., ForkServer]) -> None:
    child = Child(make_server(), "end")
    ours, its = (int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (os.getpid(), child.process.pid))
    assert its == min(ours + 300, 1000)
    child.close()


def test_each_of_two_callers_gets_the_process_id(
    make_server: Callable[..., ForkServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Child(make_server(), "end")
    process, pids = child.process, list[int]()

    def wait_after_another(descriptor: int, timeout_s: float | None) -> bool:
        monkeypatch.setattr(client, "wait_readable", wait_readable)
        pids.append(process.pid)  # the other caller takes the message
        return wait_readable(descriptor, timeout_s)

    monkeypatch.setattr(client, "wait_readable", wait_after_another)
    caller = threading.Thread(target=lambda: pids.append(process.pid), daemon=True)
    caller.start()
    caller.join(10.0)
    assert len(pids) == 2 and pids[0] == pids[1] > 0
    child.close()


def test_children_of_one_server_end_one_by_one(make_server: Callable[..., ForkServer]) -> None:
    server = make_server()
    children = [Child(server, order) for order in ("end", "fail", "end")]
    children[1].open_gate()
    assert children[1].process.wait(10.0) and children[1].process.returncode == 3
    assert all(is_alive(child.process.pid) for child in (children[0], children[2]))
    for child in children:
        child.close()


def test_what_a_child_started_is_killed_with_it(make_server: Callable[..., ForkServer]) -> None:
    child = Child(make_server(), "parent")
    pid, started = child.process.pid, int(child.said[2])
    child.process.kill()
    assert child.process.wait(10.0) and child.process.returncode == -signal.SIGKILL
    eventually(lambda: not is_alive(pid) and not is_alive(started))
    child.close()


@pytest.mark.parametrize("ends_children", [False, True])
def test_a_child_goes_on_or_ends_when_its_server_is_killed(
    make_server: Callable[..., ForkServer], ends_children: bool
) -> None:
    server = make_server(ends_children=ends_children)
    child = Child(server, "parent")
    pid, started = child.process.pid, int(child.said[2])
    assert server._server is not None
    server._server.process.kill()
    assert child.process.wait(10.0 if ends_children else 0.2) is ends_children
    assert child.process.has_lost_server
    if ends_children:
        eventually(lambda: not is_alive(started))
    else:
        assert is_alive(pid)
        os.kill(started, signal.SIGKILL)
        child.open_gate()
        assert child.process.wait(10.0)
    successor = Child(server, "end")
    assert is_alive(successor.process.pid)
    for one in (child, successor):
        one.close()


def test_a_server_leaves_no_process_and_no_descriptor(make_server: Callable[..., ForkServer]) -> None:
    before = os.listdir("/proc/self/fd")
    server = make_server()
    child = Child(server, "end")
    assert server._server is not None
    pid = server._server.process.pid
    child.close()
    server.close()
    assert not Path(f"/proc/{pid}").exists()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_output_is_read_on_while_it_cannot_be_written() -> None:
    """Otherwise what the process prints next would fail, and how it ended would not be known."""
    written: list[str] = []

    def write(line: str) -> None:
        if not written:
            written.append("")
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(line)

    output_fd, process_fd = os.pipe()
    reader = OutputReader(output_fd, write, "output")
    os.write(process_fd, b"first\nsecond\n")
    os.close(process_fd)
    reader.wait()
    assert reader.last_lines == "first\nsecond" and written == ["", "second\n"]


def test_pauses_between_restarts_double_up_to_a_minute() -> None:
    assert [restart_pause_s(count) for count in (0, 1, 2, 3, 100)] == [0.0, 0.5, 1.0, 2.0, 60.0]
