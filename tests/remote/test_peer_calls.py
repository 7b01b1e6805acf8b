"""Calls between hosts over their endpoints, encrypted, and streams that move by them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
from prometheus_client import CollectorRegistry

from llmbackend.core.backend_api import ErrorCode, TritonError, invalid_argument
from llmbackend.frontends.journals.stream_copies import StreamCopies
from llmbackend.links.secrets import ClusterSecrets
from llmbackend.remote.host_endpoint import HostEndpoint
from llmbackend.remote.peer_calls import PeerCalls
from llmbackend.remote.wire import HostPeer
from llmbackend.server.frontend_server import copy_streams
from tests.helpers.kserve_runner import Running
from tests.helpers.mock_llm_host import MODEL, mock_llm_host
from tests.helpers.numbered_events import Event, read_events
from tests.helpers.waiting import eventually

KEYS = ClusterSecrets(*zmq.curve_keypair())
COMPLETIONS = "/v1/completions"


class PeerHost:
    def __init__(self, root: Path, name: str, release: str = "1", keys: ClusterSecrets = KEYS) -> None:
        self.name = name
        self.running = Running(root / name, start=mock_llm_host, engine={"mock_step_ms": 3})
        self.endpoint = HostEndpoint(self.running.host, "tcp://127.0.0.1:0", host_id=name, keys=keys, release=release)
        self.endpoint.start()
        self.calls: PeerCalls = self.running.call(self._calls(release, keys))
        self.is_cut = False

    async def _calls(self, release: str, keys: ClusterSecrets) -> PeerCalls:
        return PeerCalls(self.endpoint, self.name, keys, heartbeat_timeout_s=2, release=release)

    def on_loop(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            return await work()

        return self.running.call(run())

    def cut(self) -> None:
        """Its links end as if its process had."""
        if not self.is_cut:
            self.is_cut = True
            self.on_loop(self._closed)
            self.endpoint.close()

    async def _closed(self) -> None:
        self.calls.close()

    def stop(self) -> None:
        self.cut()
        self.running.stop()


def acquaint(*hosts: PeerHost) -> None:
    peers = [HostPeer(host.name, host.endpoint.endpoint) for host in hosts]
    for host in hosts:
        host.endpoint.set_peers(peers)
    for host in hosts:
        eventually(lambda host=host: len(host.calls.live()) == len(hosts) - 1)  # type: ignore[misc]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[PeerHost]]:
    started = [PeerHost(tmp_path, name) for name in ("a", "b", "c")]
    acquaint(*started)
    yield started
    for host in started:
        host.stop()


def test_calls_and_their_ends(hosts: list[PeerHost]) -> None:
    a, b, c = hosts
    assert [host.calls.live() for host in hosts] == [["b", "c"], ["c", "a"], ["a", "b"]]

    async def answer(peer: str, payload: bytes) -> bytes:
        if payload == b"wrong":
            raise invalid_argument("it is wrong")
        if payload == b"never":
            await asyncio.get_running_loop().create_future()
        return peer.encode() + payload[::-1]

    b.calls.on_call("t", answer)
    large = bytes(5 << 20)
    assert a.on_loop(lambda: a.calls.call("b", "t", large)) == b"a" + large

    async def several() -> list[bytes]:
        return await asyncio.gather(*(c.calls.call("b", "t", b"%d." % number) for number in range(20)))

    assert c.on_loop(several) == [b"c" + (b"%d." % number)[::-1] for number in range(20)]
    for payload, topic, text in (
        (b"wrong", "t", "it is wrong"),
        (b"", "u", "this host has no handler for calls about 'u'"),
    ):
        with pytest.raises(TritonError, match=text):
            a.on_loop(partial(a.calls.call, "b", topic, payload))

    pending = asyncio.run_coroutine_threadsafe(a.calls.call("b", "t", b"never"), a.running._loop)
    with pytest.raises(TimeoutError):
        pending.exception(0.2)
    b.cut()
    error = pending.exception(20)
    assert isinstance(error, TritonError) and error.code is ErrorCode.UNAVAILABLE and "host 'b' is gone" in str(error)
    eventually(lambda: a.calls.live() == ["c"])


async def _nothing() -> None: ...


def test_connected_hosts_are_kept_when_the_list_of_hosts_was_lost(hosts: list[PeerHost]) -> None:
    """A new registry names only those that have joined it."""
    a, b, _ = hosts
    changes: list[int] = []
    a.calls.on_change(lambda: changes.append(1))
    a.endpoint.set_peers([])
    a.on_loop(_nothing)
    assert a.calls.live() == ["b", "c"] and a.calls.are_all_live() and not changes
    b.cut()
    eventually(lambda: a.calls.live() == ["c"] and a.calls.are_all_live())  # it is gone for good


def test_a_host_that_was_started_again_replaces_its_former_self(hosts: list[PeerHost], tmp_path: Path) -> None:
    a, b, _ = hosts
    a.endpoint.set_peers([])
    again = PeerHost(tmp_path / "again", "b")

    async def answer(peer: str, payload: bytes) -> bytes:
        return b"again"

    again.calls.on_call("t", answer)
    try:
        a.endpoint.set_peers([HostPeer("b", again.endpoint.endpoint)])
        a.on_loop(_nothing)
        eventually(lambda: "b" in a.calls.live())
        assert a.on_loop(lambda: a.calls.call("b", "t", b"")) == b"again"
        b.cut()
        assert a.on_loop(lambda: a.calls.call("b", "t", b"")) == b"again"
        a.endpoint.set_peers([])
        again.cut()
        eventually(lambda: a.calls.live() == ["c"])
    finally:
        again.stop()


def test_hosts_of_another_release_are_refused(tmp_path: Path) -> None:
    a, b = PeerHost(tmp_path, "a"), PeerHost(tmp_path, "b", release="2")
    try:
        acquaint(a, b)
        with pytest.raises(TritonError, match="host 'a' with release 1 is refused: this host has release 2"):
            a.on_loop(lambda: a.calls.call("b", "t", b""))
    finally:
        a.stop()
        b.stop()


def test_a_host_with_another_key_is_not_reached(tmp_path: Path) -> None:
    a, b = PeerHost(tmp_path, "a"), PeerHost(tmp_path, "b", keys=ClusterSecrets(*zmq.curve_keypair()))
    try:
        a.endpoint.set_peers([HostPeer("b", b.endpoint.endpoint)])
        with pytest.raises(TritonError, match="host 'b' is gone"):
            a.on_loop(lambda: a.calls.call("b", "t", b""))
    finally:
        a.stop()
        b.stop()


def test_a_stream_goes_on_in_the_host_that_has_its_copy(hosts: list[PeerHost]) -> None:
    for host in hosts:
        host.on_loop(partial(_join, host))
    a, b, c = hosts
    body = {"model": MODEL, "prompt": "one", "stream": True, "max_tokens": 60, "temperature": 1, "ignore_eos": True}
    begun = _read(a, body, {"X-Resumable-Stream": "true"}, 10)
    assert _copies(b).num_held == 1
    a.cut()
    eventually(lambda: c.calls.live() == ["b"])
    rest = _read(c, {}, {"Last-Event-ID": begun[-1][0]})
    whole = _read(a, {}, {"Last-Event-ID": begun[0][0].partition(":")[0]})
    assert begun + rest == whole and whole[-1][1] == "[DONE]"


def test_a_stream_in_which_nothing_happens_is_copied_again_when_the_host_with_its_copy_ends(
    hosts: list[PeerHost],
) -> None:
    a, b, c = hosts
    body = {"model": MODEL, "prompt": "one", "stream": True, "max_tokens": 9, "ignore_eos": True}
    for host in hosts:
        host.on_loop(partial(_join, host))
    whole = _read(a, body, {"X-Resumable-Stream": "true"})
    b.cut()
    eventually(lambda: _copies(c).num_held)
    a.cut()
    eventually(lambda: not c.calls.live())
    assert _read(c, {}, {"Last-Event-ID": whole[2][0]}) == whole[3:]


async def _join(host: PeerHost) -> None:
    running = host.running
    copy_streams(running.streams, running.app, running.gate, host.calls, CollectorRegistry())


def _copies(host: PeerHost) -> StreamCopies:
    copies = host.running.streams.copies
    assert isinstance(copies, StreamCopies)
    return copies


def _read(host: PeerHost, body: Any, headers: dict[str, str], at_most: int = 1 << 30) -> list[Event]:
    with httpx.Client(base_url=f"http://{host.running.http}", timeout=30) as client:
        return read_events(client, COMPLETIONS, body, headers, at_most)
