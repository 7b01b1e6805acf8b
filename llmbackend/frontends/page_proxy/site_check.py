"""Which requests are for the pages, and which of them come from this site: checks of path, Host and Origin.

For: the page proxy. Does not know: connections, processes. Invariant: a page of another site reaches no page and no
websocket of this server, neither by a name of its own that resolves to this machine (DNS rebinding) nor from its own
origin. The API has its own rules (CORS, content types, keys); this is about the pages alone.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

WEBSOCKET_PATH: Final = "/_nicegui_ws/"
_ASSETS: Final = "/_nicegui/"
_PAGES: Final = frozenset({"/", "/chat", "/engine", "/operations"})
_FILES: Final = frozenset({"/favicon.ico"})


def is_for_pages(path: str, accept: bytes) -> bool:
    """Whether a GET of `path` is a browser's: a probe of `/`, which does not ask for HTML, starts no process."""
    if path.startswith(_ASSETS):
        return True
    return (path in _PAGES and b"text/html" in accept) or path in _FILES


class SiteCheck:
    """`host_names`: what this server is called, besides IP addresses, `localhost` and the machine's name."""

    def __init__(self, host_names: Iterable[str] = ()) -> None:
        self._names = {"localhost", socket.gethostname().lower(), *host_names}

    def refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Why a request is refused, "" if it is not. Header names are in lower case."""
        host, origins = "", []
        for name, value in headers:
            if name == b"host":
                host = value.decode("latin-1").lower()
            elif name == b"origin":
                origins.append(value.decode("latin-1").lower())
        if not self._is_ours(host):
            return (
                f"the pages are not served for the Host '{host[:200]}', expected an IP address, localhost, "
                f"{socket.gethostname()} or a name given with --pages-host"
            )
        if any(_authority(origin) != host for origin in origins):
            return f"the Origin of the request is '{origins[0][:200]}', expected that of the pages on '{host[:200]}'"
        return ""

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if not name or "@" in host:
                return False
            if name in self._names or name.endswith(".localhost"):
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _authority(origin: str) -> str:
    """`host:port` as a browser puts it into Host; "" for an opaque origin ('null')."""
    return origin.partition("://")[2]
