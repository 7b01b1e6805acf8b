"""The flags of `llmbackend serve` that bound what clients may make it hold.

For: the command line. Does not know: what is done with them. Invariant: defaults are those of `frontends.limits`;
names and meanings are Triton's where Triton has the flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from llmbackend.frontends.limits import FrontendLimits, GrpcLimits, HttpLimits, InferenceLimits, networks

_INFERENCE, _HTTP, _GRPC = InferenceLimits(), HttpLimits(), GrpcLimits()


def _count(help_text: str, least: int = 1) -> Any:
    return typer.Option(min=least, help=help_text)


def _seconds(help_text: str) -> Any:
    return typer.Option(min=0.1, help=f"{help_text}, seconds.")


@dataclass(frozen=True)
class LimitFlags:
    """Times of gRPC are in milliseconds, as in Triton."""

    PANEL: ClassVar = "Limits"

    max_concurrent_requests: Annotated[int, _count("Inferences at once, over all protocols; more get 429.")] = (
        _INFERENCE.max_concurrent_requests
    )
    max_stream_buffer_bytes: Annotated[int, _count("What may wait for one slow client; more cancels its request.")] = (
        _INFERENCE.max_stream_buffer_bytes
    )
    max_body_memory_bytes: Annotated[int, _count("HTTP bodies that arrive at once, all together; more get 503.")] = (
        _INFERENCE.max_body_memory_bytes
    )
    http_max_connections: Annotated[int, _count("HTTP connections at once; more get 429.")] = _HTTP.max_connections
    http_max_connections_per_peer: Annotated[
        int, _count("HTTP connections from one address; more get 429; 0 = any.", 0)
    ] = _HTTP.max_connections_per_peer
    trusted_proxies: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxies",
            help="Addresses and networks that --http-max-connections-per-peer does not hold for; repeatable.",
        ),
    ] = None
    http_max_header_bytes: Annotated[int, _count("Longest header of a request.", 1024)] = _HTTP.max_header_bytes
    http_max_headers: Annotated[int, _count("Most header fields of a request.")] = _HTTP.max_headers
    http_max_url_bytes: Annotated[int, _count("Longest URL.", 256)] = _HTTP.max_url_bytes
    http_header_timeout: Annotated[float, _seconds("For a request's header to arrive")] = _HTTP.header_timeout_s
    http_body_timeout: Annotated[float, _seconds("Without a byte of a request's body")] = _HTTP.body_timeout_s
    http_min_body_bytes_per_s: Annotated[
        int, _count("Average rate at which a body must arrive, bytes per second; 0 = any.", 0)
    ] = _HTTP.min_body_bytes_per_s
    http_keep_alive_timeout: Annotated[float, _seconds("Without a request")] = _HTTP.keep_alive_s
    write_timeout: Annotated[float, _seconds("Without a byte taken by a client that has some to take")] = (
        _HTTP.write_timeout_s
    )
    grpc_max_input_size: Annotated[int, _count("Largest gRPC message of a client, bytes.")] = _GRPC.max_input_size_bytes
    grpc_max_connections: Annotated[int, _count("gRPC connections at once.")] = _GRPC.max_connections
    grpc_max_concurrent_streams: Annotated[int, _count("RPCs at once on one connection.")] = (
        _GRPC.max_streams_per_connection
    )
    grpc_keepalive_time: Annotated[int, _count("Silence before the server pings a client, ms.")] = (
        _GRPC.keepalive_time_ms
    )
    grpc_keepalive_timeout: Annotated[int, _count("Wait for the answer to a ping, ms.")] = _GRPC.keepalive_timeout_ms
    grpc_keepalive_permit_without_calls: Annotated[int, typer.Option(min=0, max=1, help="1: ping idle clients.")] = int(
        _GRPC.keepalive_permit_without_calls
    )
    grpc_http2_max_pings_without_data: Annotated[int, _count("Server's pings without data between them.", 0)] = (
        _GRPC.http2_max_pings_without_data
    )
    grpc_http2_min_recv_ping_interval_without_data: Annotated[
        int, _count("Client's pings more often are bad, ms.", 0)
    ] = _GRPC.http2_min_recv_ping_interval_without_data_ms
    grpc_http2_max_ping_strikes: Annotated[int, _count("Bad pings before the connection is closed; 0 = any.", 0)] = (
        _GRPC.http2_max_ping_strikes
    )
    grpc_max_connection_age: Annotated[int, _count("Longest life of a connection, ms; 0 = for ever.", 0)] = (
        _GRPC.max_connection_age_ms
    )
    grpc_max_connection_age_grace: Annotated[int, _count("What its RPCs get after that, ms; 0 = for ever.", 0)] = (
        _GRPC.max_connection_age_grace_ms
    )

    def limits(self) -> FrontendLimits:
        try:
            trusted_proxies = networks(self.trusted_proxies or ())
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--trusted-proxies") from None
        return FrontendLimits(
            inference=InferenceLimits(
                max_concurrent_requests=self.max_concurrent_requests,
                max_stream_buffer_bytes=self.max_stream_buffer_bytes,
                max_body_memory_bytes=self.max_body_memory_bytes,
            ),
            http=HttpLimits(
                max_connections=self.http_max_connections,
                max_connections_per_peer=self.http_max_connections_per_peer,
                trusted_proxies=trusted_proxies,
                max_url_bytes=self.http_max_url_bytes,
                max_header_bytes=self.http_max_header_bytes,
                max_headers=self.http_max_headers,
                header_timeout_s=self.http_header_timeout,
                body_timeout_s=self.http_body_timeout,
                min_body_bytes_per_s=self.http_min_body_bytes_per_s,
                write_timeout_s=self.write_timeout,
                keep_alive_s=self.http_keep_alive_timeout,
            ),
            grpc=GrpcLimits(
                keepalive_time_ms=self.grpc_keepalive_time,
                keepalive_timeout_ms=self.grpc_keepalive_timeout,
                keepalive_permit_without_calls=bool(self.grpc_keepalive_permit_without_calls),
                http2_max_pings_without_data=self.grpc_http2_max_pings_without_data,
                http2_min_recv_ping_interval_without_data_ms=self.grpc_http2_min_recv_ping_interval_without_data,
                http2_max_ping_strikes=self.grpc_http2_max_ping_strikes,
                max_connection_age_ms=self.grpc_max_connection_age,
                max_connection_age_grace_ms=self.grpc_max_connection_age_grace,
                max_input_size_bytes=self.grpc_max_input_size,
                max_connections=self.grpc_max_connections,
                max_streams_per_connection=self.grpc_max_concurrent_streams,
                write_timeout_s=self.write_timeout,
            ),
        )
