"""`python -m tools.release.versions`: checks that every place that states the version states the same one.

Part of `make release-check`. At a commit with a tag v*, CHANGELOG.md must start with that version; elsewhere it may
start with "Unreleased". The OpenAPI document, `/version` and Triton's server metadata take it from
`llmbackend.__version__`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SECTION = re.compile(r"^## (\S+)", re.MULTILINE)
_IMAGE = re.compile(r"\bllmbackend:(\d[\w.]*)")
_SEMANTIC = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")


def stated_versions(root: Path) -> Iterator[tuple[str, str]]:
    """(place, version) of files of a checkout."""
    yield "pyproject.toml", tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    code = (root / "llmbackend" / "__init__.py").read_text()
    yield "llmbackend/__init__.py", "".join(re.findall(r'^__version__ = "(.*)"', code, re.MULTILINE))
    for path in sorted([*root.glob("deploy/**/*"), *root.glob("docs/*.md")]):
        if path.is_file():
            yield from ((str(path.relative_to(root)), version) for version in _IMAGE.findall(path.read_text()))
    for path in sorted(root.glob("dist/*.whl")):
        yield f"dist/{path.name}", path.name.split("-")[1]
    policy = root / "SECURITY.md"
    if policy.exists():
        supported = re.findall(r"^\| (\d+\.\d+)\.x \| yes", policy.read_text(), re.MULTILINE)
        yield "SECURITY.md, the newest supported version", supported[0] if supported else "none"


def faults(stated: Sequence[tuple[str, str]], sections: Sequence[str], tags: Sequence[str]) -> list[str]:
    """stated: the first one counts. sections: of CHANGELOG.md, the newest first. tags: of the commit."""
    (place, version), *others = stated
    found = [] if _SEMANTIC.fullmatch(version) else [f"{place}: {version} is no version of the form X.Y.Z"]
    found += [
        f"{other}: {its_version}, expected {version}, the version in {place}"
        for other, its_version in others
        if its_version not in (version, version.rpartition(".")[0] if "SECURITY.md" in other else version)
    ]
    released = [section for section in sections if section != "Unreleased"]
    if version not in released[:1]:
        found.append(f"CHANGELOG.md: its newest release is {released[0] if released else 'none'}, expected {version}")
    for tag in tags:
        if tag != f"v{version}":
            found.append(f"the tag {tag}, expected v{version}")
        if list(sections[:1]) != [version]:
            found.append(f"CHANGELOG.md begins with '{sections[0]}' at the tag {tag}, expected '{version}'")
    return found


def _tags(root: Path) -> list[str]:
    told = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return [tag for tag in told.stdout.split() if tag.startswith("v")]


def main() -> int:
    stated = list(stated_versions(ROOT))
    found = faults(stated, _SECTION.findall((ROOT / "CHANGELOG.md").read_text()), _tags(ROOT))
    print(*(f"{place}: {version}" for place, version in stated), *found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
