"""`python -m tools.release.pythons MINOR`: checks that the wheel in dist/ serves on Python 3.MINOR, if that is
available here.

Part of `make release-check`. A Python on PATH, or from pyenv, runs `tools.wheel_check`. If there is none, Debian's is
used, provided that tools/release/debian_root.py can create a folder with it: the wheel is installed there with the
tested versions of its dependencies, and runs its kernels and the examples of docs/embedding.md. TORCH_INDEX=INDEX: the
index of torch's CPU build; otherwise torch installs CUDA (several gigabytes, removed afterwards). Exits with NOT_SHOWN
if there is no such Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tools.examples import EXAMPLES
from tools.release.debian_root import ROOT, copy_into, make_root, run_inside, why_impossible
from tools.release.steps import NOT_SHOWN
from tools.wheel_check import KERNELS

SUITES: Final = {11: "bookworm", 13: "trixie", 14: "forky"}
"""Debian's versions, by the Python that they have."""
_PLACE: Final = "opt/wheel"
_PYTHON: Final = f"/{_PLACE}/environment/bin/python"


def interpreter(minor: int) -> str:
    """Of PATH or pyenv; "" = there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    own = sorted(pyenv.glob(f"3.{minor}.*/bin/python3.{minor}"))
    return str(own[-1]) if own else shutil.which(f"python3.{minor}") or ""


def passes_wheel_check(python: str, wheel: Path) -> bool:
    command = [sys.executable, "-m", "tools.wheel_check", str(wheel), "--python", python]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def in_debian(root: Path, wheel: Path) -> bool:
    """Whether the wheel installs in that folder, loads its kernels and runs the examples."""
    shutil.rmtree(root / _PLACE, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        programs = [Path(folder) / f"example_{number}.py" for number in range(len(EXAMPLES))]
        for program, text in zip(programs, EXAMPLES, strict=True):
            program.write_text(text)
        copy_into(root, [wheel, ROOT / "constraints.txt", *programs], _PLACE)
    pip = (
        _PYTHON,
        "-I",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-cache-dir",
        "--constraint",
        f"/{_PLACE}/constraints.txt",
    )
    index = os.environ.get("TORCH_INDEX", "")
    commands: dict[str, tuple[str, ...]] = {
        "its Python": ("python3", "--version"),
        "an environment": ("python3", "-m", "venv", f"/{_PLACE}/environment"),
        **({"torch": (*pip, "--index-url", index, "torch")} if index else {}),
        "installation": (*pip, f"/{_PLACE}/{wheel.name}"),
        "kernels": (_PYTHON, "-c", KERNELS),
        **{f"example {number}": (_PYTHON, f"/{_PLACE}/example_{number}.py") for number in range(len(EXAMPLES))},
    }
    return all(_runs(root, what, command) for what, command in commands.items())


def _runs(root: Path, what: str, command: tuple[str, ...]) -> bool:
    done = run_inside(root, *command)
    said = (done.stdout or done.stderr).strip().splitlines() or [""]
    print(f"{'FAIL' if done.returncode else 'ok  '} {root.name}: {what}: {said[-1][:200]}", flush=True)
    if done.returncode:
        print(done.stdout + done.stderr)
    return not done.returncode


def check(minor: int, wheel: Path) -> bool | str:
    """Whether it has passed; a text: why it was not tried."""
    if python := interpreter(minor):
        return passes_wheel_check(python, wheel)
    if minor not in SUITES:
        return "it is not installed, and no version of Debian has it"
    if reason := why_impossible():
        return f"it is not installed, and {reason}"
    root = make_root(SUITES[minor])
    try:
        return in_debian(root, wheel)
    finally:
        shutil.rmtree(root / _PLACE, ignore_errors=True)  # gigabytes


def main() -> int:
    wheels, minor = sorted((ROOT / "dist").glob("*.whl")), int(sys.argv[1])
    if len(wheels) != 1:
        print(f"dist/ has {len(wheels)} wheels, expected one: `make wheel`")
        return 1
    result = check(minor, wheels[0])
    if isinstance(result, str):
        print(f"Python 3.{minor}: {result}")
        return NOT_SHOWN
    print(f"Python 3.{minor}: {'passed' if result else 'FAILED'}")
    return 0 if result else 1


if __name__ == "__main__":
    sys.exit(main())
