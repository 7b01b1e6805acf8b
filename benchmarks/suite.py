"""Runs the engines in turn: a round runs every entry once, each in its own process, and there are several rounds.

Used by the command line. Independent of how an engine works (drivers do) and what the figures mean (the report does).
Invariants: a result is on disk as soon as it is measured, and is not measured again by a run with the same results
file; an engine that fails or takes too long is recorded as such and left out of later rounds; the others continue.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .bandwidth import read_gb_per_s
from .checkpoints import CONTEXT_TOKENS as CONTEXT_OF_MODEL
from .entries import ENTRIES, Entry
from .environments import Environments
from .models import Models, bytes_per_token, model_bytes
from .report import BANDWIDTH, machine
from .workloads import CONTEXT_TOKENS, LONG

LOAD_TIMEOUT_S = 600.0
VLLM_KV_CACHE_GIB = "2"


class Results:
    """A file of JSON lines: measurements and failures on this machine and others. Failures of an earlier run are tried
    again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._new_failures: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            self.lines = [json.loads(line) for line in path.read_text().splitlines()]

    def add(self, line: dict[str, Any]) -> None:
        line = {"machine": machine(), **line}
        self.lines.append(line)
        if "error" in line:
            self._new_failures.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def has(self, **wanted: Any) -> bool:
        """Whether this was measured on this machine."""
        return any("error" not in line and wanted.items() <= line.items() for line in self.here)

    @property
    def here(self) -> list[dict[str, Any]]:
        """The lines of this machine."""
        return [line for line in self.lines if line.get("machine") == machine()]

    def failed(self, **wanted: Any) -> bool:
        """Whether this has failed since the file was opened."""
        return any(wanted.items() <= line.items() for line in self._new_failures)


@dataclass(frozen=True)
class Suite:
    """What to run. `timeout_s` is for one workload, without loading."""

    environments: Environments
    results: Results
    models: tuple[str, ...]
    workloads: tuple[str, ...]
    entries: tuple[str, ...]
    rounds: int
    timeout_s: float

    def run(self) -> None:
        ready = {(model, name): path for model, name, path in self._prepare()}
        for round_number in range(self.rounds):
            for (model, name), path in ready.items():
                entry = ENTRIES[name]
                self._measure_bandwidth(model, round_number)
                self._measure(entry, model, path, round_number)

    def _prepare(self) -> Iterator[tuple[str, str, Path]]:
        """Installs and converts everything before the first measurement."""
        models = Models(self.environments)
        for model in self.models:
            for name in self.entries:
                entry = ENTRIES[name]
                try:
                    _say(f"preparing {name} on {model}")
                    self.environments.install(entry.environment)
                    yield model, name, models.path(entry.model.format(model))
                except (OSError, subprocess.CalledProcessError, StopIteration, ValueError) as error:
                    self._fail(entry, model, "", 0, f"cannot be prepared: {error}")

    def _measure_bandwidth(self, model: str, round_number: int) -> None:
        """Once a round for each model: the machine's speed changes."""
        key = {"entry": "", "model": model, "workload": BANDWIDTH, "round": round_number}
        if not self.results.has(**key):
            self.results.add({**key, "gb_per_s": read_gb_per_s(), "time": time.time()})

    def _measure(self, entry: Entry, model: str, path: Path, round_number: int) -> None:
        key = {"entry": entry.name, "model": model}
        workloads = [
            workload
            for workload in self.workloads
            if fits(workload, model)
            and not self.results.has(**key, workload=workload, round=round_number)
            and not self.results.failed(**key, workload=workload)
        ]
        while workloads:
            together = [name for name in workloads if (name in LONG) is (workloads[0] in LONG)]
            done, error = self._run_driver(entry, path, together)
            for line in done:
                sizes = {"file_mb": model_bytes(path) / 1e6, "read_mb": bytes_per_token(path) / 1e6}
                self.results.add({**sizes, **line, **key, "round": round_number, "time": time.time()})
                _say(f"{line['workload']} round {round_number} {entry.name} on {model}: {line['wall_s']:.2f} s")
            workloads = [name for name in workloads if name not in together[: len(done)]]
            if len(done) < len(together):
                workloads.remove(together[len(done)])
                self._fail(entry, model, together[len(done)], round_number, error or "no result")

    def _run_driver(self, entry: Entry, path: Path, workloads: list[str]) -> tuple[list[dict[str, Any]], str]:
        """The results of the workloads that were measured, and the reason if the next one failed."""
        python = self.environments.python(entry.environment)
        with tempfile.TemporaryDirectory() as directory:
            output, log = Path(directory) / "results", Path(directory) / "log"
            command = [python, "-m", f"benchmarks.drivers.{entry.driver}", "--model", path]
            command += ["--workloads", ",".join(workloads), "--json", output, *entry.options]
            timeout_s = LOAD_TIMEOUT_S + self.timeout_s * len(workloads)
            error = run_process([str(word) for word in command], self._environ(entry), log, timeout_s)
            lines = output.read_text().splitlines() if output.exists() else []
        return [json.loads(line) for line in lines], error

    def _environ(self, entry: Entry) -> dict[str, str]:
        return os.environ | environ_of(self.environments, entry.environment) | entry.environ

    def _fail(self, entry: Entry, model: str, workload: str, round_number: int, error: str) -> None:
        line = {"entry": entry.name, "model": model, "workload": workload, "round": round_number, "error": error}
        self.results.add(line)
        _say(f"{workload} round {round_number} {entry.name} on {model} FAILED: {error}")


def fits(workload: str, model: str) -> bool:
    """Whether the requests are within the model's context."""
    return CONTEXT_TOKENS.get(workload, 0) <= CONTEXT_OF_MODEL[model]


def environ_of(environments: Environments, name: str) -> dict[str, str]:
    """The environment variables that an engine's documentation recommends."""
    root = str(Path(__file__).resolve().parent.parent)
    common = {"PYTHONPATH": root, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    if name == "vllm":
        return common | {
            "LD_PRELOAD": environments.preload(),
            "VLLM_CACHE_ROOT": str(environments.scratch / "vllm-cache"),
            "VLLM_CPU_KVCACHE_SPACE": VLLM_KV_CACHE_GIB,
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
    if name == "llama.cpp":
        return common | environments.llama_cpp_environ()
    return common


def run_process(command: list[str], environ: dict[str, str], log: Path, timeout_s: float) -> str:
    """Runs it in its own process group; returns "" or the reason of its failure."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environ, stdout=file, stderr=file, start_new_session=True)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"took more than {timeout_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return "" if code == 0 else f"exit code {code}: {_last_line(log)}"


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
