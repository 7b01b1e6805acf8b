"""All checks and measurements that need a GPU, in one run of less than ten minutes: `python benchmarks/gpu.py`.

    python benchmarks/gpu.py --out results           on a machine with one NVIDIA GPU, torch, triton and transformers
    python benchmarks/gpu.py --device DEVICE --shapes tiny    tries the script itself without a GPU

For: docs/gpu.md and changes of the accelerator path. Does not know: what the parts measure; they are programs in
benchmarks/accelerator/. Invariants: parts run one after the other, each in a process of its own with a time limit, so
that one which fails or hangs does not affect the others; results are on disk line by line, and the report
(benchmarks_gpu.md in --out) is written after every part, so that a run that is ended early keeps its results; the exit
code is 1 if any part failed.

Parts, the most important first: the device's ceilings; kernel parity (tests, on the device instead of in the
interpreter); each shape's engine runs; ablations; transformers' continuous batching; the server.
The machine needs no network: packages that its Python lacks (msgspec and pyzmq; for the server also starlette, uvicorn
and others) can be unpacked into a folder beforehand, which --site names.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ("qwen2.5-0.5b", "qwen3-1.7b", "llama-3.1-8b")
ABLATED_SHAPE = "qwen2.5-0.5b"
ABLATIONS: dict[str, dict[str, Any]] = {
    "graphs off": {"enforce_eager": True},
    "overlap off": {"async_scheduling": False},
    "fused kernels off": {"kernels": "torch"},
    "batch invariant": {"batch_invariant": True},
}
PART_LIMIT_S = 150.0
KERNEL_TESTS = [
    f"tests/engine/gpu/test_{name}.py"
    for name in ("fused_kernels", "paged_attention", "invariant_matmul", "device_sampler")
]
"""Those that run on a GPU as well (tests/helpers/gpu/kernel_device.py)."""


@dataclass(frozen=True)
class Job:
    part: str
    shape: str = ""
    label: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    out: Path
    device: str
    site: str
    end_s: float
    """By time.monotonic()."""

    @property
    def results(self) -> Path:
        return self.out / "gpu.jsonl"

    def do(self, job: Job) -> None:
        limit_s = min(PART_LIMIT_S, self.end_s - time.monotonic())
        if limit_s < 5:
            self._failed(job, "no time was left for it")
            return
        log = self.out / f"{job.part}-{job.shape}-{job.label.replace(' ', '-')}.log"
        print(f"{job.part} {job.shape} {job.label} …", flush=True)
        try:
            with log.open("w") as file:
                subprocess.run(
                    self._command(job), cwd=ROOT, env=self._environment(), stdout=file, stderr=subprocess.STDOUT,
                    timeout=limit_s, check=True,
                )  # fmt: skip
        except subprocess.TimeoutExpired:
            self._failed(job, f"ended after {limit_s:.0f} s")
        except subprocess.CalledProcessError as error:
            self._failed(job, f"exit code {error.returncode}: {_last_line(log)}")

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.results.read_text().splitlines()] if self.results.exists() else []

    def write_page(self) -> str:
        sys.path.insert(0, str(ROOT))
        from benchmarks.accelerator.report import page

        text = page(self.lines())
        (self.out / "benchmarks_gpu.md").write_text(text)
        return text

    def _command(self, job: Job) -> list[str]:
        if job.part == "parity":
            return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *KERNEL_TESTS]
        arguments = ["--device", self.device, "--shape", job.shape, "--label", job.label, "--json", str(self.results)]
        arguments += ["--scratch", str(self.out / "scratch"), "--options", json.dumps(job.options)]
        return [sys.executable, "-m", f"benchmarks.accelerator.{job.part}", *arguments]

    def _environment(self) -> dict[str, str]:
        paths = [str(ROOT), self.site, os.environ.get("PYTHONPATH", "")]
        on_gpu = {"LLMBACKEND_TEST_DEVICE": self.device} if self.device.startswith("cuda") else {}
        return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), **on_gpu}

    def _failed(self, job: Job, error: str) -> None:
        print(f"  failed: {error}", flush=True)
        line = {"part": job.part, "shape": job.shape, "label": job.label, "error": error}
        with self.results.open("a") as file:
            file.write(json.dumps(line) + "\n")


def jobs(shapes: list[str]) -> Iterator[Job]:
    yield Job("ceilings")
    yield Job("parity")
    for shape in shapes:
        yield Job("engine_runs", shape)
    ablated = ABLATED_SHAPE if ABLATED_SHAPE in shapes else shapes[0]
    for label, options in ABLATIONS.items():
        yield Job("engine_runs", ablated, label, options)
    for shape in shapes:
        yield Job("transformers_runs", shape)
    for shape in (ablated, *(shape for shape in shapes[-1:] if shape != ablated)):
        yield Job("server_streams", shape)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for results, logs and the page")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--parts", default="", help="only these parts, by the names of their programs")
    parser.add_argument("--site", default="", help="a folder with Python packages that are not installed")
    parser.add_argument("--budget-s", type=float, default=570.0)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    run = Run(given.out.resolve(), given.device, given.site, time.monotonic() + given.budget_s)
    for job in jobs(given.shapes.split(",")):
        if not given.parts or job.part in given.parts.split(","):
            run.do(job)
            text = run.write_page()
    print(text)
    sys.exit(any("error" in line for line in run.lines()))


if __name__ == "__main__":
    main()
