"""The packages that `make serve` and the wheel install, and an environment for processes that can import no others.

Used by the smoke test and by tests of the first start, which run where the test tools are installed. The requirements
are those of the installed llmbackend; no package is named here.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_HIDING = Path(__file__).resolve().parent / "hidden_packages"


def only_serving(extras: Collection[str] = ("pages",)) -> dict[str, str]:
    """This process's variables, and those that hide every package that llmbackend with `extras` does not need."""
    visited: set[tuple[str, frozenset[str]]] = set()
    _visit("llmbackend", frozenset(extras), visited)
    needed = {name for name, _ in visited}
    hidden = [
        package
        for package, distributions in metadata.packages_distributions().items()
        if not needed & {canonicalize_name(name) for name in distributions}
    ]
    path = [str(_HIDING), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HIDDEN_PACKAGES": ",".join(hidden)}


def _visit(name: str, extras: frozenset[str], visited: set[tuple[str, frozenset[str]]]) -> None:
    """Adds the distributions that `name` with `extras` brings, by canonical name and extras."""
    if (canonicalize_name(name), extras) in visited:
        return
    visited.add((canonicalize_name(name), extras))
    try:
        requirements = [Requirement(text) for text in metadata.requires(name) or ()]
    except metadata.PackageNotFoundError:  # for another platform or version of Python
        return
    for requirement in requirements:
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            _visit(requirement.name, frozenset(requirement.extras), visited)
