"""Runs sections one after the other, each in its own process with a time limit, and keeps their output.

Used by benchmarks/gpu.py. Independent of what sections measure. Invariants: a section that fails, hangs or is cut does
not affect the others, and the results say so; a section's processes are all ended with it, and their device memory is
free before the next one starts, or the results say how much is not; the processes are forked from this one, which has
imported torch and transformers and never touches a GPU, unless GPUs do not work in forked processes; then each is
started anew.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .device_memory import DeviceMemory
from .parts import Planned
from .section import Section, WrongResultError

MIN_SECTION_S = 5.0
PROBE_LIMIT_S = 60.0
_FORK = multiprocessing.get_context("fork")
_WRONG, _FAILED = 2, 1


@dataclass(frozen=True)
class Results:
    """The files of one part, all that comes back from the machine: lines, page, logs."""

    out: Path
    part: int

    @property
    def lines_file(self) -> Path:
        return self.out / f"part{self.part}.jsonl"

    def lines(self) -> list[dict[str, Any]]:
        return read_lines(self.lines_file) if self.lines_file.exists() else []

    def add(self, **line: Any) -> None:
        with self.lines_file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def write_page(self, text: str) -> None:
        (self.out / f"part{self.part}.md").write_text(text)

    def pack(self, logs: Path) -> None:
        """All logs in one file."""
        with tarfile.open(self.out / f"part{self.part}-logs.tar.gz", "w:gz") as tar:
            tar.add(logs, arcname=f"part{self.part}-logs")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A last line that was cut is left out."""
    lines = []
    for text in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    return lines


@dataclass(frozen=True)
class Runner:
    device: str
    scratch: Path
    results: Results
    end_s: float
    """By time.monotonic()."""
    forks: bool
    memory: DeviceMemory

    @property
    def logs(self) -> Path:
        return self.scratch / f"logs-{self.results.part}"

    def run(self, planned: Planned) -> bool:
        """Whether it failed."""
        limit_s = min(planned.limit_s, self.end_s - time.monotonic())
        start_s, wrong = time.monotonic(), "no time was left for it"
        if limit_s >= MIN_SECTION_S:
            print(f"{planned.name} …", flush=True)
            wrong = self._run(planned, limit_s)
        named = {"section": planned.program, "shape": planned.shape, "label": planned.label}
        self.results.add(**named, measure="section", seconds=time.monotonic() - start_s, failure=wrong)
        waited = self.memory.wait()
        left = "" if waited.is_idle else f"{waited.left_bytes >> 20} MiB of device memory were not free after it"
        self.results.add(**named, measure="memory after", **asdict(waited), failure=left)
        if wrong:
            print(f"  {wrong}", flush=True)
        return bool(wrong)

    def _run(self, planned: Planned, limit_s: float) -> str:
        """What went wrong, or nothing."""
        self.logs.mkdir(exist_ok=True)
        log = self.logs / f"{planned.name}.log"
        arguments = (planned, self.device, self.results.lines_file, self.scratch, log, self.forks)
        process = _FORK.Process(target=_section, args=arguments)
        code = _exit_code(process, limit_s)
        if code is None:
            return f"cut after {limit_s:.0f} s; what it had measured is kept"
        return "" if code == 0 else _last_line(log) if code in (_WRONG, _FAILED) else f"exit code {code}"


def forks_work(device: str) -> bool:
    """Whether a process forked from this one can use the device. Decided by trying."""
    return _exit_code(_FORK.Process(target=_use, args=(device,)), PROBE_LIMIT_S) == 0


def _use(device: str) -> None:
    import torch

    os.setsid()
    torch.zeros(1, device=device).cpu()


def _exit_code(process: BaseProcess, limit_s: float) -> int | None:
    """None when it had to be ended. What it started, in its process group, is ended in any case."""
    process.start()
    assert process.pid is not None
    process.join(limit_s)
    code = process.exitcode
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return code


def _section(planned: Planned, device: str, lines: Path, scratch: Path, log: Path, in_this_process: bool) -> None:
    """In the forked process."""
    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    section = Section(
        planned.program, device, planned.shape, planned.label, lines, scratch, planned.options, planned.measures
    )
    if not in_this_process:
        os._exit(subprocess.run(_command(section)).returncode and _FAILED)
    os._exit(_measured(import_module(f"benchmarks.accelerator.{planned.program}").measure, section))


def _measured(measure: Callable[[Section], None], section: Section) -> int:
    code = 0
    try:
        measure(section)
    except WrongResultError as wrong:
        print(wrong, file=sys.stderr)
        code = _WRONG
    except BaseException:
        traceback.print_exc()
        code = _FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _command(section: Section) -> list[str]:
    command = [sys.executable, "-m", f"benchmarks.accelerator.{section.program}", "--device", section.device]
    command += ["--shape", section.shape, "--label", section.label, "--options", json.dumps(dict(section.options))]
    command += ["--measures", ",".join(section.measures)]
    return [*command, "--json", str(section.json), "--scratch", str(section.scratch)]


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:400] if lines else "it printed nothing"
