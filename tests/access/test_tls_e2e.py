"""TLS and mutual TLS on both ports, with the clients that are used in practice and certificates made for the test."""

from __future__ import annotations

import json
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import gevent.ssl
import openai
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import trustme
from tritonclient.utils import InferenceServerException

from tests.helpers.server_process import ServerProcess, start_server, stop_server

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Certificates:
    """PEM files: an authority, a server and a client of it, and a client of another authority."""

    ca: str
    server: str
    server_key: str
    client: str
    client_key: str
    stranger: str
    stranger_key: str


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    root = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()

    def write(name: str, issuer: trustme.CA, identity: str) -> tuple[str, str]:
        made = issuer.issue_cert(identity)
        made.cert_chain_pems[0].write_to_path(str(root / f"{name}.pem"))
        made.private_key_pem.write_to_path(str(root / f"{name}.key"))
        return str(root / f"{name}.pem"), str(root / f"{name}.key")

    authority.cert_pem.write_to_path(str(root / "ca.pem"))
    return Certificates(
        str(root / "ca.pem"),
        *write("server", authority, "127.0.0.1"),
        *write("client", authority, "client@example.org"),
        *write("stranger", trustme.CA(), "client@example.org"),
    )


def serve(certificates: Certificates, *more: str) -> ServerProcess:
    return start_server(
        "--model=mock",
        f"--ssl-certfile={certificates.server}",
        f"--ssl-keyfile={certificates.server_key}",
        f"--grpc-server-cert={certificates.server}",
        f"--grpc-server-key={certificates.server_key}",
        *more,
    )


@pytest.fixture(scope="module")
def tls(certificates: Certificates) -> Iterator[ServerProcess]:
    process = serve(certificates, "--grpc-use-ssl=1")
    yield process
    assert stop_server(process) == 0


@pytest.fixture(scope="module")
def mutual(certificates: Certificates) -> Iterator[ServerProcess]:
    """With two frontend processes, which end TLS."""
    ca = (f"--ssl-ca-certs={certificates.ca}", f"--grpc-root-cert={certificates.ca}")
    process = serve(certificates, *ca, "--ssl-cert-reqs=2", "--grpc-use-ssl-mutual=true", "--frontend-processes=2")
    yield process
    assert stop_server(process) == 0


def openai_client(server: ServerProcess, ca: str, *certificate: str) -> openai.OpenAI:
    context = ssl.create_default_context(cafile=ca)
    if certificate:
        context.load_cert_chain(*certificate)
    http = openai.DefaultHttpxClient(verify=context)
    return openai.OpenAI(base_url=f"https://{server.http}/v1", api_key="none", http_client=http, max_retries=0)


def grpc_is_live(server: ServerProcess, ca: str, certificate: str | None = None, key: str | None = None) -> bool:
    options = {"ssl": True, "root_certificates": ca, "private_key": key, "certificate_chain": certificate}
    with triton_grpc.InferenceServerClient(server.grpc, **options) as client:
        return bool(client.is_server_live(client_timeout=10))


def http_is_live(server: ServerProcess, ca: str, **certificate: str) -> bool:
    with triton_http.InferenceServerClient(
        server.http,
        ssl=True,
        ssl_options={"ca_certs": ca, **certificate},
        ssl_context_factory=gevent.ssl.create_default_context,
    ) as client:
        return bool(client.is_server_live())


def curl(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["curl", "-sS", *arguments, url], capture_output=True, text=True, timeout=30, check=False)


def complete(client: openai.OpenAI) -> str:
    with client:
        chunks = client.completions.create(model="mock", prompt="hi", max_tokens=4, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)


def test_all_clients_speak_tls(tls: ServerProcess, certificates: Certificates) -> None:
    assert complete(openai_client(tls, certificates.ca))
    assert grpc_is_live(tls, certificates.ca)
    assert http_is_live(tls, certificates.ca)
    assert curl(f"https://{tls.http}/v1/models", "--cacert", certificates.ca).stdout.startswith('{"object":"list"')


def test_a_client_that_does_not_know_the_authority_refuses_the_server(tls: ServerProcess) -> None:
    assert curl(f"https://{tls.http}/v2").returncode == 60  # peer certificate can not be authenticated


def test_plain_text_gets_nothing_from_a_tls_port(tls: ServerProcess) -> None:
    assert curl(f"http://{tls.http}/v2").returncode != 0
    with (
        triton_grpc.InferenceServerClient(tls.grpc) as client,
        pytest.raises(InferenceServerException, match="UNAVAILABLE"),
    ):
        client.is_server_live(client_timeout=10)


def test_an_old_protocol_version_is_refused(tls: ServerProcess, certificates: Certificates) -> None:
    tried = curl(f"https://{tls.http}/v2", "--cacert", certificates.ca, "--tlsv1.0", "--tls-max", "1.1")
    assert tried.returncode != 0


def test_mutual_tls_lets_known_clients_in(mutual: ServerProcess, certificates: Certificates) -> None:
    client, key = certificates.client, certificates.client_key
    assert complete(openai_client(mutual, certificates.ca, client, key))
    assert grpc_is_live(mutual, certificates.ca, client, key)
    assert http_is_live(mutual, certificates.ca, certfile=client, keyfile=key)
    own = ("--cacert", certificates.ca, "--cert", client, "--key", key)
    assert curl(f"https://{mutual.http}/v2", *own).stdout
    index = curl(f"https://{mutual.http}/v2/repository/index", *own, "--data", "{}").stdout  # the host answers
    assert [model["name"] for model in json.loads(index)] == ["mock"]


@pytest.mark.parametrize("client", ["without certificate", "stranger"])
def test_mutual_tls_keeps_others_out(mutual: ServerProcess, certificates: Certificates, client: str) -> None:
    files = [certificates.stranger, certificates.stranger_key] if client == "stranger" else []
    with pytest.raises(openai.APIConnectionError):
        complete(openai_client(mutual, certificates.ca, *files))
    with pytest.raises(InferenceServerException):
        grpc_is_live(mutual, certificates.ca, *files)
    arguments = ["--cert", files[0], "--key", files[1]] if files else []
    assert curl(f"https://{mutual.http}/v2", "--cacert", certificates.ca, *arguments).returncode != 0
