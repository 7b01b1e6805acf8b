"""`python tools/features.py` writes docs/features.md, the features and their tests, from tests/features.toml.

tests/test_features.py fails if a row names no existing test, or if the page differs from what this writes.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "features.toml"
PAGE = ROOT / "docs" / "features.md"
HEAD = """# Features

Each feature with its tests; `make test` fails if a test named here does not exist. The column "Triton" says whether
NVIDIA's server has the feature; a dash means that it does not. `python tools/features.py` writes this page from
`tests/features.toml`.
"""


@dataclass(frozen=True)
class Feature:
    group: str
    name: str
    triton: str
    tests: tuple[str, ...]
    """`path::test_name`, or a path alone for all tests of a file."""


def read_features(path: Path = TABLE) -> list[Feature]:
    groups = tomllib.loads(path.read_text())["group"]
    return [
        Feature(group["name"], row["name"], row.get("triton", "yes"), tuple(row["tests"]))
        for group in groups
        for row in group["feature"]
    ]


def missing_tests(features: list[Feature]) -> Iterator[str]:
    """Named tests that do not exist."""
    for feature in features:
        if not feature.tests:
            yield f"{feature.name}: no test"
        for test in feature.tests:
            path, _, name = test.partition("::")
            file = ROOT / path
            if not file.is_file() or (name and name not in _functions(file)):
                yield f"{feature.name}: {test}"


def _functions(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def page(features: list[Feature]) -> str:
    lines = [HEAD]
    group = ""
    for feature in features:
        if feature.group != group:
            group = feature.group
            lines += [f"\n## {group}\n", "| feature | Triton | tests |", "|---|---|---|"]
        tests = "<br>".join(f"[{_short(test)}](../{test.partition('::')[0]})" for test in feature.tests)
        lines.append(f"| {feature.name} | {feature.triton} | {tests} |")
    return "\n".join(lines) + "\n"


def _short(test: str) -> str:
    path, _, name = test.partition("::")
    return (name or Path(path).stem).removeprefix("test_").replace("_", " ")


if __name__ == "__main__":
    features = read_features()
    PAGE.write_text(page(features))
    for missing in missing_tests(features):
        print(f"missing: {missing}")
