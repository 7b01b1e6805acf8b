"""How much the clients of one server may use: requests, connections, bytes, seconds.

Invariant: each default suits a server that is open to unknown clients.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """The addresses and networks (10.0.0.0/8) in comma-separated texts. Raises ValueError for an invalid one."""
    return tuple(ipaddress.ip_network(part.strip()) for text in texts for part in text.split(",") if part.strip())


@dataclass(frozen=True, kw_only=True)
class InferenceLimits:
    """Limits of one server over all protocols."""

    max_concurrent_requests: int = 4096
    """Open inferences."""
    max_stream_buffer_bytes: int = 4 << 20
    """Responses that wait for one client, over all requests of its stream; beyond it, the client's request is
    cancelled. A streamed token counts as about 600 bytes (`messages.held_bytes`), so the default is 7,000 tokens."""
    max_body_memory_bytes: int = 512 << 20
    """HTTP bodies, each from its first byte until the host has its content; at least four of the largest size."""


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    max_connections: int = 4096
    max_refused_connections: int = 64
    """Connections beyond max_connections that may be open at the same time, to be refused with a response."""
    max_connections_per_peer: int = 1024
    """Limit for one address (IPv6: one /64); 0: no limit."""
    max_websockets_per_peer: int = 32
    """Limit for the web pages' websockets, which clients open without a key; 0: no limit."""
    trusted_proxies: tuple[Network, ...] = ()
    """Proxies, which carry many clients and are exempt from the limits per peer."""
    max_url_bytes: int = 16 << 10
    max_header_bytes: int = 64 << 10
    max_headers: int = 128
    handshake_timeout_s: float = 20.0
    """Timeout of the TLS handshake."""
    header_timeout_s: float = 20.0
    """Time from the connection, or from the first byte of the next request, to the end of the header."""
    body_timeout_s: float = 30.0
    """Longest time without a byte of the body."""
    min_body_bytes_per_s: int = 4096
    """Lowest average rate, checked after body_timeout_s; 0: no minimum."""
    linger_s: float = 5.0
    """Time to read the rest of a body whose request was already answered."""
    write_timeout_s: float = 60.0
    """Longest time in which the client reads no byte."""
    keep_alive_s: float = 75.0
    """Longest idle time between requests."""


@dataclass(frozen=True, kw_only=True)
class GrpcLimits:
    """Limits of the gRPC endpoint. The first group has the names and defaults of Triton's flags."""

    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000
    keepalive_permit_without_calls: bool = False
    http2_max_pings_without_data: int = 2
    http2_min_recv_ping_interval_without_data_ms: int = 300_000
    """A ping that arrives earlier counts as a strike."""
    http2_max_ping_strikes: int = 2
    """Further strikes close the connection."""
    max_connection_age_ms: int = 0
    """0: no limit."""
    max_connection_age_grace_ms: int = 0

    max_input_size_bytes: int = 64 << 20
    """Limit of one message."""
    max_connections: int = 4096
    max_streams_per_connection: int = 1024
    max_metadata_bytes: int = 64 << 10
    handshake_timeout_ms: int = 20_000
    write_timeout_s: float = 60.0
    """Longest time in which the client reads no byte."""

    def channel_arguments(self) -> list[tuple[str, Any]]:
        arguments: list[tuple[str, Any]] = [
            ("grpc.keepalive_time_ms", self.keepalive_time_ms),
            ("grpc.keepalive_timeout_ms", self.keepalive_timeout_ms),
            ("grpc.keepalive_permit_without_calls", int(self.keepalive_permit_without_calls)),
            ("grpc.http2.max_pings_without_data", self.http2_max_pings_without_data),
            ("grpc.http2.min_ping_interval_without_data_ms", self.http2_min_recv_ping_interval_without_data_ms),
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
    inference: InferenceLimits = InferenceLimits()
    http: HttpLimits = HttpLimits()
    grpc: GrpcLimits = GrpcLimits()
    metrics_max_connections: int = 64
    """Limit of the metrics endpoint; its other limits are those of HTTP."""

    @property
    def connections(self) -> int:
        """Over all endpoints."""
        return self.http.max_connections + self.grpc.max_connections + self.metrics_max_connections
