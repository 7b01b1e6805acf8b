"""What one server lets its clients hold: requests, connections, bytes, seconds.

For: everything in this package that could otherwise grow or wait without end. Does not know: protocols. Invariant:
every limit has a default that a server open to strangers can live with; who sets none is still bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from llmbackend.core.errors import ErrorCode, TritonError

from .connections import Network

RETRY_AFTER_S: Final = "1"
"""Retry-After of a refusal for want of room: a decoding step later there may be some."""


class LimitReachedError(TritonError):
    """The server has as much to do as it was allowed to take: HTTP 429, gRPC RESOURCE_EXHAUSTED.

    Triton has no code for it; where only a code crosses, it is UNAVAILABLE. `kind` is OpenAI's type of the error.
    """

    def __init__(self, message: str, retry_after: str = RETRY_AFTER_S, kind: str = "requests") -> None:
        super().__init__(message, ErrorCode.UNAVAILABLE)
        self.retry_after = retry_after
        self.kind = kind


class PermissionDeniedError(TritonError):
    """The client may not do this: HTTP 403, gRPC PERMISSION_DENIED. Where only Triton's codes cross, UNAVAILABLE."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ErrorCode.UNAVAILABLE)


@dataclass(frozen=True, kw_only=True)
class InferenceLimits:
    """Over all protocols of one server.

    max_concurrent_requests: inferences that were submitted and are not over. max_stream_buffer_bytes: responses that
    wait for one client, over all requests of its stream; a client further behind loses its request. A streamed token
    counts for about 600 bytes (see `mailbox.size_bytes`), so the default lets a client fall 7,000 tokens behind:
    minutes of one stream, and with 64 such clients a quarter of a GiB. max_body_memory_bytes: HTTP bodies that arrive,
    all together, from their first byte until what they say is handed to the host; never less than four of the largest.
    """

    max_concurrent_requests: int = 4096
    max_stream_buffer_bytes: int = 4 << 20
    max_body_memory_bytes: int = 512 << 20


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Of one HTTP endpoint.

    max_connections_per_peer: from one address (IPv6: one /64), 0 for no limit; not for trusted_proxies, which many
    clients come through. handshake_timeout_s: of TLS.
    header_timeout_s: from the connection, or the first byte of the next request, to the end of the header.
    body_timeout_s: without a byte of the body. min_body_bytes_per_s: on average, once body_timeout_s are over; 0 for
    none. linger_s: what the rest of a body gets to arrive when its request has been answered already.
    write_timeout_s: without a byte taken by the client. keep_alive_s: without a request.
    """

    max_connections: int = 4096
    max_connections_per_peer: int = 1024
    trusted_proxies: tuple[Network, ...] = ()
    max_url_bytes: int = 16 << 10
    max_header_bytes: int = 64 << 10
    max_headers: int = 128
    handshake_timeout_s: float = 20.0
    header_timeout_s: float = 20.0
    body_timeout_s: float = 30.0
    min_body_bytes_per_s: int = 4096
    linger_s: float = 5.0
    write_timeout_s: float = 60.0
    keep_alive_s: float = 75.0


@dataclass(frozen=True, kw_only=True)
class GrpcLimits:
    """Of the gRPC endpoint. Names, meanings and defaults of the first group are those of Triton's flags.

    A ping more often than min_recv_ping_interval_without_data_ms is a strike; more than max_ping_strikes of them close
    the connection. max_connection_age_ms 0 = for ever. write_timeout_s: as for HTTP.
    """

    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000
    keepalive_permit_without_calls: bool = False
    http2_max_pings_without_data: int = 2
    http2_min_recv_ping_interval_without_data_ms: int = 300_000
    http2_max_ping_strikes: int = 2
    max_connection_age_ms: int = 0
    max_connection_age_grace_ms: int = 0

    max_input_size_bytes: int = 64 << 20
    max_connections: int = 4096
    max_streams_per_connection: int = 1024
    max_metadata_bytes: int = 64 << 10
    handshake_timeout_ms: int = 20_000
    write_timeout_s: float = 60.0

    def channel_arguments(self) -> list[tuple[str, Any]]:
        """As gRPC's core names them."""
        arguments: list[tuple[str, Any]] = [
            ("grpc.keepalive_time_ms", self.keepalive_time_ms),
            ("grpc.keepalive_timeout_ms", self.keepalive_timeout_ms),
            ("grpc.keepalive_permit_without_calls", int(self.keepalive_permit_without_calls)),
            ("grpc.http2.max_pings_without_data", self.http2_max_pings_without_data),
            (
                "grpc.http2.min_ping_interval_without_data_ms",
                self.http2_min_recv_ping_interval_without_data_ms,
            ),
            ("grpc.http2.max_ping_strikes", self.http2_max_ping_strikes),
            ("grpc.max_receive_message_length", self.max_input_size_bytes),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", self.max_streams_per_connection),
            ("grpc.max_metadata_size", self.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.max_metadata_bytes),
            ("grpc.server_handshake_timeout_ms", self.handshake_timeout_ms),
        ]
        if self.max_connection_age_ms:
            arguments.append(("grpc.max_connection_age_ms", self.max_connection_age_ms))
        if self.max_connection_age_grace_ms:
            arguments.append(("grpc.max_connection_age_grace_ms", self.max_connection_age_grace_ms))
        return arguments


@dataclass(frozen=True, kw_only=True)
class FrontendLimits:
    """The metrics endpoint has the limits of HTTP, but for its connections."""

    inference: InferenceLimits = InferenceLimits()
    http: HttpLimits = HttpLimits()
    grpc: GrpcLimits = GrpcLimits()
    metrics_max_connections: int = 64

    @property
    def connections(self) -> int:
        """Over all endpoints."""
        return self.http.max_connections + self.grpc.max_connections + self.metrics_max_connections
