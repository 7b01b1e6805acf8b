"""Servers whose CPU time is measured under streams: those of source trees with the mock model, and bare ones.

Used by host_cpu_per_token.py, first_token.py, server_share.py. Independent of loads and figures. Invariants: all
addresses are free ports of the loopback; `stop` ends what was started; CPU time is that of the server's process with
all its threads, and of its frontend processes, in nanoseconds where the system counts them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MOCK = "mock"
_FRONTEND = "llmbackend.server.frontend_process"
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class CpuTime:
    """CPU time of a process until a moment."""

    total_s: float
    first_thread_s: float
    """Of the first thread of each process, which runs the event loop."""
    user_s: float
    system_s: float
    """Both in ticks of 10 ms."""

    def __sub__(self, before: CpuTime) -> CpuTime:
        return CpuTime(
            self.total_s - before.total_s,
            self.first_thread_s - before.first_thread_s,
            self.user_s - before.user_s,
            self.system_s - before.system_s,
        )

    def __add__(self, other: CpuTime) -> CpuTime:
        return CpuTime(
            self.total_s + other.total_s,
            self.first_thread_s + other.first_thread_s,
            self.user_s + other.user_s,
            self.system_s + other.system_s,
        )


@dataclass(frozen=True)
class Server:
    """A server process and where it listens."""

    process: subprocess.Popen[str]
    http: str
    """`host:port`, as `grpc`; "" where it has no such endpoint."""
    grpc: str

    def cpu(self) -> CpuTime:
        spent = cpu_of(self.process.pid)
        for frontend in self.frontends():
            spent += cpu_of(frontend)
        return spent

    def frontends(self) -> list[int]:
        """The process ids of its frontend processes."""
        children = psutil.Process(self.process.pid).children()
        return [child.pid for child in children if _FRONTEND in " ".join(child.cmdline())]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def cpu_of(pid: int) -> CpuTime:
    """Threads that have ended count in user and system time only."""
    times = psutil.Process(pid).cpu_times()
    threads = {task.name: _run_ns(task) for task in Path(f"/proc/{pid}/task").iterdir()}
    return CpuTime(sum(threads.values()) / 1e9, threads[str(pid)] / 1e9, times.user, times.system)


def _run_ns(task: Path) -> int:
    try:
        return int((task / "schedstat").read_text().split()[0])
    except OSError:  # the thread has just ended
        return 0


def start_tree(tree: Path, repository: Path, frontend_processes: int = 1) -> Server:
    """A server of that source tree. Raises RuntimeError if it ends before it listens."""
    command = [sys.executable, "-m", "llmbackend.cli", "serve", "--model-repository", str(repository)]
    for protocol in ("http", "grpc", "metrics"):
        command += [f"--{protocol}-address", "127.0.0.1", f"--{protocol}-port", "0"]
    if frontend_processes > 1:  # trees before this flag are measured, too
        command += ["--frontend-processes", str(frontend_processes)]
    return _start(command, tree, {"http", "grpc"})


def start_serve(tree: Path, model: str, name: str, options: Sequence[str]) -> Server:
    """A server of that source tree with one checkpoint, served as `name`. Raises RuntimeError if it ends before it
    listens."""
    command = [sys.executable, "-m", "llmbackend.cli", "serve", model, "--served-model-name", name]
    return _start([*command, "--host", "127.0.0.1", "--port", "0", *options], tree, {"http"})


def start_bare(kind: str, *arguments: str) -> Server:
    """A server that only writes: `kind` as bare_streams.py names them."""
    return _start([sys.executable, "-m", "benchmarks.bare_streams", kind, *arguments], ROOT, {kind})


def _start(command: list[str], tree: Path, wanted: set[str]) -> Server:
    """Reads the announced addresses: lines of a protocol's name and its `host:port` or URL."""
    paths = os.pathsep.join(filter(None, [str(tree.resolve()), os.environ.get("PYTHONPATH", "")]))
    environ = os.environ | {"NO_COLOR": "1", "PYTHONPATH": paths}
    process = subprocess.Popen(command, cwd=tree, env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found: dict[str, str] = {}
    for line in process.stdout:
        if match := re.match(r"(http|grpc)\s+(?:http://)?(\S+:\d+)", line):
            found[match[1]] = match[2]
        if wanted <= set(found):
            return Server(process, found.get("http", ""), found.get("grpc", ""))
    raise RuntimeError(f"the server of {tree} ended with exit code {process.wait()}")


def write_mock(repository: Path, arguments: Mapping[str, Any]) -> None:
    """A model `mock`: an engine process without weights, whose steps take as long as `arguments` say."""
    write_model(repository, MOCK, {"model": MOCK, **arguments})


def write_model(repository: Path, name: str, arguments: Mapping[str, Any]) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text('backend: "llm"\n')
    (repository / name / "1" / "model.json").write_text(json.dumps(arguments))
