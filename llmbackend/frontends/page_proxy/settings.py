"""PageSettings: whether the web pages are served.

For: the command line and the frontend server. Does not know: the pages. Importing it costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True, kw_only=True)
class PageSettings:
    enabled: bool = False
    idle_timeout_s: float = 300.0
    """The page process ends this long after its last viewer has gone."""


NO_PAGES = PageSettings()


def pages_are_installed() -> bool:
    """Whether the extra `pages` is; nothing is imported."""
    return find_spec("nicegui") is not None
