"""The folder with a cluster's secrets: made once, for this user alone, and whole."""

import ssl
from pathlib import Path

import pytest

from llmbackend.cluster.node_certificate import issue
from llmbackend.cluster.secrets_folder import SecretsFolder
from llmbackend.cluster.settings import ClusterError


@pytest.fixture
def folder(tmp_path: Path) -> SecretsFolder:
    return SecretsFolder.create(tmp_path / "secrets")


def test_is_for_this_user_alone(folder: SecretsFolder) -> None:
    files = sorted(folder.path.iterdir())
    assert [file.name for file in files] == ["ca.key", "ca.pem", "curve.key", "token"]
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert SecretsFolder.open(folder.path) == folder


def test_is_not_made_twice(folder: SecretsFolder) -> None:
    before = folder.token.read_bytes()
    with pytest.raises(ClusterError, match=r"has token, ca\.pem, ca\.key, curve\.key already"):
        SecretsFolder.create(folder.path)
    assert SecretsFolder.open_or_create(folder.path).token.read_bytes() == before


def test_two_clusters_share_nothing(folder: SecretsFolder, tmp_path: Path) -> None:
    other = SecretsFolder.create(tmp_path / "other")
    for file in folder.path.iterdir():
        assert file.read_bytes() != (other.path / file.name).read_bytes()


@pytest.mark.parametrize("name", ["", "token", "curve.key", "ca.key"])
def test_others_must_not_read_it(folder: SecretsFolder, name: str) -> None:
    file = folder.path / name
    file.chmod(0o750)
    with pytest.raises(
        ClusterError, match=rf"other users can read the secret '{file}' \(mode 750\).*chmod {'600' if name else '700'}"
    ):
        SecretsFolder.open(folder.path)


def test_a_missing_file_is_named(folder: SecretsFolder) -> None:
    folder.authority_key.unlink()
    with pytest.raises(ClusterError, match=r"ca\.key' of the cluster's secrets cannot be read \(No such file"):
        SecretsFolder.open(folder.path)


def test_a_missing_folder_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=rf"llmbackend cluster init {tmp_path}/none"):
        SecretsFolder.open(tmp_path / "none")


def test_an_empty_token_is_refused(folder: SecretsFolder) -> None:
    folder.token.write_text("\n")
    with pytest.raises(ClusterError, match="token' is empty"):
        SecretsFolder.open(folder.path)


def test_a_machines_certificate_is_of_its_address_and_this_authority(folder: SecretsFolder, tmp_path: Path) -> None:
    certificate, key = tmp_path / "node.pem", tmp_path / "node.key"
    for _ in range(2):  # each start makes it anew
        issue(folder.authority, folder.authority_key, "127.0.0.2", certificate, key)
    assert key.stat().st_mode & 0o777 == 0o600
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder.authority))
    server.verify_mode = ssl.CERT_REQUIRED
    server.load_cert_chain(certificate, key)
    assert _handshake(server, folder, "127.0.0.2", certificate, key) == ""
    assert "IP address mismatch" in _handshake(server, folder, "127.0.0.3", certificate, key)
    other = SecretsFolder.create(tmp_path / "other")
    assert "verify failed" in _handshake(server, other, "127.0.0.2", certificate, key)


def _handshake(server: ssl.SSLContext, authority: SecretsFolder, name: str, certificate: Path, key: Path) -> str:
    """Why a client does not trust the server, "" if it does."""
    client = ssl.create_default_context(cafile=str(authority.authority))
    client.load_cert_chain(certificate, key)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    done = [False, False]
    while not all(done):
        for index, end in enumerate(ends):
            try:
                end.do_handshake()
                done[index] = True
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                return str(error)
    return ""
