"""Which requests are for the pages.

For: the page proxy. Does not know: connections, processes, which sites may ask (http/site_check.py).
"""

from __future__ import annotations

from typing import Final

WEBSOCKET_PATH: Final = "/_nicegui_ws/"
_ASSETS: Final = "/_nicegui/"
_PAGES: Final = frozenset({"/", "/chat", "/engine", "/operations"})
_FILES: Final = frozenset({"/favicon.ico"})


def is_for_pages(path: str, accept: bytes) -> bool:
    """Whether a GET of `path` is a browser's: a probe of `/`, which does not ask for HTML, starts no process."""
    if path.startswith(_ASSETS):
        return True
    return (path in _PAGES and b"text/html" in accept) or path in _FILES
