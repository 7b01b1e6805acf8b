"""Two machines as one server: two Ray nodes at two loopback addresses, with a host each, and engines for both."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from llmbackend.cluster.host_process import AgentLocator
from llmbackend.cluster.launcher import own_versions
from llmbackend.cluster.messages import AgentNews, AgentOrder, HostAddress, Versions
from llmbackend.cluster.ray_node import ray_environment
from llmbackend.cluster.secrets_folder import SecretsFolder
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.errors import EngineDeadError
from llmbackend.links.secrets import ClusterSecrets
from tests.helpers.cluster import engines_of, head_of, processes_of, run_folder, start_machine
from tests.helpers.server_process import ServerProcess, post, stop_server, write_mock_model
from tests.helpers.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = {"text_input": "abc", "parameters": {"max_tokens": 200, "ignore_eos": True, "seed": 3}}
GENERATE = "/v2/models/mock/generate"
HEAD, MEMBER, OTHER = "127.0.0.2", "127.0.0.3", "127.0.0.4"


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SecretsFolder.create(tmp_path_factory.mktemp("secrets") / "cluster").path


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    write_mock_model(repository, mock_step_ms=5.0)
    (repository / "mock/config.pbtxt").write_text('backend: "llm"\ninstance_group { count: 2 }\n')
    return repository


@pytest.fixture(scope="module")
def head_folder() -> Iterator[Path]:
    with run_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def member_folder() -> Iterator[Path]:
    with run_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def head(head_folder: Path, secrets: Path, repository: Path) -> Iterator[ServerProcess]:
    own = ("--cluster-bind", HEAD, "--cluster-cpus", "3", "--model-repository", str(repository))
    server = start_machine(head_folder, secrets, *own)
    yield server
    stop_server(server)


@pytest.fixture(scope="module")
def member(
    head: ServerProcess, head_folder: Path, member_folder: Path, secrets: Path, repository: Path
) -> Iterator[ServerProcess]:
    own = ("--cluster-bind", MEMBER, "--cluster-cpus", "2", "--model-repository", str(repository))
    server = start_machine(member_folder, secrets, *own, cluster=head_of(head_folder))
    yield server
    stop_server(server)


def host_of(server: ServerProcess) -> list[int]:
    """The process ids of the hosts that a launcher has now."""
    children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return [pid for pid in pids if b"llmbackend.cluster.host_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def refused(folder: Path, secrets: Path, cluster: str, *arguments: str) -> str:
    """What a server says that cannot be a machine of the cluster."""
    own = ("--cluster", cluster, "--cluster-bind", OTHER, "--cluster-secrets", secrets, "--cluster-run-folder", folder)
    ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    arguments = arguments or ("--model", "mock")
    ended = subprocess.run(
        [sys.executable, "-m", "llmbackend.cli", "serve", *map(str, own), *ports, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"NO_COLOR": "1"},
    )
    assert ended.returncode == 1, ended.stderr
    return ended.stderr


@contextmanager
def agent(folder: Path, secrets: Path, head: str, versions: Versions) -> Iterator[AgentNews]:
    """The agent of one more host on the head's machine, with its first words."""
    reader, writer = os.pipe()
    order = AgentOrder(
        socket=str(folder / "agent"),
        address=head,
        bind=HEAD,
        host=HostAddress("other-1", ""),
        versions=versions,
        key_name=SecretsFolder.open(secrets).key_name,
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "llmbackend.cluster.agent"],
        stdin=subprocess.PIPE,
        env=ray_environment(SecretsFolder.open(secrets), folder, HEAD) | {"LLMBACKEND_READY_FD": str(writer)},
        pass_fds=(writer,),
    )
    os.close(writer)
    assert process.stdin is not None
    with process:  # its input is closed, which ends it
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()
        with open(reader, "rb") as said:
            yield msgspec.json.decode(said.readline(), type=AgentNews)
    assert process.returncode in (0, 2)


def test_hosts_share_engines(head: ServerProcess, member: ServerProcess, head_folder: Path) -> None:
    assert len(engines_of(head_folder)) == 2, "both engines were started before the member came"
    assert post(head, GENERATE, LONG) == post(member, GENERATE, LONG)


def test_a_killed_engine_is_replaced_under_streams_of_both_hosts(
    head: ServerProcess, member: ServerProcess, head_folder: Path
) -> None:
    expected = post(member, GENERATE, LONG)
    answers: list[tuple[int, str]] = []
    clients = [
        threading.Thread(target=lambda server=server: answers.append(post(server, GENERATE, LONG)))
        for server in (head, member, head, member)
    ]
    for client in clients:
        client.start()
    eventually(lambda: head.metric("vllm:num_requests_running", "mock") > 0)
    eventually(lambda: member.metric("vllm:num_requests_running", "mock") > 0)
    os.kill(engines_of(head_folder)[0].news.pid, 9)  # both at once could make a request look like the cause
    for client in clients:
        client.join(60)
    assert answers == [expected] * 4


def test_a_killed_node_process_does_not_end_streams_and_is_replaced(
    head: ServerProcess, member: ServerProcess, head_folder: Path, member_folder: Path
) -> None:
    expected = post(member, GENERATE, LONG)
    raylet = next(pid for pid, command in processes_of(member_folder).items() if "raylet/raylet" in command)
    answers: list[tuple[int, str]] = []
    client = threading.Thread(target=lambda: answers.append(post(member, GENERATE, LONG)))
    client.start()
    eventually(lambda: member.metric("vllm:num_requests_running", "mock") > 0)
    os.kill(raylet, 9)
    client.join(60)
    assert answers == [expected]
    eventually(
        lambda: any(
            "raylet/raylet" in command and pid != raylet for pid, command in processes_of(member_folder).items()
        ),
        60,
    )
    assert post(member, GENERATE, LONG) == expected


def test_a_killed_hosts_streams_go_on_in_the_other_machines_host(head: ServerProcess, member: ServerProcess) -> None:
    expected = post(member, GENERATE, LONG)
    (host,) = host_of(member)
    answers: list[tuple[int, str]] = []
    client = threading.Thread(target=lambda: answers.append(post(member, GENERATE, LONG)))
    client.start()
    eventually(lambda: member.metric("vllm:num_requests_running", "mock") > 0)
    os.kill(host, 9)
    client.join(60)
    assert answers == [expected]
    eventually(lambda: host_of(member) not in ([], [host]), 60)
    eventually(lambda: post(member, GENERATE, LONG) == expected, 60)


class TestRefused:
    """Each within seconds, with a text that says what to do."""

    @pytest.fixture
    def folder(self) -> Iterator[Path]:
        with run_folder() as folder:
            yield folder

    def test_no_ray_at_the_address(self, folder: Path, secrets: Path) -> None:
        said = refused(folder, secrets, f"{HEAD}:1")
        assert f"--cluster: no Ray at {HEAD}:1: Connection refused" in said

    def test_no_secrets(self, folder: Path, tmp_path: Path) -> None:
        assert "llmbackend cluster init" in refused(folder, tmp_path / "none", f"{HEAD}:1")

    def test_secrets_of_another_cluster(
        self, folder: Path, tmp_path: Path, head: ServerProcess, head_folder: Path
    ) -> None:
        other = SecretsFolder.create(tmp_path / "other").path
        said = refused(folder, other, head_of(head_folder))
        assert f"the Ray at {head_of(head_folder)} has a certificate of another cluster" in said
        assert f"'{other}'" in said

    def test_another_token(
        self, folder: Path, tmp_path: Path, secrets: Path, head: ServerProcess, head_folder: Path
    ) -> None:
        other = Path(shutil.copytree(secrets, tmp_path / "other"))
        (other / "token").write_text("0" * 64)
        said = refused(folder, other, head_of(head_folder))
        assert f"the Ray at {head_of(head_folder)} has another token" in said

    def test_another_curve_key(
        self, folder: Path, tmp_path: Path, secrets: Path, head: ServerProcess, head_folder: Path
    ) -> None:
        other = Path(shutil.copytree(secrets, tmp_path / "other"))
        (other / "curve.key").unlink()
        ClusterSecrets.create(other)
        said = refused(folder, other, head_of(head_folder))
        assert f"this machine's curve.key is the key {SecretsFolder.open(other).key_name}, but the cluster's is" in said

    def test_versions_that_differ(self, folder: Path, secrets: Path, head: ServerProcess, head_folder: Path) -> None:
        """Only the release can differ here: Ray itself compares its own version and Python's."""
        old = Versions(llmbackend="0.0.9", python="3.11.1", ray="2.52.0")
        with agent(folder, secrets, head_of(head_folder), old) as news:
            assert (
                "this machine has llmbackend 0.0.9, Python 3.11.1, Ray 2.52.0, the cluster has llmbackend" in news.error
            )

    def test_a_path_that_a_node_cannot_read(
        self, folder: Path, secrets: Path, head: ServerProcess, head_folder: Path
    ) -> None:
        with agent(folder, secrets, head_of(head_folder), own_versions()) as news:
            assert not news.error
            locator = AgentLocator(folder / "agent")
            config = EngineConfig(model="/of/another/machine")
            try:
                with pytest.raises(EngineDeadError, match=r"the model '/of/another/machine' cannot be read: No such"):
                    eventually(lambda: locator.locate(0, config), 60)
            finally:
                locator.close()

    def test_a_full_cluster(
        self, folder: Path, secrets: Path, tmp_path: Path, head: ServerProcess, head_folder: Path
    ) -> None:
        write_mock_model(tmp_path, "large", num_threads=64, cluster_resources={"tape drive": 1})
        said = refused(
            folder, secrets, head_of(head_folder), "--model-repository", str(tmp_path), "--cluster-cpus", "1"
        )
        needed = "which needs 64 CPU and 1 tape drive (no node has any tape drive); the nodes have:"
        assert f"no node of the cluster can hold an engine, {needed}" in said
