"""Keeps folders of the package from growing in files or lines without a change of tools/size_limits.toml.

`python -m tools.size_limits` fails if a limit is exceeded; `--update` lowers the limits to the present counts. A
feature that needs more raises them by hand, in its own commit, with the reason.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tools" / "size_limits.toml"


class Size(NamedTuple):
    files: int
    lines: int


def folder_sizes(package: Path) -> dict[str, Size]:
    """The Python files of each folder of the package, and their lines."""
    lines: dict[str, list[int]] = {}
    for path in sorted(package.rglob("*.py")):
        folder = path.relative_to(package).parts[0] if path.parent != package else "."
        lines.setdefault(folder, []).append(path.read_text().count("\n"))
    return {folder: Size(len(counts), sum(counts)) for folder, counts in lines.items()}


def excesses(sizes: dict[str, Size], limits: dict[str, Size]) -> list[str]:
    """What exceeds its limit, as lines to print."""
    return [
        f"{folder}: {unit} {count} > {limit}"
        for folder, size in sizes.items()
        for unit, count, limit in zip(Size._fields, size, limits.get(folder, Size(0, 0)), strict=True)
        if count > limit
    ]


def read_limits() -> dict[str, Size]:
    return {folder: Size(**limit) for folder, limit in tomllib.loads(TABLE.read_text()).items()}


def main() -> None:
    sizes, limits = folder_sizes(ROOT / "llmbackend"), read_limits()
    if "--update" in sys.argv:
        limits = {folder: Size(*map(min, size, limits.get(folder, size))) for folder, size in sizes.items()}
        rows = (f'"{folder}" = {{ files = {size.files}, lines = {size.lines} }}\n' for folder, size in limits.items())
        TABLE.write_text("".join(rows))
    if found := excesses(sizes, limits):
        sys.exit("\n".join([*found, "Delete or merge, or raise the limit in tools/size_limits.toml with the reason."]))


if __name__ == "__main__":
    main()
