"""Flags of access control: what is refused at start, with which line, and what is warned about."""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme
import typer

from llmbackend.cli.flags.clients import AccessFlags
from llmbackend.frontends.access.rate_limit import Limits
from llmbackend.frontends.access.settings import NO_ACCESS_CONTROL, AccessSettings, TlsFiles, exposure

OPEN = {"http_address": "0.0.0.0", "grpc_address": "0.0.0.0"}


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with server.pem, server.key, other.key, ca.pem, and junk.pem, which is no PEM file."""
    root = tmp_path_factory.mktemp("pem")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(root / "ca.pem"))
    made, other = authority.issue_cert("localhost"), authority.issue_cert("localhost")
    made.cert_chain_pems[0].write_to_path(str(root / "server.pem"))
    made.private_key_pem.write_to_path(str(root / "server.key"))
    other.private_key_pem.write_to_path(str(root / "other.key"))
    (root / "junk.pem").write_text("not a certificate\n")
    return root


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"http_restricted_api": ["everything:a=b"]}, "unknown restricted api 'everything'"),
        ({"grpc_restricted_protocol": ["health"]}, "--grpc-restricted-protocol option format"),
        ({"ssl_certfile": "server.pem"}, "--ssl-certfile and --ssl-keyfile go together"),
        ({"ssl_keyfile": "server.key"}, "--ssl-certfile and --ssl-keyfile go together"),
        ({"ssl_ca_certs": "ca.pem"}, "--ssl-ca-certs, --ssl-cert-reqs and --ssl-ciphers need"),
        ({"ssl_certfile": "none.pem", "ssl_keyfile": "server.key"}, "none.pem' is not a file"),
        ({"ssl_certfile": "junk.pem", "ssl_keyfile": "server.key"}, "junk.pem' with key .*: NO_START_LINE|PEM lib"),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "other.key"}, "KEY_VALUES_MISMATCH"),
        (
            {"ssl_certfile": "server.pem", "ssl_keyfile": "server.key", "ssl_ca_certs": "junk.pem"},
            "CA file .*junk.pem'",
        ),
        (
            {"ssl_certfile": "server.pem", "ssl_keyfile": "server.key", "ssl_cert_reqs": 2},
            "client certificates are required, but no CA file",
        ),
        ({"grpc_use_ssl": True}, "--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key"),
        (
            {"grpc_use_ssl_mutual": True, "grpc_server_cert": "server.pem", "grpc_server_key": "server.key"},
            "client certificates are required, but no CA file",
        ),
        (
            {"grpc_use_ssl": True, "grpc_server_cert": "server.pem", "grpc_server_key": "other.key"},
            "KEY_VALUES_MISMATCH",
        ),
    ],
)
def test_wrong_flags_are_refused_with_one_line(pem: Path, flags: dict[str, Any], text: str) -> None:
    placed = {name: pem / value if str(value).endswith((".pem", ".key")) else value for name, value in flags.items()}
    with pytest.raises(typer.BadParameter) as error:
        AccessFlags(**placed).settings()
    assert re.search(text, error.value.message) and "\n" not in error.value.message


def test_a_key_with_a_password_is_refused_without_a_prompt(pem: Path) -> None:
    locked = pem / "locked.key"
    command = ["openssl", "pkey", "-in", str(pem / "server.key"), "-aes256", "-passout", "pass:x", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(typer.BadParameter, match=r"server\.pem' with key"):
        AccessFlags(ssl_certfile=pem / "server.pem", ssl_keyfile=locked).settings()


def test_good_flags_become_settings(pem: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBACKEND_API_KEYS", "env:sk-env")
    settings = AccessFlags(
        api_key=["sk-1"],
        api_key_rpm=7,
        api_key_max_concurrent_requests=9,
        share_caches_between_api_keys=True,
        ssl_certfile=pem / "server.pem",
        ssl_keyfile=pem / "server.key",
        ssl_ca_certs=pem / "ca.pem",
        ssl_cert_reqs=1,
        grpc_server_cert=Path("not looked at without --grpc-use-ssl"),
    ).settings()
    assert (settings.api_keys, settings.environment_keys) == (("sk-1",), "env:sk-env")
    assert settings.default_limits == Limits(7, 0, 9) and settings.needs_keys and settings.share_caches
    assert settings.http_tls is not None and settings.http_tls.client_certificates is ssl.CERT_OPTIONAL
    assert settings.grpc_tls is None
    assert "LLMBACKEND_API_KEYS" not in os.environ, "an engine and its model need not see them"


@pytest.mark.slow
@pytest.mark.parametrize("source", ["--api-key-file=/nowhere/keys", "--api-key=with space", "environment"])
def test_a_server_with_wrong_keys_ends_at_once_with_one_line(source: str) -> None:
    command = [sys.executable, "-m", "llmbackend.cli", "serve", "--model=mock"]
    environment = dict(os.environ)
    if source == "environment":
        environment["LLMBACKEND_API_KEYS"] = "a:sk-1,b:sk-1"
    else:
        command.append(source)
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert run.returncode == 1
    assert re.fullmatch(r".*[Kk]ey.*\n", run.stderr), run.stderr
    assert "with space" not in run.stderr and "sk-1" not in run.stderr


def test_a_server_that_others_can_reach_is_warned_of() -> None:
    warning = exposure(NO_ACCESS_CONTROL, **OPEN)
    assert warning is not None and "HTTP on 0.0.0.0 has no API keys and no TLS; gRPC on 0.0.0.0 has no" in warning
    assert exposure(NO_ACCESS_CONTROL, http_address="127.0.0.1", grpc_address="::1") is None
    assert exposure(NO_ACCESS_CONTROL, http_address="localhost", grpc_address=None) is None
    warning = exposure(AccessSettings(api_keys=("k",)), http_address="::", grpc_address="127.0.0.1")
    assert warning is not None and "HTTP on :: has no TLS (" in warning


def test_mutual_tls_or_keys_behind_tls_need_no_warning(pem: Path) -> None:
    files: dict[str, Any] = {"certificate": pem / "server.pem", "key": pem / "server.key"}
    tls = TlsFiles(**files)
    mutual = TlsFiles(**files, ca=pem / "ca.pem", client_certificates=ssl.CERT_REQUIRED)
    assert exposure(AccessSettings(http_tls=mutual, grpc_tls=mutual), **OPEN) is None
    assert exposure(AccessSettings(api_keys=("k",), http_tls=tls, grpc_tls=tls), **OPEN) is None
    assert exposure(AccessSettings(http_tls=tls, grpc_tls=tls), **OPEN) is not None
