"""The flags of `llmbackend serve` for clients: access, limits, and stored responses.

Invariants: names and meanings are Triton's, else vLLM's; defaults are those of `frontends.limits` and
`frontends.journals.store_settings`; keys are removed from the environment before child processes inherit it.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from llmbackend.frontends.access.permissions import parse_restrictions
from llmbackend.frontends.access.rate_limit import Limits
from llmbackend.frontends.access.settings import AccessSettings, TlsFiles
from llmbackend.frontends.journals.store_settings import IN_MEMORY, IdempotencyLimits, StoreSettings
from llmbackend.frontends.limits import FrontendLimits, GrpcLimits, HttpLimits, InferenceLimits, networks

from ..command_line import bad_option, switch


@dataclass(frozen=True)
class AccessFlags:
    """Which clients may use the server, and what for (docs/security.md)."""

    PANEL: ClassVar = "Keys, TLS, restrictions"

    api_key: Annotated[list[str] | None, typer.Option(help="API key that clients may use; repeatable.")] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File of name:key [role=operator] [rpm=N] [tpm=N] [concurrency=N] lines; reread on changes."),
    ] = None
    api_key_rpm: Annotated[int, typer.Option(min=0, help="Prompts per minute per key; 0 = no limit.")] = 0
    api_key_tpm: Annotated[int, typer.Option(min=0, help="Tokens per minute per key; 0 = no limit.")] = 0
    api_key_max_concurrent_requests: Annotated[
        int, typer.Option(min=0, help="Concurrent inferences per key; 0 = a fair share.")
    ] = 0
    share_caches_between_api_keys: Annotated[Any, switch("Share cached prefixes and responses between keys.")] = False
    http_restricted_api: Annotated[list[str] | None, typer.Option(help="<api>,<api>:<header>=<value>; repeatable.")] = (
        None
    )
    grpc_restricted_protocol: Annotated[
        list[str] | None, typer.Option(help="<protocol>,<protocol>:<key>=<value>; repeatable.")
    ] = None
    ssl_certfile: Annotated[Path | None, typer.Option(help="HTTP: certificate (PEM); turns TLS on.")] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(help="HTTP: private key of the certificate (PEM).")] = None
    ssl_ca_certs: Annotated[Path | None, typer.Option(help="HTTP: CA of client certificates.")] = None
    ssl_cert_reqs: Annotated[
        int,
        typer.Option(min=0, max=2, help="HTTP: client certificates: 0 = not requested, 1 = optional, 2 = required."),
    ] = 0
    grpc_use_ssl: Annotated[Any, switch("gRPC: TLS.")] = False
    grpc_use_ssl_mutual: Annotated[Any, switch("gRPC: TLS with client certificates.")] = False
    grpc_server_cert: Annotated[Path | None, typer.Option(help="gRPC: certificate (PEM).")] = None
    grpc_server_key: Annotated[Path | None, typer.Option(help="gRPC: private key of the certificate (PEM).")] = None
    grpc_root_cert: Annotated[Path | None, typer.Option(help="gRPC: CA of client certificates.")] = None
    ssl_ciphers: Annotated[str, typer.Option(help="HTTP: ciphers for TLS 1.2 and below, in OpenSSL's format.")] = ""
    enable_log_requests: Annotated[
        bool, typer.Option("--enable-log-requests/--no-enable-log-requests", help="Same as --log-requests true.")
    ] = False
    log_requests: Annotated[Any, switch("Log each request's method, path, status, key name and duration.")] = False

    def settings(self) -> AccessSettings:
        # Engines and models must not see the keys. As in vLLM, a flag takes precedence over VLLM_API_KEY.
        keys, vllm_key = os.environ.pop("LLMBACKEND_API_KEYS", ""), os.environ.pop("VLLM_API_KEY", "")
        try:
            return AccessSettings(
                api_key_file=self.api_key_file,
                api_keys=tuple(self.api_key or ([vllm_key] if vllm_key else ())),
                environment_keys=keys,
                default_limits=Limits(self.api_key_rpm, self.api_key_tpm, self.api_key_max_concurrent_requests),
                share_caches=self.share_caches_between_api_keys,
                http_restrictions=parse_restrictions(self.http_restricted_api or (), "api"),
                grpc_restrictions=parse_restrictions(self.grpc_restricted_protocol or (), "protocol"),
                http_tls=self._http_tls(),
                grpc_tls=self._grpc_tls(),
                log_requests=self.log_requests or self.enable_log_requests,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    def _http_tls(self) -> TlsFiles | None:
        if self.ssl_certfile is None and self.ssl_keyfile is None:
            if self.ssl_ca_certs is not None or self.ssl_cert_reqs or self.ssl_ciphers:
                raise ValueError(
                    "--ssl-ca-certs, --ssl-cert-reqs and --ssl-ciphers need --ssl-certfile and --ssl-keyfile"
                )
            return None
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            raise ValueError("--ssl-certfile and --ssl-keyfile go together")
        mode = ssl.VerifyMode(self.ssl_cert_reqs)
        return TlsFiles.checked(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs, mode, self.ssl_ciphers)

    def _grpc_tls(self) -> TlsFiles | None:
        """As in Triton, mutual TLS implies TLS, and if neither is on, the server's files are not read."""
        if not self.grpc_use_ssl and not self.grpc_use_ssl_mutual:
            return None
        if self.grpc_server_cert is None or self.grpc_server_key is None:
            raise ValueError("--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key")
        mode = ssl.CERT_REQUIRED if self.grpc_use_ssl_mutual else ssl.CERT_NONE
        return TlsFiles.checked(self.grpc_server_cert, self.grpc_server_key, self.grpc_root_cert, mode)


_INFERENCE, _HTTP, _GRPC = InferenceLimits(), HttpLimits(), GrpcLimits()


def _count(help_text: str, least: int = 1, names: Sequence[str] = ()) -> Any:
    return typer.Option(*names, min=least, help=help_text)


def _seconds(help_text: str) -> Any:
    return typer.Option(min=0.1, help=f"{help_text}, seconds.")


@dataclass(frozen=True)
class LimitFlags:
    """gRPC times are in milliseconds, as in Triton."""

    PANEL: ClassVar = "Limits"

    max_concurrent_requests: Annotated[
        int,
        _count(
            "Concurrent inferences over all protocols; more get 429.",
            names=("--max-concurrent-requests", "--max-num-queued-reqs"),
        ),
    ] = _INFERENCE.max_concurrent_requests
    max_stream_buffer_bytes: Annotated[
        int, _count("Bytes that may wait for a slow client; more cancels its request.")
    ] = _INFERENCE.max_stream_buffer_bytes
    max_body_memory_bytes: Annotated[int, _count("Bytes of all HTTP bodies being received; more get 503.")] = (
        _INFERENCE.max_body_memory_bytes
    )
    http_max_connections: Annotated[int, _count("Concurrent HTTP connections; more get 429.")] = _HTTP.max_connections
    http_max_connections_per_peer: Annotated[
        int, _count("HTTP connections per client address; more get 429; 0 = no limit.", 0)
    ] = _HTTP.max_connections_per_peer
    trusted_proxies: Annotated[
        list[str] | None,
        typer.Option(help="Addresses and networks that --http-max-connections-per-peer does not limit; repeatable."),
    ] = None
    http_max_header_bytes: Annotated[
        int,
        _count(
            "Maximum header of a request, bytes.", 1024, ("--http-max-header-bytes", "--h11-max-incomplete-event-size")
        ),
    ] = _HTTP.max_header_bytes
    http_max_headers: Annotated[
        int, _count("Maximum number of header fields.", names=("--http-max-headers", "--h11-max-header-count"))
    ] = _HTTP.max_headers
    http_max_url_bytes: Annotated[int, _count("Maximum length of a URL, bytes.", 256)] = _HTTP.max_url_bytes
    http_header_timeout: Annotated[float, _seconds("Time to receive a request's header")] = _HTTP.header_timeout_s
    http_body_timeout: Annotated[float, _seconds("Maximum gap within a request's body")] = _HTTP.body_timeout_s
    http_min_body_bytes_per_s: Annotated[
        int, _count("Minimum average rate of a body, bytes per second; 0 = no limit.", 0)
    ] = _HTTP.min_body_bytes_per_s
    http_keep_alive_timeout: Annotated[float, _seconds("Maximum idle time between requests")] = _HTTP.keep_alive_s
    write_timeout: Annotated[float, _seconds("Maximum time for which a client may leave waiting data unread")] = (
        _HTTP.write_timeout_s
    )
    grpc_max_input_size: Annotated[int, _count("Maximum gRPC message of a client, bytes.")] = _GRPC.max_input_size_bytes
    grpc_max_connections: Annotated[int, _count("Concurrent gRPC connections.")] = _GRPC.max_connections
    grpc_max_concurrent_streams: Annotated[int, _count("Concurrent RPCs per connection.")] = (
        _GRPC.max_streams_per_connection
    )
    grpc_keepalive_time: Annotated[int, _count("Interval of the server's pings, ms.")] = _GRPC.keepalive_time_ms
    grpc_keepalive_timeout: Annotated[int, _count("Maximum wait for the answer to a ping, ms.")] = (
        _GRPC.keepalive_timeout_ms
    )
    grpc_keepalive_permit_without_calls: Annotated[int, typer.Option(min=0, max=1, help="1: ping idle clients.")] = int(
        _GRPC.keepalive_permit_without_calls
    )
    grpc_http2_max_pings_without_data: Annotated[int, _count("Server pings without data in between.", 0)] = (
        _GRPC.http2_max_pings_without_data
    )
    grpc_http2_min_recv_ping_interval_without_data: Annotated[
        int, _count("Minimum interval between a client's pings, ms.", 0)
    ] = _GRPC.http2_min_recv_ping_interval_without_data_ms
    grpc_http2_max_ping_strikes: Annotated[
        int, _count("Number of too frequent pings that closes a connection; 0 = no limit.", 0)
    ] = _GRPC.http2_max_ping_strikes
    grpc_max_connection_age: Annotated[int, _count("Maximum age of a connection, ms; 0 = no limit.", 0)] = (
        _GRPC.max_connection_age_ms
    )
    grpc_max_connection_age_grace: Annotated[int, _count("Time to finish RPCs after that, ms; 0 = no limit.", 0)] = (
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


@dataclass(frozen=True)
class StoreFlags:
    PANEL: ClassVar = "Stored responses"

    response_store: Annotated[str, typer.Option(help=f"Where responses are kept: {StoreSettings.FORMS}.")] = (
        IN_MEMORY.url
    )
    response_ttl: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds that a response is kept. Default: an hour in memory, 30 days elsewhere."),
    ] = None
    response_store_max_bytes: Annotated[
        int, typer.Option(min=1 << 20, help="Bytes of all responses; the oldest are deleted.")
    ] = IN_MEMORY.max_bytes
    response_store_max_per_key: Annotated[
        int, typer.Option(min=1, help="Responses per API key, or of all clients without keys; the oldest are deleted.")
    ] = IN_MEMORY.max_responses_per_key
    resume_grace: Annotated[
        float, typer.Option(min=0, help="Seconds that a resumable stream continues without a client.")
    ] = IN_MEMORY.resume_grace_s
    idempotency_ttl: Annotated[
        float, typer.Option(min=0, help="Seconds that the answer to an Idempotency-Key is kept; 0 = not at all.")
    ] = IN_MEMORY.idempotency.ttl_s

    def settings(self) -> StoreSettings:
        try:
            return StoreSettings(
                url=self.response_store,
                ttl_s=self.response_ttl,
                max_bytes=self.response_store_max_bytes,
                max_responses_per_key=self.response_store_max_per_key,
                resume_grace_s=self.resume_grace,
                idempotency=IdempotencyLimits(ttl_s=self.idempotency_ttl),
            )
        except ValueError as error:
            raise bad_option("--response-store", str(error)) from None
