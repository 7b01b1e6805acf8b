"""Starts and memory: seconds from the command to ready, cold and warm, a restart after a kill, PSS of all processes.

    python -m benchmarks.starts [--models NAMES] [--entries NAMES] [--rounds 3] [--checkpoint DIRECTORY]

Part of `make bench`, and by itself. Independent of what a start does. Invariants: cold and warm starts of one entry
follow each other within a round, and entries take turns; a cold start has an empty cache of packed weights of its own
and a checkpoint outside the page cache; nothing that was started remains.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmbackend.server.process_memory import descendants, tree_pss_mb

from .checkpoints import SHAPES
from .entries import ENTRIES, OURS, Entry, default_entries
from .environments import Environments
from .models import Models
from .report import COLD, WARM, medians
from .suite import Results, environ_of, run_process

READY_TIMEOUT_S = 300.0
CACHE_VARIABLE = "LLMBACKEND_WEIGHT_CACHE_DIR"
SERVED_NAME = "bench"
_STREAM_TOKENS = 400
_TOKENS_BEFORE_KILL = 4
_PEERS = ("llama.cpp", "OpenVINO GenAI")


def forget_pages(path: Path) -> None:
    """Drops a checkpoint from the page cache, as far as nobody has it mapped."""
    for file in (path,) if path.is_file() else path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _own_bytes(folder: Path) -> int:
    """Of its files, not of those that it links to."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


@dataclass(frozen=True)
class Server:
    """One that is ready."""

    process: subprocess.Popen[str]
    http: str
    ready_s: float

    def stream(self, model: str, max_tokens: int) -> Iterator[float]:
        """When each event of a generation came."""
        body = {"text_input": "Once upon a time", "stream": True, "max_tokens": max_tokens, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://{self.http}/v2/models/{model}/generate_stream", json.dumps(body).encode(), method="POST"
        )
        with urllib.request.urlopen(request, timeout=READY_TIMEOUT_S) as answer:
            for line in answer:
                if line.startswith(b"data:"):
                    yield time.perf_counter()

    def engine_processes(self) -> list[int]:
        """The fork server's children, which compute."""
        parents = {pid: _parent(pid) for pid in descendants(self.process.pid)}
        return [pid for pid, parent in parents.items() if parent in parents]


@contextlib.contextmanager
def started(arguments: list[str], environ: dict[str, str]) -> Iterator[Server]:
    """`llmbackend serve` on free loopback ports, until the block ends."""
    command = [sys.executable, "-m", "llmbackend.cli", "serve", *arguments]
    for protocol in ("http", "grpc", "metrics"):
        command += [f"--{protocol}-address", "127.0.0.1", f"--{protocol}-port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        start_s = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | environ)
        guard = threading.Timer(READY_TIMEOUT_S, process.kill)
        guard.start()
        try:
            yield Server(process, _ready(process), time.perf_counter() - start_s)
        finally:
            guard.cancel()
            process.send_signal(signal.SIGTERM)
            process.communicate()


def _ready(process: subprocess.Popen[str]) -> str:
    """The address of HTTP, from the ready line. Raises RuntimeError when the server ends before."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.match(r"http\s+http://(\S+)", line):
            return found[1]
    raise RuntimeError("the server ended before it was ready")


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def restart_s(server: Server, model: str) -> float:
    """From the kill of the engine's process under a stream to the stream's next event."""
    killed_s = 0.0
    for count, now_s in enumerate(server.stream(model, _STREAM_TOKENS), 1):
        if killed_s:
            return now_s - killed_s
        if count >= _TOKENS_BEFORE_KILL:
            killed_s = time.perf_counter()
            for pid in server.engine_processes():
                os.kill(pid, signal.SIGKILL)
    raise RuntimeError("the stream ended before the engine was killed")


def measure_server(arguments: list[str], model: str, cache: Path) -> dict[str, Any]:
    """One start of ours, what it holds then, and a restart."""
    with started(arguments, {CACHE_VARIABLE: str(cache)}) as server:
        asked_s = time.perf_counter()
        first_s, *_ = server.stream(model, 8)
        sizes_mb = tree_pss_mb(server.process.pid)
        figures = {
            "ready_s": server.ready_s,
            "first_token_s": server.ready_s + first_s - asked_s,
            "wall_s": server.ready_s,
            "pss_mb": sum(sizes_mb.values()),
            "host_pss_mb": sizes_mb[server.process.pid],
            "engine_pss_mb": sum(sizes_mb.values()) - sizes_mb[server.process.pid],
        }
        return figures | {"restart_s": restart_s(server, model)}


@dataclass(frozen=True)
class StartSuite:
    """Starts of all entries in turns."""

    environments: Environments
    results: Results
    models: tuple[str, ...]
    entries: tuple[str, ...]
    rounds: int
    checkpoints: dict[str, Path] = field(default_factory=dict)
    """Checkpoints to use instead of the suite's own, by model."""

    def run(self) -> None:
        for round_number in range(self.rounds):
            for model in self.models:
                for name in self.entries:
                    self._measure(ENTRIES[name], model, round_number)

    def _measure(self, entry: Entry, model: str, round_number: int) -> None:
        key = {"entry": entry.name, "model": model, "round": round_number}
        if all(self.results.has(**key, workload=name) for name in (COLD, WARM)):
            return
        is_ours = entry.engine == OURS
        if not is_ours and not self._has(entry):
            return
        try:
            path = self.checkpoints.get(model) if is_ours else None
            path = path or Models(self.environments).path(entry.model.format(model))
            found = self._ours(entry, path) if is_ours else self._peer(entry, path)
            for name, figures in found:
                self.results.add({**figures, **key, "workload": name, "time": time.time()})
                print(f"{name} round {round_number} {entry.name} on {model}: {_text(figures)}", flush=True)
        except (OSError, RuntimeError, StopIteration, ValueError, subprocess.CalledProcessError) as error:
            self.results.add({**key, "workload": COLD, "error": f"did not start: {error}"})
            print(f"start of {entry.name} on {model} FAILED: {error}", flush=True)

    def _has(self, entry: Entry) -> bool:
        """Only what is there is measured: starts alone install no peer."""
        return entry.engine in _PEERS and self.environments.folder(entry.environment).exists()

    def _ours(self, entry: Entry, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        flags = ["--served-model-name", SERVED_NAME, *(word for word in entry.options if word != "--")]
        with tempfile.TemporaryDirectory(prefix="llmbackend-starts-") as cache:
            forget_pages(path)
            for name in (COLD, WARM):
                figures = measure_server(["--model", str(path), *flags], SERVED_NAME, Path(cache))
                yield name, {**figures, "cache_mb": _own_bytes(Path(cache)) / 1e6}

    def _peer(self, entry: Entry, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        """The engine alone, by its driver, which says when it was ready; no restart."""
        forget_pages(path)
        for name in (COLD, WARM):
            with tempfile.TemporaryDirectory() as directory:
                output, log = Path(directory) / "results", Path(directory) / "log"
                python = self.environments.python(entry.environment)
                command = [python, "-m", f"benchmarks.drivers.{entry.driver}", "--model", path, "--workloads", "W0"]
                command += ["--json", output, *entry.options]
                environ = os.environ | environ_of(self.environments, entry.environment) | entry.environ
                if error := run_process([str(word) for word in command], environ, log, READY_TIMEOUT_S):
                    raise RuntimeError(error)
                figures = json.loads(output.read_text())
            times = {"ready_s": figures["load_s"], "wall_s": figures["load_s"]}
            times["first_token_s"] = figures["first_token_s"]
            yield name, {**times, "pss_mb": figures["pss_mb"], "engine_pss_mb": figures["pss_mb"]}


def _text(figures: dict[str, Any]) -> str:
    """Figures on one line."""
    parts = [f"ready {figures['ready_s']:.2f} s, first token {figures['first_token_s']:.2f} s"]
    if "restart_s" in figures:
        parts.append(f"restart {figures['restart_s']:.2f} s")
    sizes = {key.removesuffix("_mb").replace("_", " "): value for key, value in figures.items() if "_mb" in key}
    return ", ".join([*parts, *(f"{what} {size_mb:.0f} MB" for what, size_mb in sizes.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen2.5-0.5b-shape", help=f"of {', '.join(SHAPES)}")
    chosen = [name for name in default_entries("bf16", "int8") if ENTRIES[name].engine in (OURS, *_PEERS)]
    parser.add_argument("--entries", default=",".join(chosen))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpoint", type=Path, help="ours: instead of the one that is made for the first model")
    parser.add_argument("--scratch", type=Path, default=Path(__file__).resolve().parent.parent / "build" / "bench")
    arguments = parser.parse_args()
    environments, models = Environments(arguments.scratch), tuple(arguments.models.split(","))
    with tempfile.TemporaryDirectory() as directory:
        results = Results(Path(directory) / "results.jsonl")
        own = {models[0]: arguments.checkpoint} if arguments.checkpoint else {}
        StartSuite(environments, results, models, tuple(arguments.entries.split(",")), arguments.rounds, own).run()
        for model in models:
            for workload in (COLD, WARM):
                for name, figures in medians(results.lines, model, workload).items():
                    print(f"median, {workload}, {name} on {model}: {_text(figures)}")


if __name__ == "__main__":
    main()
