"""A Python environment with only what a machine set up for GPU work has: torch, transformers and their dependencies.

Used by tests that benchmarks/gpu.py runs there. Independent of the benchmark. Invariants: packages are linked by name
from this test environment, so nothing is installed; packages not in the lists cannot be imported.
"""

from __future__ import annotations

import re
import sysconfig
import venv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from benchmarks.accelerator.packages import MISSING

THERE = (
    "jinja2", "ml-dtypes", "numpy", "pytest", "pyyaml", "rich", "tokenizers", "torch", "transformers", "triton",
    "typer",
)  # fmt: skip
"""With what they need. grpcio and protobuf are on such a machine, too, but perhaps too old."""
_SITE = Path(sysconfig.get_paths()["purelib"])


@dataclass(frozen=True)
class BareMachine:
    python: Path
    packages: Path
    """As `benchmarks/gpu.py --packages` takes them."""


def make_bare_machine(folder: Path) -> BareMachine:
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder / "venv")
    [site] = (folder / "venv" / "lib").glob("python*/site-packages")
    _link(_with_needs(THERE), site)
    (folder / "packages").mkdir()
    _link(MISSING, folder / "packages")
    return BareMachine(folder / "venv" / "bin" / "python", folder / "packages")


def _with_needs(names: Iterable[str]) -> list[str]:
    found: dict[str, None] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = None
            waiting += _needs(name)
    return sorted(found.keys() - set(MISSING))


def _needs(name: str) -> Iterator[str]:
    try:
        requirements = distribution(name).requires or []
    except PackageNotFoundError:  # of another system
        return
    for requirement in requirements:
        if "extra ==" not in requirement:
            yield re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")


def _link(names: Iterable[str], folder: Path) -> None:
    for name in names:
        try:
            record = distribution(name).read_text("RECORD") or ""
        except PackageNotFoundError:
            continue
        for top in {line.partition(",")[0].partition("/")[0] for line in record.splitlines()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(_SITE / top)
