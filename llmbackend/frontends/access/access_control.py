"""The access control of one server: the checks that its settings ask for, and none where they ask for none.

For: the server process. Does not know: flags. Invariant: a check that has nothing to do is not installed, so that it
costs nothing.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions

from .api_keys import KeyFile, KeyRing, parse_keys, unnamed_keys
from .grpc_access import GrpcAccess
from .http_access import HttpAccess
from .keyed_server import KeyedServer
from .rate_limit import Account
from .request_identity import AccessMetrics, KeyTotals
from .settings import AccessSettings
from .tls import GrpcCertificate, HttpCertificate

if TYPE_CHECKING:
    from ..shared_counts import SharedCounts

log = logging.getLogger(__name__)


class AccessControl:
    """The keys, certificates and checks of one server."""

    def __init__(
        self, settings: AccessSettings, shared: SharedCounts | None = None, frontend_metrics: Path | None = None
    ) -> None:
        """Reads the keys. Raises ValueError, one line of text, when they are not valid.

        shared: where the processes of a server count together, if it has several. frontend_metrics: in a host, where
        its frontend processes keep their counters."""
        self._settings = settings
        self._frontend_metrics = frontend_metrics
        self._keys = key_ring(settings, shared) if settings.needs_keys else None
        if self._keys is not None and not self._keys.has_operator:
            log.info(
                "no API key has role=operator: loading and unloading models, shared memory, and the settings of trace "
                "and log are refused for everyone (docs/security.md)"
            )
        self._http_tls = None if settings.http_tls is None else HttpCertificate(settings.http_tls)
        self._grpc_tls = None if settings.grpc_tls is None else GrpcCertificate(settings.grpc_tls)
        self._metrics: AccessMetrics | None = None

    @property
    def has_keys(self) -> bool:
        """Whether clients need an API key."""
        return self._keys is not None

    def host(self, options: ServerOptions) -> InferenceServer:
        """The host to serve; with API keys, one that charges each request to its key."""
        return InferenceServer(options) if self._keys is None else KeyedServer(options)

    def http_tls_context(self) -> ssl.SSLContext | None:
        """For a new connection; None without TLS."""
        return None if self._http_tls is None else self._http_tls.context

    def grpc_credentials(self) -> grpc.ServerCredentials | None:
        return None if self._grpc_tls is None else self._grpc_tls.credentials

    def reload(self) -> None:
        """Reads API keys (with their limits) and certificates again, for later requests and connections. What cannot be
        read or used is logged, and the previous one stays."""
        done = []
        for what, source in (
            ("API keys", self._keys),
            ("HTTP certificate", self._http_tls),
            ("gRPC certificate", self._grpc_tls),
        ):
            if source is None:
                continue
            try:
                source.reload()
                done.append(what)
            except (ValueError, OSError) as error:
                log.error("%s; the previous content stays in force", error)
        log.info("read again: %s", ", ".join(done) or "nothing")

    def around_http(self, app: ASGIApp, registry: CollectorRegistry) -> ASGIApp:
        settings = self._settings
        if self._keys is None and not settings.http_restrictions and not settings.log_requests:
            return app
        return HttpAccess(
            app, self._keys, settings.http_restrictions, self._metrics_of(registry), settings.log_requests
        )

    def grpc_interceptors(self, registry: CollectorRegistry) -> Sequence[grpc.aio.ServerInterceptor]:
        settings = self._settings
        if self._keys is None and not settings.grpc_restrictions and not settings.log_requests:
            return ()
        return (GrpcAccess(self._keys, settings.grpc_restrictions, self._metrics_of(registry), settings.log_requests),)

    @property
    def accounts(self) -> list[Account] | None:
        """Of all keys, by name; None where none is asked for. On the event loop."""
        return None if self._keys is None else self._keys.accounts

    def totals(self) -> dict[str, KeyTotals]:
        """What requests came to since the start, by key name."""
        return {} if self._metrics is None else self._metrics.totals()

    def _metrics_of(self, registry: CollectorRegistry) -> AccessMetrics:
        if self._metrics is None:
            self._metrics = AccessMetrics(registry, self._frontend_metrics)
        return self._metrics


def key_ring(settings: AccessSettings, shared: SharedCounts | None = None) -> KeyRing:
    """All keys of `settings`. Raises ValueError, whose text never shows a key."""
    defaults = settings.default_limits
    try:
        fixed = parse_keys(settings.environment_keys.replace(",", "\n"), defaults)
    except ValueError as error:
        raise ValueError(f"LLMBACKEND_API_KEYS: {error}") from None
    try:
        fixed += unnamed_keys(settings.api_keys, defaults)
    except ValueError as error:
        raise ValueError(f"--api-key: {error}") from None
    file = None if settings.api_key_file is None else KeyFile(settings.api_key_file, defaults)
    return KeyRing(fixed, file, shares_caches=settings.share_caches, shared=shared)
