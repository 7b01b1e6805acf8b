"""The flags of `llmbackend serve` for API keys, rate limits, restricted APIs and TLS.

For: the command line. Does not know: how they are enforced (`frontends/access/`). Invariant: names are Triton's, or
vLLM's where Triton has no such flag; keys in the environment are not left there for child processes.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from llmbackend.frontends.access.permissions import parse_restrictions
from llmbackend.frontends.access.rate_limit import Limits
from llmbackend.frontends.access.settings import AccessSettings
from llmbackend.frontends.access.tls import TlsFiles

from .flag_groups import switch


@dataclass(frozen=True)
class AccessFlags:
    """Which clients may use the server, and for what (docs/security.md)."""

    PANEL: ClassVar = "Keys, TLS, restrictions"

    api_key: Annotated[list[str] | None, typer.Option("--api-key", help="A key that opens the server; repeatable.")] = (
        None
    )
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File of name:key [role=operator] [rpm=N] [tpm=N] [concurrency=N] lines; read again."),
    ] = None
    api_key_rpm: Annotated[int, typer.Option(min=0, help="Prompts per minute of a key; 0 = no limit.")] = 0
    api_key_tpm: Annotated[int, typer.Option(min=0, help="Tokens per minute of a key; 0 = no limit.")] = 0
    api_key_max_concurrent_requests: Annotated[
        int, typer.Option(min=0, help="Inferences of a key at once; 0 = its share, so that no key takes all.")
    ] = 0
    share_caches_between_api_keys: Annotated[
        Any, switch("--share-caches-between-api-keys", "A key finds prefixes and responses computed for others.")
    ] = False
    http_restricted_api: Annotated[
        list[str] | None,
        typer.Option("--http-restricted-api", help="<api>,<api>:<header>=<value>; repeatable."),
    ] = None
    grpc_restricted_protocol: Annotated[
        list[str] | None,
        typer.Option("--grpc-restricted-protocol", help="<protocol>,<protocol>:<key>=<value>; repeatable."),
    ] = None
    ssl_certfile: Annotated[Path | None, typer.Option(help="HTTP: certificate (PEM); turns TLS on.")] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(help="HTTP: the certificate's key (PEM).")] = None
    ssl_ca_certs: Annotated[Path | None, typer.Option(help="HTTP: what client certificates are checked against.")] = (
        None
    )
    ssl_cert_reqs: Annotated[
        int,
        typer.Option(min=0, max=2, help="HTTP: client certificates: 0 = not asked for, 1 = optional, 2 = required."),
    ] = 0
    grpc_use_ssl: Annotated[Any, switch("--grpc-use-ssl", "gRPC: TLS.")] = False
    grpc_use_ssl_mutual: Annotated[Any, switch("--grpc-use-ssl-mutual", "gRPC: TLS, clients need a certificate.")] = (
        False
    )
    grpc_server_cert: Annotated[Path | None, typer.Option(help="gRPC: certificate (PEM).")] = None
    grpc_server_key: Annotated[Path | None, typer.Option(help="gRPC: the certificate's key (PEM).")] = None
    grpc_root_cert: Annotated[Path | None, typer.Option(help="gRPC: what client certificates are checked against.")] = (
        None
    )
    log_requests: Annotated[
        Any, switch("--log-requests", "Log method, path, status, key's name and time of each request.")
    ] = False

    def settings(self) -> AccessSettings:
        try:
            return AccessSettings(
                api_key_file=self.api_key_file,
                api_keys=tuple(self.api_key or ()),
                environment_keys=os.environ.pop("LLMBACKEND_API_KEYS", ""),  # engines and models need not see them
                default_limits=Limits(self.api_key_rpm, self.api_key_tpm, self.api_key_max_concurrent_requests),
                share_caches=self.share_caches_between_api_keys,
                http_restrictions=parse_restrictions(self.http_restricted_api or (), "api"),
                grpc_restrictions=parse_restrictions(self.grpc_restricted_protocol or (), "protocol"),
                http_tls=self._http_tls(),
                grpc_tls=self._grpc_tls(),
                log_requests=self.log_requests,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    def _http_tls(self) -> TlsFiles | None:
        if self.ssl_certfile is None and self.ssl_keyfile is None:
            if self.ssl_ca_certs is not None or self.ssl_cert_reqs:
                raise ValueError("--ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile and --ssl-keyfile")
            return None
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            raise ValueError("--ssl-certfile and --ssl-keyfile go together")
        mode = ssl.VerifyMode(self.ssl_cert_reqs)
        return TlsFiles.checked(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs, mode)

    def _grpc_tls(self) -> TlsFiles | None:
        """As in Triton, mutual TLS implies TLS, and the files of a server without either are not looked at."""
        if not self.grpc_use_ssl and not self.grpc_use_ssl_mutual:
            return None
        if self.grpc_server_cert is None or self.grpc_server_key is None:
            raise ValueError("--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key")
        mode = ssl.CERT_REQUIRED if self.grpc_use_ssl_mutual else ssl.CERT_NONE
        return TlsFiles.checked(self.grpc_server_cert, self.grpc_server_key, self.grpc_root_cert, mode)
