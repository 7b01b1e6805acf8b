"""Where a server listens, as it is logged and shown.

For: the serve process, and the launcher of a cluster. Does not know: who listens. Invariant: a port that is None is not
mentioned.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from .settings import ServerSettings

log = logging.getLogger(__name__)


class Listening(Protocol):
    @property
    def http_port(self) -> int | None: ...

    @property
    def grpc_port(self) -> int | None: ...

    @property
    def metrics_port(self) -> int | None: ...


def log_endpoints(listening: Listening, settings: ServerSettings) -> None:
    """Triton's lines, which tools wait for."""
    started = (
        ("GRPCInferenceService", settings.grpc.address, listening.grpc_port),
        ("HTTPService", settings.http.address, listening.http_port),
        ("Metrics Service", settings.metrics.address, listening.metrics_port),
    )
    for name, address, port in started:
        if port is not None:
            log.info("Started %s at %s:%d", name, address, port)


def urls_of(listening: Listening, settings: ServerSettings) -> dict[str, str]:
    """Each open endpoint's, by protocol."""
    scheme = "http" if settings.access.http_tls is None else "https"
    found = {
        "http": (scheme + "://{}:{}", settings.http.address, listening.http_port),
        "grpc": ("{}:{}", settings.grpc.address, listening.grpc_port),
        "metrics": ("http://{}:{}/metrics", settings.metrics.address, listening.metrics_port),
    }
    return {name: form.format(address, port) for name, (form, address, port) in found.items() if port is not None}


def page_url(urls: Mapping[str, str], settings: ServerSettings) -> dict[str, str]:
    """Where a browser on this machine finds the pages."""
    if not settings.pages.enabled or "http" not in urls:
        return {}
    return {"pages": f"{urls['http'].replace('0.0.0.0', 'localhost')}/"}
