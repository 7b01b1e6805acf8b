"""Checks what a test must not leave behind: processes, threads, file descriptors; and leaks in hosts and engines.

Used by tests/conftest.py, which asks before and after every test. Independent of what a test does.
A new child process is always an error, except the workers that a shared server keeps for large bodies. New threads and
descriptors are errors too, unless a fixture of a module or the session keeps a server in this process: such a server,
and gRPC, open connections and start pool threads when they are first needed. Then only threads of engines and models
are checked. Files, sockets and event loops that are dropped unclosed are errors already (ResourceWarning,
pyproject.toml), but only when the collector finds them; a new descriptor starts a collection at once, so that the test
that caused it fails.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmbackend.engine.engine_core import EngineCore

WAIT_S = 5.0
"""How long what is on its way out (a daemon thread after its last callback, a peer's socket) may take."""
POLL_S = 0.002
OURS = ("llm-", "python-", "unload-", "load-", "model-load", "reaper", "timer", "startup")
"""How the names of threads begin that an engine, a model or a host owns."""

WORKER = "llmbackend.frontends.worker_process"
"""In the command of a process that a server keeps for large bodies once it needed one."""
PROGRESS_BARS = "tqdm_monitor"
"""tqdm's, one for the process, since a progress bar that lasted long enough."""


@dataclass(frozen=True)
class Snapshot:
    children: frozenset[int]
    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[str, str]]
    """(number, what it is)"""

    @classmethod
    def take(cls) -> Snapshot:
        return cls(frozenset(_children()), frozenset(_threads()), frozenset(_descriptors()))

    def __or__(self, other: Snapshot) -> Snapshot:
        return Snapshot(
            self.children | other.children, self.threads | other.threads, self.descriptors | other.descriptors
        )


def _has_grpc() -> bool:
    """Whether gRPC runs in this process: its poller thread and descriptors are one set for all, ended when it likes."""
    return any("_poll_wrapper" in thread.name for thread in threading.enumerate())


def leftovers(before: Snapshot, *, shares_host: bool) -> list[str]:
    """What is there now and was not before, in words, once it had time to go. `shares_host`: see above."""
    found = _new(before, shares_host)
    if not found:
        return []
    shares_host = shares_host or _has_grpc()
    gc.collect()
    deadline_s = time.monotonic() + WAIT_S
    while (found := _new(before, shares_host)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return found


class Conservation:
    """Watches one test at a time."""

    def __init__(self) -> None:
        self.before = Snapshot.take()
        self.breaches: list[str] = []
        self.cores: list[EngineCore] = []
        self.shared_hosts: set[str] = set()
        """Fixtures of a module or the session that keep threads in this process."""

    def begin(self) -> None:
        self.before = Snapshot.take()
        self.breaches.clear()
        self.cores.clear()

    def end(self) -> list[str]:
        """What the test left behind or broke. Engines that ran in the test's own thread are asked now."""
        for core in self.cores:
            self.check_core(core)
        self.cores.clear()
        return self.breaches + leftovers(self.before, shares_host=bool(self.shared_hosts))

    def fixture_is_up(self, name: str, before: Snapshot) -> None:
        """A fixture that outlives the test was made: what it holds is not the test's."""
        now = Snapshot.take()
        self.before |= now
        if now.threads - before.threads:
            self.shared_hosts.add(name)

    def check_core(self, core: EngineCore) -> None:
        try:
            core.check()
        except AssertionError as error:
            self.breaches.append(f"an engine core: {error}")


_OF_THE_PROCESS = tuple(f"{tempfile.gettempdir()}/llmbackend-{kind}-" for kind in ("repository", "host", "gguf"))
"""Temporary folders that exist, and are locked, until the process ends."""


def _threads() -> list[threading.Thread]:
    """Without the objects that Python 3.11 keeps for ended threads of a compiled backend."""
    return [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]


def _new(before: Snapshot, shares_host: bool) -> list[str]:
    now = Snapshot.take()
    found = [
        f"process {pid}: {name}"
        for pid in now.children - before.children
        if (name := _excused_or_name(pid)) and not (shares_host and WORKER in name)
    ]
    for thread in now.threads - before.threads:
        is_requested = thread.name.startswith(OURS) or not (shares_host or thread.name == PROGRESS_BARS)
        is_note = isinstance(thread, threading._DummyThread)  # of a thread of compiled code; Python 3.11 keeps them
        if thread.is_alive() and is_requested and not is_note:
            found.append(f"thread {thread.name}")
    if not shares_host:
        found += [f"file descriptor {number}: {what}" for number, what in now.descriptors - before.descriptors]
    return sorted(found)


def _children() -> Iterator[int]:
    """Asked for twice per test, of every thread: so by plain system calls."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # a thread that has ended since
            file = os.open(f"/proc/self/task/{task}/children", os.O_RDONLY)
            try:
                yield from map(int, os.read(file, 1 << 16).split())
            finally:
                os.close(file)


def _descriptors() -> Iterator[tuple[str, str]]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this listing
            if not (what := os.readlink(f"/proc/self/fd/{number}")).startswith(_OF_THE_PROCESS):
                yield number, what


def _excused_or_name(pid: int) -> str:
    """The command of a process; "" when it is gone, or is Python's own resource tracker, one per session."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return "" if "multiprocessing.resource_tracker" in command else command or "a process that was not waited for"
    return ""
