"""What operators do to a host's work: `InferenceServer.cancel_request` and `kill_instance`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest

from llmbackend.core.backend_api import Tenant
from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.inference_server import InferenceServer
from tests.helpers.core_backends import STREAMING_BACKEND
from tests.helpers.core_host import ECHO_BACKEND, KEEPING_BACKEND, STAGE, Client, Repository, send, serving, version_of

KILLING_BACKEND = (
    KEEPING_BACKEND
    + """
from llmbackend.core.backend_api import unavailable

def LLMBACKEND_ModelInstanceKill(instance):
    if not STAGE.processes:
        raise unavailable("no process")
    process = STAGE.processes.pop()
    process.kill()
    return process.pid
"""
)


@pytest.fixture
def streaming(repository: Repository) -> Iterator[InferenceServer]:
    repository.backend("s", STREAMING_BACKEND)
    repository.model("m", "s", "version_policy { all {} }", versions=(1, 2))
    with serving(repository, "m") as server:
        yield server


def started(server: InferenceServer, request_id: str, tenant: Tenant | None = None, version: int = -1) -> Client:
    client = send(server, "m", id=request_id, model_version=version, **({} if tenant is None else {"tenant": tenant}))
    STAGE.wait(f"executed {request_id}")
    return client


def number_of(server: InferenceServer, request_id: str, version: int = -1) -> int:
    (channel,) = version_of(server, "m", version).live_requests.with_id(request_id)
    return channel.number


def not_in_flight(server: InferenceServer, number: int, by: Tenant | None = None) -> bool:
    with pytest.raises(TritonError, match=re.escape(f"request {number} is not in flight")) as caught:
        server.cancel_request(number, by)
    return caught.value.code is ErrorCode.NOT_FOUND


def test_one_request_is_cancelled_by_its_number(streaming: InferenceServer) -> None:
    clients = [started(streaming, "a"), started(streaming, "b"), started(streaming, "c", version=1)]
    numbers = [number_of(streaming, "a"), number_of(streaming, "b"), number_of(streaming, "c", version=1)]
    assert len(set(numbers)) == 3 and min(numbers) > 0
    for client, number in zip(clients, numbers, strict=True):
        assert client.events.empty()
        streaming.cancel_request(number)
        assert client.error().code is ErrorCode.CANCELLED
        assert not_in_flight(streaming, number)


def test_a_tenant_ends_its_own_requests_and_an_operator_all(streaming: InferenceServer) -> None:
    alice, bob, operator = Tenant("alice"), Tenant("bob"), Tenant("root", is_operator=True)
    clients = {tenant: started(streaming, tenant.key_name, tenant) for tenant in (alice, bob)}
    numbers = {tenant: number_of(streaming, tenant.key_name) for tenant in clients}
    assert not_in_flight(streaming, numbers[alice], by=bob) and clients[alice].events.empty()
    streaming.cancel_request(numbers[bob], by=bob)
    streaming.cancel_request(numbers[alice], by=operator)
    assert all(client.error().code is ErrorCode.CANCELLED for client in clients.values())


def test_the_process_of_an_instance_is_killed_by_its_backend(repository: Repository) -> None:
    repository.backend("killing", KILLING_BACKEND)
    repository.model("m", "killing", "instance_group [ { name: 'one' count: 2 kind: KIND_CPU } ]")
    with serving(repository, "m") as server, subprocess.Popen(["sleep", "60"]) as process:
        STAGE.processes = [process]  # type: ignore[attr-defined]  # for the backend
        for name, version in (("nosuch", 1), ("m", 9)):
            with pytest.raises(TritonError) as caught:
                server.kill_instance(name, version, "one_0")
            assert caught.value.code is ErrorCode.NOT_FOUND
        with pytest.raises(TritonError, match="has no instance 'two_0', its instances are one_0, one_1") as caught:
            server.kill_instance("m", 1, "two_0")
        assert caught.value.code is ErrorCode.NOT_FOUND
        assert server.kill_instance("m", 1, "one_1") == [process.pid] and process.wait() == -9
        with pytest.raises(TritonError, match="no process") as caught:
            server.kill_instance("m", 1, "one_1")
        assert caught.value.code is ErrorCode.UNAVAILABLE


def test_a_backend_without_processes_says_so(repository: Repository) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo")
    with serving(repository, "m") as server:
        with pytest.raises(TritonError, match="backend 'echo' runs no instance process") as caught:
            server.kill_instance("m", 1, "m_0")
        assert caught.value.code is ErrorCode.UNSUPPORTED
