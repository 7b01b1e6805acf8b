"""The packages of an installation with all extras, according to the metadata of those installed here.

Used for licences and the bill of materials. Excludes packages that only tests need (the extra "test").
"""

from __future__ import annotations

import importlib.metadata
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE: Final = "llmbackend"
_NOT_SHIPPED: Final = frozenset({"test"})


def extras() -> list[str]:
    """Of the package, without those for its own tests."""
    given = importlib.metadata.metadata(PACKAGE).get_all("Provides-Extra") or []
    return sorted(set(given) - _NOT_SHIPPED)


def closure(package: str = PACKAGE) -> dict[str, importlib.metadata.Distribution]:
    """By canonical name, without the package itself. Raises PackageNotFoundError for one that is not installed."""
    found: dict[str, importlib.metadata.Distribution] = {}
    done: set[tuple[str, str]] = set()
    waiting = [(package, extra) for extra in ("", *extras())]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in done:
            continue
        done.add((name, extra))
        installed = found[name] = importlib.metadata.distribution(name)
        for requirement in map(Requirement, installed.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                needed = canonicalize_name(requirement.name)
                waiting += [(needed, one) for one in ("", *requirement.extras)]
    found.pop(package)
    return dict(sorted(found.items()))
