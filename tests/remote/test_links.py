"""Links between frontends and hosts: who is refused, who is gone, who is behind, and what crosses a network."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from llmbackend.core.backend_api import is_final
from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceRequest, InferenceResponse, ResponseFlag
from llmbackend.core.tensors import Tensor
from llmbackend.core.tracing.trace import TraceLevel, TraceSettings
from llmbackend.links.secrets import ClusterSecrets
from llmbackend.remote.host_endpoint import LARGE_BYTES, HostEndpoint
from llmbackend.remote.remote_server import RemoteServer
from llmbackend.remote.requests import unpacked_request
from llmbackend.remote.wire import Frame, HostPeer, Submit
from tests.helpers.core_host import STAGE, WAIT_S, Repository, serving, version_of, x
from tests.helpers.ensemble_host import chain, parts
from tests.helpers.kserve_scripted import RECORD, start_host
from tests.helpers.server_process import ROOT
from tests.helpers.waiting import eventually_async
from tests.remote.linked_host import answers, attached, served, shown
from tests.remote.processes import relayed

KEYS, OTHER_KEYS = ClusterSecrets(*zmq.curve_keypair()), ClusterSecrets(*zmq.curve_keypair())
INPUT = Tensor.of("INPUT0", np.arange(8, dtype=np.float32).reshape(2, 4))


@pytest.fixture(params=["one machine", "network"])
def keys(request: pytest.FixtureRequest) -> ClusterSecrets | None:
    """Those of a link over a network; None for one within a machine."""
    return None if request.param == "one machine" else KEYS


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    host = start_host(tmp_path_factory.mktemp("host"))
    yield host
    assert host.stop(10)


async def test_a_frontend_of_another_release_is_refused_with_both(
    host: InferenceServer, tmp_path: Path, keys: ClusterSecrets | None
) -> None:
    async with served(host, tmp_path, keys=keys, release="1.2.3") as endpoint:
        server = RemoteServer([endpoint.endpoint], keys=keys, release="1.2.4", name="web 1")
        with pytest.raises(TritonError) as caught:
            await server.start(2)
        server.close()
        for part in ("frontend 'web 1'", "1.2.4", "1.2.3"):
            assert part in caught.value.message
        assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_without_a_host_the_start_says_where_none_is(tmp_path: Path) -> None:
    server = RemoteServer([f"ipc://{tmp_path}/nobody"])
    with pytest.raises(TritonError, match=f"no host answers at ipc://{tmp_path}/nobody"):
        await server.start(0.2)
    assert not server.is_ready() and not server.is_live()
    server.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_requests_of_a_frontend_that_is_killed_or_hangs_are_cancelled(
    host: InferenceServer, tmp_path: Path, keys: ClusterSecrets | None, how: signal.Signals
) -> None:
    id = f"{how.name} {keys is None}"
    timeout_s = 2.0 if how is signal.SIGSTOP else 1000.0
    async with served(host, tmp_path, keys=keys, heartbeat_timeout_s=timeout_s) as endpoint:
        command = [sys.executable, "-m", "tests.remote.frontend_process", endpoint.endpoint, id]
        command += [] if keys is None else [key.decode() for key in (keys.curve_public_key, keys.curve_secret_key)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as frontend:
            assert frontend.stdout is not None
            said = await asyncio.to_thread(frontend.stdout.readline)
            assert said == b"open []\n", "a frontend needs neither torch nor adapter nor engine"
            await eventually_async(RECORD.began[id].is_set)
            frontend.send_signal(how)
            await eventually_async(RECORD.cancelled[id].is_set)
            frontend.kill()


async def test_a_host_that_says_nothing_more_is_left(
    host: InferenceServer, tmp_path: Path, keys: ClusterSecrets | None
) -> None:
    async with (
        served(host, tmp_path, keys=keys) as endpoint,
        relayed(endpoint.endpoint, tmp_path) as relay,
        attached(relay.endpoint, keys=keys, heartbeat_timeout_s=2.0) as server,
    ):
        relay.cut()
        await eventually_async(lambda: not server.is_ready())


async def test_a_request_ends_whose_frontend_is_behind_and_others_go_on(
    host: InferenceServer, tmp_path: Path, keys: ClusterSecrets | None
) -> None:
    got: dict[str, list[InferenceResponse]] = {"flood": [], "one": []}
    is_over: set[str] = set()

    def id_of(name: str) -> str:
        return f"{name} {keys is None}"

    def submit(server: RemoteServer, name: str, text: str) -> None:
        def callback(response: InferenceResponse | None, flags: ResponseFlag) -> None:
            got[name] += [response] if response is not None else []
            if flags:
                is_over.add(name)

        request = InferenceRequest("llm", id=id_of(name), inputs=(Tensor.text("text_input", text),))
        server.infer_async(request, callback)

    async with (
        served(host, tmp_path, keys=keys, max_unread_bytes=1 << 20) as endpoint,
        attached(endpoint.endpoint, keys=keys) as server,
    ):
        submit(server, "flood", "n=4000 kib=64")
        submit(server, "one", "n=1 kib=4096")
        RECORD.began[id_of("flood")].wait(20)
        RECORD.cancelled[id_of("flood")].wait(20)  # the loop of the frontend does not run
        await eventually_async(lambda: is_over == {"flood", "one"})
    last = got["flood"][-1].error
    assert last is not None and last.code is ErrorCode.CANCELLED and "1048576 bytes" in last.message
    assert len(got["flood"]) < 4000
    assert [response.error for response in got["one"]] == [None]


async def test_an_ensemble_ends_whose_frontend_is_behind(tmp_path: Path) -> None:
    """Its response callback runs under a lock that its cancellation takes."""
    STAGE.clear()
    repository = Repository(tmp_path)
    parts(repository, "gate", "repeat")
    chain(repository, "e", "gate", "repeat")
    ends: list[InferenceResponse | None] = []

    def callback(response: InferenceResponse | None, flags: ResponseFlag) -> None:
        if is_final(flags):
            ends.append(response)

    with serving(repository, "e") as host:
        async with (
            served(host, tmp_path, max_unread_bytes=1) as endpoint,
            attached(endpoint.endpoint) as server,
        ):
            server.infer_async(InferenceRequest("e", inputs=(x(*range(5)),)), callback)
            await eventually_async(lambda: "execute gate" in STAGE.events)
            STAGE.open("gate")
            model = version_of(host, "e")
            assert model.in_flight.wait_for_zero(WAIT_S)  # the loop of the frontend does not run
            await eventually_async(lambda: bool(ends))
    error = ends[0].error if ends[0] is not None else None
    assert error is not None and error.code is ErrorCode.CANCELLED and "reads too slowly" in error.message


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hosts decode large requests once it is set."""
    gate = threading.Event()

    def slow(submit: Submit, frames: Sequence[Frame]) -> InferenceRequest:
        assert sum(map(len, frames)) < LARGE_BYTES or gate.wait(20)
        return unpacked_request(submit, frames)

    monkeypatch.setattr("llmbackend.remote.host_endpoint.unpacked_request", slow)
    return gate


async def test_the_trace_of_a_large_request_ends_whose_client_leaves_before_it_is_decoded(
    tmp_path: Path, decoding: threading.Event
) -> None:
    settings = TraceSettings(level=TraceLevel.TIMESTAMPS, rate=1, file=str(tmp_path / "traces"))
    host = start_host(tmp_path / "traced", trace=settings)
    ends: list[InferenceResponse | None] = []
    async with served(host, tmp_path) as endpoint, attached(endpoint.endpoint) as server:
        large = InferenceRequest("llm", inputs=(Tensor.text("text_input", "n=1".ljust(LARGE_BYTES)),))
        for _ in range(3):  # one more than are decoded at a time
            trace = server.tracing.sample("llm", lambda name: None)
            assert trace is not None
            request = replace(large, trace=trace)
            server.infer_async(request, lambda response, flags: ends.append(response) if is_final(flags) else None)
            trace.close()
        await answers(server, InferenceRequest("identity", inputs=(INPUT,)))
        decoding.set()
        await eventually_async(lambda: len(ends) == 3)
        await eventually_async(lambda: host.tracing.open_count == 0)
    assert host.stop(10)


def test_large_requests_beyond_the_limit_are_refused_before_they_are_decoded(
    host: InferenceServer, tmp_path: Path, keys: ClusterSecrets | None, decoding: threading.Event
) -> None:
    """A host that is slow to decode holds no more of them than its limit; others go on."""
    got: dict[str, list[InferenceResponse]] = {"first": [], "second": [], "small": []}
    num_ended = dict.fromkeys(got, 0)

    def submit(server: RemoteServer, name: str, size: int) -> None:
        def callback(response: InferenceResponse | None, flags: ResponseFlag) -> None:
            got[name] += [response] if response is not None else []
            num_ended[name] += flags & ResponseFlag.FINAL > 0

        text = Tensor.text("text_input", "n=1".ljust(size))
        server.infer_async(InferenceRequest("llm", id=f"{name} {keys is None}", inputs=(text,)), callback)

    async def run() -> None:
        async with (
            served(host, tmp_path, keys=keys, max_waiting_bytes=3 * LARGE_BYTES) as endpoint,
            attached(endpoint.endpoint, keys=keys) as server,
        ):
            submit(server, "first", 2 * LARGE_BYTES)
            submit(server, "second", 2 * LARGE_BYTES)
            submit(server, "small", 8)
            await eventually_async(lambda: bool(num_ended["second"] and num_ended["small"]))
            assert not got["first"]
            decoding.set()
            await eventually_async(lambda: bool(num_ended["first"]))
            submit(server, "second", 2 * LARGE_BYTES)
            await eventually_async(lambda: num_ended["second"] == 2)

    asyncio.run(run())
    refusal, *answers = [response.error for response in got["second"]]
    assert refusal is not None and refusal.code is ErrorCode.UNAVAILABLE
    assert f"limit of {3 * LARGE_BYTES} bytes" in refusal.message
    assert [response.error for response in got["first"] + got["small"]] + answers == [None] * (2 + len(answers))


async def test_a_link_over_a_network_is_encrypted_and_carries_the_same(host: InferenceServer) -> None:
    endpoint = HostEndpoint(host, "tcp://127.0.0.1:0", keys=KEYS)
    endpoint.start()
    try:
        async with attached(endpoint.endpoint, keys=KEYS) as server:
            request = InferenceRequest("identity", inputs=(INPUT,))
            assert shown(await answers(server, request)) == shown(await answers(host, request))
        other = RemoteServer([endpoint.endpoint], keys=OTHER_KEYS)
        with pytest.raises(TritonError, match="key"):
            await other.start(2)
        other.close()
    finally:
        await asyncio.to_thread(endpoint.close)


def test_a_client_that_knows_the_public_key_alone_is_refused(host: InferenceServer) -> None:
    """Nobody keeps it secret."""
    endpoint = HostEndpoint(host, "tcp://127.0.0.1:0", keys=KEYS)
    endpoint.start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.curve_serverkey = KEYS.curve_public_key
        client.curve_publickey, client.curve_secretkey = OTHER_KEYS.curve_public_key, OTHER_KEYS.curve_secret_key
        client.linger = 0
        monitor = client.get_monitor_socket(zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_SUCCEEDED)
        client.connect(endpoint.endpoint)
        assert monitor.poll(60_000)
        assert recv_monitor_message(monitor)["event"] == zmq.Event.HANDSHAKE_FAILED_AUTH
        client.disable_monitor()
        monitor.close()
    endpoint.close()


def test_a_frontend_that_ends_in_order_is_not_missed(
    host: InferenceServer, tmp_path: Path, keys: ClusterSecrets | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "llmbackend.remote.host_endpoint")

    async def run() -> None:
        async with served(host, tmp_path, keys=keys) as endpoint:
            async with attached(endpoint.endpoint, keys=keys, name="web 1"):
                pass
            await eventually_async(lambda: "frontend 'web 1' has left, with 0 open requests" in caplog.messages)

    asyncio.run(run())
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_link_over_a_network_without_a_key_is_refused(host: InferenceServer) -> None:
    with pytest.raises(ValueError, match="needs the cluster's key"):
        HostEndpoint(host, "tcp://127.0.0.1:0")


async def test_a_host_tells_of_others(host: InferenceServer, tmp_path: Path, keys: ClusterSecrets | None) -> None:
    (tmp_path / "second").mkdir()
    async with (
        served(host, tmp_path, keys=keys) as first,
        served(host, tmp_path / "second", keys=keys) as second,
        attached(first.endpoint, keys=keys) as server,
    ):
        first.set_peers([HostPeer("second", second.endpoint)])
        await eventually_async(lambda: len(server._attached_hosts()) == 2)


async def test_hosts_that_are_no_longer_told_of_are_forgotten(
    host: InferenceServer, tmp_path: Path, keys: ClusterSecrets | None
) -> None:
    """A host that is started again has another port."""
    async with served(host, tmp_path, keys=keys) as first, attached(first.endpoint, keys=keys) as server:
        num_files = len(os.listdir("/proc/self/fd"))
        for index in range(5):
            (tmp_path / f"{index}").mkdir()
            async with served(host, tmp_path / f"{index}", keys=keys) as second:
                first.set_peers([HostPeer("second", second.endpoint)])
                await eventually_async(lambda: len(server._attached_hosts()) == 2)
                assert len(server._links) <= 3, "the host, its present peer, and the one before"
                first.set_peers([])
                await asyncio.sleep(0)
                assert len(server._attached_hosts()) == 2, "the list is empty, too, when the registry is lost"
        await eventually_async(lambda: len(server._links) == 1)
        await eventually_async(lambda: len(os.listdir("/proc/self/fd")) <= num_files)
