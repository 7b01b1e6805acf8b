"""Settings of access control, certificates, and the warning about an exposed server.

Invariants: certificate files are checked before use; an open connection keeps its certificate. Sources: Triton's
SslOptions for gRPC, uvicorn's and vLLM's ssl_* options for HTTP (Triton has no TLS on HTTP).
"""

from __future__ import annotations

import ssl
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import grpc

from llmbackend.links.addresses import is_loopback

from .permissions import NO_RESTRICTIONS, Restrictions
from .rate_limit import NO_LIMITS, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files."""

    certificate: Path
    key: Path
    ca: Path | None = None
    """File of the CAs that sign client certificates."""
    client_certificates: ssl.VerifyMode = ssl.CERT_NONE
    """Whether clients need a certificate."""
    ciphers: str = ""
    """Cipher list for TLS 1.2 and below on HTTP, in OpenSSL's notation; "": OpenSSL's defaults."""

    @classmethod
    def checked(
        cls, certificate: Path, key: Path, ca: Path | None, client_certificates: ssl.VerifyMode, ciphers: str = ""
    ) -> TlsFiles:
        """Raises ValueError as `context`."""
        files = cls(certificate=certificate, key=key, ca=ca, client_certificates=client_certificates, ciphers=ciphers)
        files.context()
        return files

    def context(self) -> ssl.SSLContext:
        """The context for HTTP. Raises ValueError with one line if a file is missing, not PEM, or does not match."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for path in (self.certificate, self.key, self.ca):
            if path is not None and not path.is_file():
                raise ValueError(f"TLS: '{path}' is not a file")
        if self.client_certificates is not ssl.CERT_NONE and self.ca is None:
            raise ValueError("TLS: client certificates are required, but no CA file is given")
        try:
            # With an empty password, OpenSSL does not prompt for one on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (ssl.SSLError, OSError) as error:
            raise ValueError(f"TLS: certificate '{self.certificate}' with key '{self.key}': {_reason(error)}") from None
        try:
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except (ssl.SSLError, OSError) as error:
            raise ValueError(f"TLS: CA file '{self.ca}': {_reason(error)}") from None
        try:
            if self.ciphers:
                context.set_ciphers(self.ciphers)
        except ssl.SSLError as error:
            raise ValueError(f"TLS: ciphers '{self.ciphers}': {_reason(error)}") from None
        context.verify_mode = self.client_certificates
        return context

    def grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        """Raises ValueError as `context`."""
        self.context()
        return grpc.ssl_server_certificate_configuration(
            [(self.key.read_bytes(), self.certificate.read_bytes())],
            root_certificates=None if self.ca is None else self.ca.read_bytes(),
        )


class HttpCertificate:
    """The certificate for new connections to the HTTP port. Used on the event loop."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self.context = files.context()

    def reload(self) -> None:
        """Raises ValueError as `TlsFiles.context`; the previous certificate then remains in use."""
        self.context = self._files.context()


class GrpcCertificate:
    """The certificate of the gRPC port, whose handshakes run on threads of gRPC's core."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._newer: deque[grpc.ServerCertificateConfiguration] = deque(maxlen=1)
        self.credentials = grpc.dynamic_ssl_server_credentials(
            files.grpc_configuration(),
            self._take_newer,  # type: ignore[arg-type]  # None is allowed
            require_client_authentication=files.client_certificates is ssl.CERT_REQUIRED,
        )

    def reload(self) -> None:
        """Raises ValueError as `TlsFiles.context`; the previous certificate then remains in use."""
        self._newer.append(self._files.grpc_configuration())

    def _take_newer(self) -> grpc.ServerCertificateConfiguration | None:
        """Called before each handshake; None: the previous certificate is still current."""
        try:
            return self._newer.pop()
        except IndexError:
            return None


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """How clients are admitted. Without keys, every client is."""

    api_key_file: Path | None = None
    """Read at start, and again when it changes."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys without names."""
    environment_keys: str = field(default="", repr=False)
    """LLMBACKEND_API_KEYS: lines of a key file, separated by commas."""
    default_limits: Limits = NO_LIMITS
    """The limits of keys that have none of their own."""
    share_caches: bool = False
    """Whether keys share caches."""
    http_restrictions: Restrictions = NO_RESTRICTIONS
    grpc_restrictions: Restrictions = NO_RESTRICTIONS
    http_tls: TlsFiles | None = None
    grpc_tls: TlsFiles | None = None
    log_requests: bool = False
    """Whether the access log has a line for each request."""

    def without_tls(self) -> AccessSettings:
        """The same settings without TLS, for a host whose frontend processes hold the client connections."""
        return replace(self, http_tls=None, grpc_tls=None)

    @property
    def needs_keys(self) -> bool:
        return bool(self.api_key_file or self.api_keys or self.environment_keys.strip())


NO_ACCESS_CONTROL: Final = AccessSettings()


def exposure(settings: AccessSettings, *, http_address: str | None, grpc_address: str | None) -> str | None:
    """The warning; None: none. http_address, grpc_address: None: the port is closed"""
    ports = (("HTTP", http_address, settings.http_tls), ("gRPC", grpc_address, settings.grpc_tls))
    lacks = [
        f"{name} on {address} has no {' and no '.join(missing)}"
        for name, address, tls in ports
        if address is not None and not is_local(address) and (missing := _missing(settings, tls))
    ]
    return f"reachable from other machines: {'; '.join(lacks)} (docs/security.md)" if lacks else None


def is_local(address: str) -> bool:
    """Whether `address` (an IP address, a name, or `unix:` with a path) is reachable only from this machine."""
    return address.startswith("unix:") or is_loopback(address)


def _missing(settings: AccessSettings, tls: TlsFiles | None) -> list[str]:
    knows_clients = settings.needs_keys or (tls is not None and tls.client_certificates is ssl.CERT_REQUIRED)
    return [what for what, there in (("API keys", knows_clients), ("TLS", tls is not None)) if not there]
