"""The doors of one server: what its settings ask for, and nothing where they ask for nothing.

For: the life of the server process. Does not know: flags. Invariant: a door that has nothing to check, limit or log is
not there, so that it costs nothing.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence

import grpc
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import ServerOptions

from .api_keys import KeyFile, KeyRing, parse_keys, unnamed_keys
from .grpc_door import GrpcDoor
from .http_door import HttpDoor
from .keyed_server import KeyedServer
from .settings import DoorSettings
from .tls import GrpcCertificate, HttpCertificate
from .visit import DoorMetrics

log = logging.getLogger(__name__)


class Doors:
    def __init__(self, settings: DoorSettings) -> None:
        """Reads the keys. Raises ValueError, one line, when they are no good."""
        self._settings = settings
        self._keys = key_ring(settings) if settings.needs_keys else None
        if self._keys is not None and not self._keys.has_operator:
            log.info(
                "no API key has role=operator: loading and unloading models, shared memory, and the settings of trace "
                "and log are refused to all (docs/security.md)"
            )
        self._http_tls = None if settings.http_tls is None else HttpCertificate(settings.http_tls)
        self._grpc_tls = None if settings.grpc_tls is None else GrpcCertificate(settings.grpc_tls)
        self._metrics: DoorMetrics | None = None

    def host(self, options: ServerOptions) -> InferenceServer:
        """The host to serve: one that knows whose each request is when there are keys."""
        return InferenceServer(options) if self._keys is None else KeyedServer(options)

    def http_tls_context(self) -> ssl.SSLContext | None:
        """For a new connection."""
        return None if self._http_tls is None else self._http_tls.context

    def grpc_credentials(self) -> grpc.ServerCredentials | None:
        return None if self._grpc_tls is None else self._grpc_tls.credentials

    def reload(self) -> None:
        """Reads API keys (with their limits) and certificates again, for requests and connections that come from now
        on. What can not be read or used is logged and stays as it was."""
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
                log.error("%s; what was read before stays in force", error)
        log.info("read again: %s", ", ".join(done) or "nothing")

    def around_http(self, app: ASGIApp, registry: CollectorRegistry) -> ASGIApp:
        settings = self._settings
        if self._keys is None and not settings.http_restrictions and not settings.log_requests:
            return app
        return HttpDoor(app, self._keys, settings.http_restrictions, self._metrics_of(registry), settings.log_requests)

    def grpc_interceptors(self, registry: CollectorRegistry) -> Sequence[grpc.aio.ServerInterceptor]:
        settings = self._settings
        if self._keys is None and not settings.grpc_restrictions and not settings.log_requests:
            return ()
        return (GrpcDoor(self._keys, settings.grpc_restrictions, self._metrics_of(registry), settings.log_requests),)

    def _metrics_of(self, registry: CollectorRegistry) -> DoorMetrics:
        self._metrics = self._metrics or DoorMetrics(registry)
        return self._metrics


def key_ring(settings: DoorSettings) -> KeyRing:
    """All keys of `settings`. Raises ValueError, which never shows a key."""
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
    return KeyRing(fixed, file, shares_caches=settings.share_caches)
