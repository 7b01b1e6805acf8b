"""TLS and mutual TLS for both ports: certificate files in, gRPC credentials and uvicorn's options out.

For: the frontend server and the command line. Does not know: flags, sockets. Invariant: files are checked before any
port opens, so that a wrong one is one line at start and not a server that refuses every handshake.
Source: Triton's SslOptions for gRPC, uvicorn's and vLLM's ssl_* options for HTTP (Triton has no TLS on HTTP).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files. Client certificates are checked against `ca`; `client_certificates` says whether one is needed."""

    certificate: Path
    key: Path
    ca: Path | None = None
    client_certificates: ssl.VerifyMode = ssl.CERT_NONE

    @classmethod
    def checked(cls, certificate: Path, key: Path, ca: Path | None, client_certificates: ssl.VerifyMode) -> TlsFiles:
        """Raises ValueError as `check`."""
        files = cls(certificate=certificate, key=key, ca=ca, client_certificates=client_certificates)
        files.check()
        return files

    def check(self) -> None:
        """Raises ValueError with one line when a file is missing, is no PEM, or does not fit the others."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for path in (self.certificate, self.key, self.ca):
            if path is not None and not path.is_file():
                raise ValueError(f"TLS: '{path}' is not a file")
        if self.client_certificates is not ssl.CERT_NONE and self.ca is None:
            raise ValueError("TLS: client certificates are required but no CA file is given to check them with")
        try:
            # An empty password, lest OpenSSL ask for one on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (ssl.SSLError, OSError) as error:
            raise ValueError(f"TLS: certificate '{self.certificate}' with key '{self.key}': {_reason(error)}") from None
        try:
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except (ssl.SSLError, OSError) as error:
            raise ValueError(f"TLS: CA file '{self.ca}': {_reason(error)}") from None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials(
            [(self.key.read_bytes(), self.certificate.read_bytes())],
            root_certificates=None if self.ca is None else self.ca.read_bytes(),
            require_client_auth=self.client_certificates is ssl.CERT_REQUIRED,
        )

    def uvicorn_options(self) -> dict[str, Any]:
        return {
            "ssl_certfile": self.certificate,
            "ssl_keyfile": self.key,
            "ssl_ca_certs": self.ca,
            "ssl_cert_reqs": self.client_certificates,
        }


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)
