"""One step of attention under compute-sanitizer, which finds out-of-bounds reads and races.

    python -m benchmarks.accelerator.sanitizer --device cuda --json FILE --scratch FOLDER

For errors that do not show in the results. Independent of the case (attention_parity.py). Invariant: if there is no
compute-sanitizer, the results say so and nothing fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from .attention_parity import SANITIZED
from .section import Section, run_alone

TOOLS = ("memcheck", "racecheck")
TOOL_LIMIT_S = 38.0
CUDA_PROGRAMS = "/usr/local/cuda/bin"
"""Where CUDA's programs are if they are not on the path."""
FOUND = 86
"""Exit code when the tool has found something."""


def measure(section: Section) -> None:
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=CUDA_PROGRAMS)
    if program is None or not section.on_gpu:
        section.add(measure="sanitizer", case="none", found="compute-sanitizer is not here")
        return
    launch = [sys.executable, "-m", "benchmarks.accelerator.attention_parity", "--device", section.device]
    launch += ["--label", SANITIZED, "--json", str(section.json), "--scratch", str(section.scratch)]
    subprocess.run(launch, check=True, timeout=TOOL_LIMIT_S)  # compiles, which takes longest under a tool
    # torch's allocator keeps memory that kernels may not read, and hides that from the tool.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    wrong = []
    for tool in TOOLS:
        found = _run([program, "--tool", tool, "--error-exitcode", str(FOUND), *launch], environment)
        section.add(measure="sanitizer", case=tool, found=found)
        wrong += [f"{tool}: {found}"] if found else []
    section.fail(wrong)


def _run(command: list[str], environment: dict[str, str]) -> str:
    """What is wrong, or nothing. The tool's words are in the log."""
    try:
        code = subprocess.run(command, env=environment, timeout=TOOL_LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        return f"not done after {TOOL_LIMIT_S:g} s"
    return "" if code == 0 else "errors, see the log" if code == FOUND else f"exit code {code}"


if __name__ == "__main__":
    run_alone("sanitizer", measure)
