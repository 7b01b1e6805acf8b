"""Whether a server can be reached from other machines by anybody, or be listened to on the way.

For: the start of the server process. Does not know: sockets. Invariant: one line at most; nothing for loopback.
"""

from __future__ import annotations

import ipaddress
import ssl

from .settings import DoorSettings
from .tls import TlsFiles


def exposure(settings: DoorSettings, *, http_address: str | None, grpc_address: str | None) -> str | None:
    """The warning that is due, None when there is none. An address of None: that port is closed."""
    ports = (("HTTP", http_address, settings.http_tls), ("gRPC", grpc_address, settings.grpc_tls))
    lacks = [
        f"{name} on {address} has no {' and no '.join(missing)}"
        for name, address, tls in ports
        if address is not None and not is_loopback(address) and (missing := _missing(settings, tls))
    ]
    return f"reachable from other machines: {'; '.join(lacks)} (docs/security.md)" if lacks else None


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _missing(settings: DoorSettings, tls: TlsFiles | None) -> list[str]:
    knows_clients = settings.needs_keys or (tls is not None and tls.client_certificates is ssl.CERT_REQUIRED)
    return [what for what, there in (("API keys", knows_clients), ("TLS", tls is not None)) if not there]
