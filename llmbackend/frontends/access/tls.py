"""TLS and mutual TLS for both ports: certificate files in, gRPC credentials and an SSL context out.

For: AccessControl and the command line. Does not know: flags, sockets. Invariants: files are checked before any port
opens, so that a wrong one is one line at start and not a server that refuses every handshake; files that are read again
are checked first; an open connection keeps the certificate that it began with.
Source: Triton's SslOptions for gRPC, uvicorn's and vLLM's ssl_* options for HTTP (Triton has no TLS on HTTP).
"""

from __future__ import annotations

import ssl
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files."""

    certificate: Path
    key: Path
    ca: Path | None = None
    """What client certificates are checked against."""
    client_certificates: ssl.VerifyMode = ssl.CERT_NONE
    """Whether a client must present one."""
    ciphers: str = ""
    """Of TLS 1.2 and below on HTTP, in OpenSSL's form; "": its defaults."""

    @classmethod
    def checked(
        cls, certificate: Path, key: Path, ca: Path | None, client_certificates: ssl.VerifyMode, ciphers: str = ""
    ) -> TlsFiles:
        """Raises ValueError as `check`."""
        files = cls(certificate=certificate, key=key, ca=ca, client_certificates=client_certificates, ciphers=ciphers)
        files.check()
        return files

    def check(self) -> None:
        """Raises ValueError with one line when a file is missing, is no PEM, or does not fit the others."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for path in (self.certificate, self.key, self.ca):
            if path is not None and not path.is_file():
                raise ValueError(f"TLS: '{path}' is not a file")
        if self.client_certificates is not ssl.CERT_NONE and self.ca is None:
            raise ValueError("TLS: client certificates are required, but no CA file is given")
        try:
            # With an empty password OpenSSL does not ask for one on the terminal.
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

    def context(self) -> ssl.SSLContext:
        """For HTTP. Raises ValueError as `check`."""
        self.check()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key, password="")
        if self.ca is not None:
            context.load_verify_locations(self.ca)
        context.verify_mode = self.client_certificates
        if self.ciphers:
            context.set_ciphers(self.ciphers)
        return context

    def grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        """Raises ValueError as `check`."""
        self.check()
        return grpc.ssl_server_certificate_configuration(
            [(self.key.read_bytes(), self.certificate.read_bytes())],
            root_certificates=None if self.ca is None else self.ca.read_bytes(),
        )


class HttpCertificate:
    """What new connections of the HTTP port get. Used on the event loop alone."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self.context = files.context()

    def reload(self) -> None:
        """Raises ValueError as `TlsFiles.check`; then the previous one stays."""
        self.context = self._files.context()


class GrpcCertificate:
    """The same for the gRPC port, whose handshakes ask from threads of gRPC's core."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._newer: deque[grpc.ServerCertificateConfiguration] = deque(maxlen=1)
        self.credentials = grpc.dynamic_ssl_server_credentials(
            files.grpc_configuration(),
            self._take_newer,  # type: ignore[arg-type]  # None is allowed, as its documentation says
            require_client_authentication=files.client_certificates is ssl.CERT_REQUIRED,
        )

    def reload(self) -> None:
        """Raises ValueError as `TlsFiles.check`; then the previous one stays."""
        self._newer.append(self._files.grpc_configuration())

    def _take_newer(self) -> grpc.ServerCertificateConfiguration | None:
        """Called before each handshake; None: the one given last is still valid."""
        try:
            return self._newer.pop()
        except IndexError:
            return None


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)
