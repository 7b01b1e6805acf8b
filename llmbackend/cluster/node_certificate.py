"""Certificates of a cluster: the authority in its secrets folder, and one certificate per machine.

Used by the secrets folder and the Ray node. Independent of Ray. Invariants: a machine's certificate names only its own
addresses; only this user can read private keys.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME: Final = datetime.timedelta(days=3650)
_CLOCKS_DIFFER: Final = datetime.timedelta(days=1)


def write_private(path: Path, content: bytes, *, replaces: bool = False) -> None:
    """Writes a file that only this user can read. Raises FileExistsError unless `replaces`."""
    if replaces:
        path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def make_authority(certificate: Path, key: Path) -> None:
    """Raises FileExistsError."""
    secret = ec.generate_private_key(ec.SECP256R1())
    name = _name("llmbackend cluster")
    builder = _builder(name, name, secret).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    write_private(key, _pem(secret))
    write_private(certificate, builder.sign(secret, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


def issue(authority: Path, authority_key: Path, address: str, certificate: Path, key: Path) -> None:
    """Writes or replaces the certificate of this machine, which others reach at `address`. Raises OSError or ValueError
    if the authority's files cannot be read."""
    issuer = x509.load_pem_x509_certificate(authority.read_bytes())
    issuer_key = serialization.load_pem_private_key(authority_key.read_bytes(), password=None)
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"'{authority_key}' is not an elliptic curve key, expected the one created with it")
    secret = ec.generate_private_key(ec.SECP256R1())
    names = {"localhost": None, "127.0.0.1": None, address: None, socket.gethostname(): None}
    builder = (
        _builder(_name("llmbackend node"), issuer.subject, secret)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
    )
    signed = builder.sign(issuer_key, hashes.SHA256())
    write_private(key, _pem(secret), replaces=True)
    write_private(certificate, signed.public_bytes(serialization.Encoding.PEM), replaces=True)


def _builder(subject: x509.Name, issuer: x509.Name, secret: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + _LIFETIME)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pem(secret: ec.EllipticCurvePrivateKey) -> bytes:
    return secret.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
