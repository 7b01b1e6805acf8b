"""`make release-check`: runs the steps of tools/release/steps.py, and fails if any of them has failed.

For making a release. A failed step does not stop the others. Resumable: a step that has passed is not repeated until a
file of the checkout changes (ARGS=--again repeats all). The output of a step is in .cache/release/STEP.log.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tools.release.steps import NOT_SHOWN, STEPS, Step

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".cache" / "release"
_LAST_LINES: Final = 12


def checkout_digest(root: Path) -> str:
    """Of the names and contents of all files that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    ).stdout
    digest = hashlib.sha256()
    for name in sorted(filter(None, listed.split(b"\0"))):
        path = root / name.decode()
        if path.is_file():  # not a link to a folder, not deleted
            digest.update(b"%b\0%b" % (name, hashlib.sha256(path.read_bytes()).digest()))
    return digest.hexdigest()[:16]


class Results:
    """What has passed for this checkout: step -> the line that was printed."""

    def __init__(self, file: Path, digest: str) -> None:
        self._file = file
        self._digest = digest
        try:
            saved = json.loads(file.read_text())
        except (OSError, ValueError):
            saved = {}
        self.passed: dict[str, str] = saved.get("passed", {}) if saved.get("checkout") == digest else {}

    def keep(self, step: str, line: str) -> None:
        self.passed[step] = line
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps({"checkout": self._digest, "passed": self.passed}, indent=1))


def run_step(step: Step, folder: Path) -> tuple[int, str]:
    """(exit status, the line to print). A failure's last lines are printed at once."""
    folder.mkdir(parents=True, exist_ok=True)
    output, began_s = folder / f"{step.name}.log", time.monotonic()
    with output.open("wb") as log:
        status = subprocess.run(step.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    lines = output.read_text(errors="replace").splitlines() or [""]
    if status not in (0, NOT_SHOWN):
        print(*lines[-_LAST_LINES:], sep="\n    ")
    word = {0: "ok", NOT_SHOWN: "not shown"}.get(status, "FAIL")
    detail = step.shows if status == 0 else lines[-1] if status == NOT_SHOWN else f"{output.relative_to(ROOT)}"
    return status, f"{word:9} {step.name:12} {time.monotonic() - began_s:6.0f} s   {detail}"


def run_steps(steps: Sequence[Step], results: Results, folder: Path) -> int:
    """0 when none has failed."""
    num_failed = 0
    for step in steps:
        if step.name in results.passed:
            print(results.passed[step.name], "(before)", flush=True)
            continue
        status, line = run_step(step, folder)
        print(line, flush=True)
        num_failed += status not in (0, NOT_SHOWN)
        if status == 0:
            results.keep(step.name, line)
    return 1 if num_failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make release-check", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], help="these steps alone")
    parser.add_argument("--again", action="store_true", help="runs steps that have passed for this checkout, too")
    options = parser.parse_args()
    results = Results(FOLDER / "results.json", checkout_digest(ROOT))
    if options.again:
        results.passed = {}
    return run_steps([step for step in STEPS if not options.only or step.name in options.only], results, FOLDER)


if __name__ == "__main__":
    sys.exit(main())
