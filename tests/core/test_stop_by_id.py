"""Stop by the client's request id: `InferenceServer.cancel_requests`."""

from __future__ import annotations

import pytest

from llmbackend.core.backend_api import NO_TENANT, ResponseFlag, Tenant
from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.inference_server import InferenceServer
from tests.helpers.core_backends import STREAMING_BACKEND
from tests.helpers.core_host import KEEPING_BACKEND, STAGE, Client, Repository, send, serving, version_of
from tests.helpers.waiting import eventually


@pytest.fixture
def streaming(repository: Repository) -> Repository:
    repository.backend("s", STREAMING_BACKEND)
    repository.model("m", "s", "version_policy { all {} }", versions=(1, 2))
    return repository


def started(server: InferenceServer, request_id: str, version: int = -1) -> Client:
    client = send(server, "m", id=request_id, model_version=version)
    STAGE.wait(f"executed {request_id}")
    return client


def ended(client: Client) -> bool:
    return client.error().code is ErrorCode.CANCELLED


def test_every_live_request_of_that_id_is_stopped(streaming: Repository) -> None:
    with serving(streaming, "m") as server:
        clients = [started(server, "a"), started(server, "a", version=1), started(server, "b")]
        assert server.cancel_requests("m", -1, "nosuch") == 0
        assert server.cancel_requests("m", -1, "a") == 2
        assert ended(clients[0]) and ended(clients[1]) and clients[2].events.empty()
        assert server.cancel_requests("m", -1, "a") == 0
        assert server.cancel_requests("m", 1, "b") == 0 and server.cancel_requests("m", 2, "b") == 1
        assert ended(clients[2])


def test_an_id_belongs_to_its_tenant(streaming: Repository) -> None:
    alice, bob, operator = Tenant("alice"), Tenant("bob"), Tenant("root", is_operator=True)
    with serving(streaming, "m") as server:
        clients = {}
        for tenant in (NO_TENANT, alice, bob):
            clients[tenant] = send(server, "m", id="a", tenant=tenant)
            STAGE.wait("executed a")
            STAGE.gates.clear()
        assert server.cancel_requests("m", -1, "a", by=Tenant("carol")) == 0
        assert server.cancel_requests("m", -1, "a", by=bob) == 1 and ended(clients[bob])
        assert clients[alice].events.empty() and clients[NO_TENANT].events.empty()
        assert server.cancel_requests("m", -1, "a", by=NO_TENANT) == 1 and ended(clients[NO_TENANT])
        assert server.cancel_requests("m", -1, "a", by=operator) == 1 and ended(clients[alice])


def test_a_request_is_found_by_every_name_of_its_model(streaming: Repository) -> None:
    served_names = 'parameters { key: "served_model_name" value { string_value: "org/m" } }'
    streaming.model("m", "s", f"version_policy {{ all {{}} }} {served_names}", versions=(1, 2))
    with serving(streaming, "m") as server:
        clients = [started(server, "a", version=version) for version in (1, 2)]
        assert server.cancel_requests("org/m", 1, "a") == 1 and ended(clients[0])
        assert server.cancel_requests("org/m", -1, "a") == 1 and ended(clients[1])


def test_the_empty_id_matches_nothing(streaming: Repository) -> None:
    with serving(streaming, "m") as server:
        client = started(server, "")
        assert server.cancel_requests("m", -1, "") == 0 and client.events.empty()
        client.cancel()
        assert ended(client)


def test_unknown_models_are_refused_as_for_infer(streaming: Repository) -> None:
    with serving(streaming, "m") as server:
        for name, version in (("nosuch", -1), ("m", 9)):
            with pytest.raises(TritonError) as caught:
                server.cancel_requests(name, version, "a")
            with pytest.raises(TritonError) as by_infer:
                send(server, name, model_version=version)
            assert caught.value.status == by_infer.value.status
            assert caught.value.code is ErrorCode.NOT_FOUND


def test_a_request_on_a_version_that_drains_is_found(streaming: Repository) -> None:
    with serving(streaming, "m") as server:
        before = started(server, "a")
        (streaming.models / "m" / "2" / "new").touch()
        server.load_model("m")
        after = send(server, "m", id="a")
        eventually(lambda: len(STAGE.kept) == 2)
        assert server.cancel_requests("m", 2, "a") == 2 and ended(before) and ended(after)
        last = started(server, "z")
        server.unload_model("m")
        assert server.cancel_requests("m", -1, "z") == 1 and ended(last)
        with pytest.raises(TritonError, match="has no available versions"):
            eventually(lambda: server.cancel_requests("m", -1, "z"))


def test_a_queued_request_is_stopped(repository: Repository) -> None:
    source = "from tests.helpers.core_host import STAGE\n\n"
    source += "def TRITONBACKEND_ModelInstanceExecute(instance, requests):\n"
    source += "    STAGE.open('busy')\n    STAGE.wait('go')\n    for request in requests: request.release()\n"
    repository.backend("busy", source)
    repository.model("m", "busy")
    with serving(repository, "m") as server:
        first = send(server, "m")
        STAGE.wait("busy")
        queued = send(server, "m", id="a")
        assert server.cancel_requests("m", -1, "a") == 1 and ended(queued)
        STAGE.open("go")
        first.responses()


def test_a_request_stays_known_until_its_last_handle_is_gone(repository: Repository) -> None:
    repository.backend("keep", KEEPING_BACKEND)
    repository.model("m", "keep")
    with serving(repository, "m") as server:
        client = send(server, "m", id="a")
        STAGE.wait("executed a")
        live = version_of(server, "m").live_requests
        _, request = STAGE.kept.pop()
        factory = request.response_factory()
        request.release()
        assert (len(live), live.id_count) == (1, 1)
        factory.send_flags(ResponseFlag.FINAL)
        assert server.cancel_requests("m", -1, "a") == 0  # it is over for its client
        factory.close()
        assert client.responses() == [] and (len(live), live.id_count) == (0, 0)
