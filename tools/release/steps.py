"""The steps of `make release-check`: each is a command with an exit status.

Used by tools/release/__main__.py, which runs them in this order. Invariant: a step that cannot be performed on a
machine exits with NOT_SHOWN and says on its last line what was not shown; it never passes silently.
"""

from __future__ import annotations

import sys
from typing import Final, NamedTuple

NOT_SHOWN: Final = 77
"""Exit status of a step that needs what this machine does not have."""
_PYTHON: Final = (sys.executable, "-m")


_MINORS: Final = tuple(minor for minor in (11, 12, 13, 14) if minor != sys.version_info.minor)
"""Of Python 3, beside the one that `make wheel-check` runs with."""


class Step(NamedTuple):
    """name: for `--only`. shows: what is true when it has passed."""

    name: str
    shows: str
    command: tuple[str, ...]


STEPS: Final = (
    Step("version", "one version everywhere, and it is in CHANGELOG.md", (*_PYTHON, "tools.release.versions")),
    Step("links", "each link of the documentation leads to a file and a heading", (*_PYTHON, "tools.release.links")),
    Step(
        "upgrades", "data of earlier releases are read", (*_PYTHON, "pytest", "-q", "-p", "no:xdist", "tests/upgrades")
    ),
    Step("wheel", "the wheel and the source package are built", ("make", "wheel")),
    Step("wheel-check", "the wheel serves, in an empty environment", ("make", "wheel-check")),
    *(
        Step(
            f"python-3.{minor}",
            f"the wheel serves on Python 3.{minor}",
            (*_PYTHON, "tools.release.pythons", f"{minor}"),
        )
        for minor in _MINORS
    ),
    Step("licences", "each dependency has a licence of the list", (*_PYTHON, "tools.release.licences")),
    Step("sbom", "dist/ has a bill of materials (CycloneDX)", ("make", "sbom")),
    Step("types", "the public API is typed, by mypy and by pyright", ("make", "types-check")),
    Step("docs", "the site is built without a warning", ("make", "docs")),
    Step("deploy", "container file and manifests are valid", ("make", "deploy-check")),
    Step("container", "the image is built and serves", (*_PYTHON, "tools.release.container")),
)
