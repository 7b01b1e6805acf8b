"""Checks Origin and Host against requests from web pages of other sites.

Invariants: a page of another site cannot affect this server, neither from its own origin nor, if the Host is checked,
through a name of its own that resolves to this machine (DNS rebinding). A request without an Origin, as sent by clients
other than browsers, is never refused for lacking it.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final
from urllib.parse import urlsplit

_SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
_OWN_SITE: Final = ("same-origin", "none")
_SHOWN_CHARACTERS: Final = 200
Headers = Iterable[tuple[bytes, bytes]]
"""Names in lower case."""


@dataclass(frozen=True)
class SiteCheck:
    origins: Collection[str] = ()
    """Origins of other sites whose pages may use the server; "*": any."""
    hosts: Collection[str] = ()
    """Names of this server in lower case, in addition to IP addresses, localhost and the machine's name."""
    checks_host: bool = True
    """Whether any other Host is refused. A request without a Host, which HTTP/1.0 allows, is served."""

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset({"localhost", socket.gethostname().lower(), *self.hosts})

    def refusal(self, method: str, headers: Headers) -> str:
        """Why the request is refused; "": it is not."""
        host, site, origins = "", "", []
        for name, value in headers:
            if name == b"host":
                host = value.decode("latin-1").lower()
            elif name == b"origin":
                origins.append(value.decode("latin-1").lower())
            elif name == b"sec-fetch-site":
                site = value.decode("latin-1").lower()
        if self.checks_host and host and (message := self._host_refusal(host)):
            return message
        if not _is_of_another_site(method, host, site, origins) or "*" in self.origins:
            return ""
        if origins and all(origin in self.origins for origin in origins):
            return ""
        return (
            f"the Origin of the request is '{', '.join(origins)[:_SHOWN_CHARACTERS]}', expected this server's own or "
            f"one of --allowed-origins"
        )

    def host_refusal(self, headers: Headers) -> str:
        """Like `refusal`, for pages served only under this server's names: Host is required and always checked."""
        hosts = (value.decode("latin-1").lower() for name, value in headers if name == b"host")
        return self._host_refusal(next(hosts, ""))

    def _host_refusal(self, host: str) -> str:
        if self._is_ours(host):
            return ""
        return (
            f"the Host of the request is '{host[:_SHOWN_CHARACTERS]}', expected an IP address, localhost, "
            f"{socket.gethostname()} or one of --allowed-hosts"
        )

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


def _is_of_another_site(method: str, host: str, site: str, origins: list[str]) -> bool:
    """Browsers send Sec-Fetch-Site over TLS and to loopback addresses; otherwise Origin is compared with Host. A GET
    without an Origin is a link from another site, and is served."""
    if site:
        return site not in _OWN_SITE and (bool(origins) or method not in _SAFE_METHODS)
    return any(origin.partition("://")[2] != host for origin in origins)  # "" for an opaque origin ('null')
