"""The settings of a server's access control, and whether they leave the server exposed.

For: `ServerSettings` and the start of the server process. Does not know: flags, sockets, the keys themselves (files and
the environment are read at start). Invariant: the settings have been checked; the warning is one line at most, and
there is none for loopback.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from llmbackend.links.addresses import is_loopback

from .permissions import NO_RESTRICTIONS, Restrictions
from .rate_limit import NO_LIMITS, Limits
from .tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """Without a source of keys every client is admitted."""

    api_key_file: Path | None = None
    """Read at start, and again when it changes."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys without a name."""
    environment_keys: str = field(default="", repr=False)
    """LLMBACKEND_API_KEYS: lines of a key file, separated by commas."""
    default_limits: Limits = NO_LIMITS
    """Of keys that have no limits of their own."""
    share_caches: bool = False
    """Whether what is cached for one key may be used for another one."""
    http_restrictions: Restrictions = NO_RESTRICTIONS
    grpc_restrictions: Restrictions = NO_RESTRICTIONS
    http_tls: TlsFiles | None = None
    grpc_tls: TlsFiles | None = None
    log_requests: bool = False
    """Whether each request becomes a line of the access log."""

    def without_tls(self) -> AccessSettings:
        """For a host whose frontend processes hold the clients' connections, and end TLS."""
        return replace(self, http_tls=None, grpc_tls=None)

    @property
    def needs_keys(self) -> bool:
        return bool(self.api_key_file or self.api_keys or self.environment_keys.strip())


NO_ACCESS_CONTROL: Final = AccessSettings()


def exposure(settings: AccessSettings, *, http_address: str | None, grpc_address: str | None) -> str | None:
    """The warning to log, None when there is none. An address of None: that port is closed."""
    ports = (("HTTP", http_address, settings.http_tls), ("gRPC", grpc_address, settings.grpc_tls))
    lacks = [
        f"{name} on {address} has no {' and no '.join(missing)}"
        for name, address, tls in ports
        if address is not None and not is_local(address) and (missing := _missing(settings, tls))
    ]
    return f"reachable from other machines: {'; '.join(lacks)} (docs/security.md)" if lacks else None


def is_local(address: str) -> bool:
    """Whether only this machine can reach a server on `address`, an IP address, a name, or `unix:` with a path."""
    return address.startswith("unix:") or is_loopback(address)


def _missing(settings: AccessSettings, tls: TlsFiles | None) -> list[str]:
    knows_clients = settings.needs_keys or (tls is not None and tls.client_certificates is ssl.CERT_REQUIRED)
    return [what for what, there in (("API keys", knows_clients), ("TLS", tls is not None)) if not there]
