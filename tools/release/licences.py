"""`python -m tools.release.licences`: checks that each dependency, including extras, has a licence listed in
tools/release/licences.toml.

Part of `make release-check`. Trusts the packages' metadata. Writes the list to dist/licences.md. Fails for a package
without a licence, or with one that is not listed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution
from pathlib import Path
from typing import Final, NamedTuple

from tools.release.dependencies import closure, extras

ROOT: Final = Path(__file__).resolve().parents[2]
TABLE: Final = Path(__file__).with_name("licences.toml")
PAGE: Final = ROOT / "dist" / "licences.md"
_MAX_NAME: Final = 60
_HEAD: Final = """# Licences of dependencies

What an installation of llmbackend with the extras {extras} brings, in the tested versions.

| package | version | licence (SPDX) |
|---|---|---|
"""


class Rules(NamedTuple):
    """allowed, exceptions: SPDX ids. names: other texts in lower case -> SPDX. packages: name -> SPDX."""

    allowed: frozenset[str]
    exceptions: frozenset[str]
    names: dict[str, str]
    packages: dict[str, str]

    @classmethod
    def read(cls, table: Path = TABLE) -> Rules:
        found = tomllib.loads(table.read_text())
        return cls(
            frozenset(found["allowed"]),
            frozenset(found["exceptions"]),
            found.get("names", {}),
            found.get("packages", {}),
        )

    def allows(self, expression: str) -> bool:
        """Whether one way to read an SPDX expression has allowed licences alone: OR needs one side, AND both."""
        return _Reader(expression, self).is_allowed()


class _Reader:
    """Reads an SPDX expression once; AND binds more tightly than OR."""

    def __init__(self, expression: str, rules: Rules) -> None:
        self._words = re.findall(r"[()]|[^\s()]+", expression)
        self._rules = rules

    def is_allowed(self) -> bool:
        """False also for what is no expression."""
        try:
            return self._any() and not self._words
        except IndexError:
            return False

    def _any(self) -> bool:
        found = [self._all()]
        while self._next_is("OR"):
            found.append(self._all())
        return any(found)

    def _all(self) -> bool:
        found = [self._one()]
        while self._next_is("AND"):
            found.append(self._one())
        return all(found)

    def _one(self) -> bool:
        word = self._words.pop(0)
        if word == "(":
            inside = self._any()
            return self._next_is(")") and inside
        is_known = word in self._rules.allowed
        return (self._words.pop(0) in self._rules.exceptions and is_known) if self._next_is("WITH") else is_known

    def _next_is(self, word: str) -> bool:
        if self._words[:1] != [word]:
            return False
        self._words.pop(0)
        return True


def licence_of(name: str, installed: Distribution, rules: Rules) -> str:
    """The SPDX expression of a package; what its metadata say where that is none; "" = nothing."""
    if name in rules.packages:
        return rules.packages[name]
    metadata = installed.metadata
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    given = metadata["License"].rpartition("::")[2].strip() if "License" in metadata else ""
    classified = [
        each.rpartition("::")[2].strip()
        for each in metadata.get_all("Classifier") or ()
        if each.startswith("License ::")
    ]
    if given and len(given) <= _MAX_NAME:
        return rules.names.get(given.lower(), given)
    return " AND ".join(rules.names.get(each.lower(), each) for each in classified)


def main() -> int:
    rules, packages = Rules.read(), closure()
    rows = [(name, each.version, licence_of(name, each, rules)) for name, each in packages.items()]
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(_page(rows))
    refused = [row for row in rows if not rules.allows(row[2])]
    for name, version, licence in refused:
        print(f"{name} {version}: licence '{licence}' is not in {TABLE.relative_to(ROOT)}")
    print(f"{len(rows)} packages, {len(refused)} refused; {PAGE.relative_to(ROOT)}")
    return 1 if refused else 0


def _page(rows: Iterable[tuple[str, str, str]]) -> str:
    head = _HEAD.format(extras=", ".join(extras()))
    return head + "".join(f"| {name} | {version} | {licence or 'none'} |\n" for name, version, licence in rows)


if __name__ == "__main__":
    sys.exit(main())
