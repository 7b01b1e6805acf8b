"""How many connections an endpoint takes, in all and per client, and what they leave for others."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import trustme

from llmbackend.frontends.http.acceptor import _SERVED, Acceptor, Place, Places
from llmbackend.frontends.limits import FrontendLimits, HttpLimits, networks
from llmbackend.server.process import DescriptorRoom, fitted
from tests.helpers.waiting import eventually_async

MANY = 1 << 20


def enter(places: Places, address: str) -> Place:
    place = places.enter(address)
    assert place is not None
    return place


def num_connections(places: Places) -> int:
    return places._counts.held(_SERVED) + places._refused


def test_places_are_counted_in_all_and_per_peer() -> None:
    places = Places(HttpLimits(max_connections=3, max_connections_per_peer=2))
    first, second = enter(places, "10.0.0.1"), enter(places, "10.0.0.1")
    assert enter(places, "10.0.0.1").refusal == "the server is at its limit of 2 connections from one address"
    assert not enter(places, "10.0.0.2").refusal
    assert enter(places, "10.0.0.3").refusal == "the server is at its limit of 3 connections"
    for _ in range(2):
        first.leave()
    assert not enter(places, "::ffff:10.0.0.1").refusal, "the same peer, and its place is free"
    assert enter(places, "10.0.0.4").refusal
    second.leave()
    assert num_connections(places) == 2 + 3


def test_a_connection_that_was_to_be_refused_is_served_when_others_have_left() -> None:
    places = Places(HttpLimits(max_connections=2, max_connections_per_peer=1))
    first, second, third = (enter(places, "10.0.0.1") for _ in range(3))
    assert second.reevaluate() and third.reevaluate()
    first.leave()
    assert not third.reevaluate() and second.reevaluate()
    third.leave()
    second.leave()
    assert not num_connections(places)


def test_one_ipv6_network_is_one_peer_and_trusted_ones_are_none() -> None:
    proxies = networks(["10.0.0.0/8,fd00::/8", "192.0.2.7"])
    places = Places(HttpLimits(max_connections_per_peer=1, trusted_proxies=proxies))
    assert not enter(places, "2001:db8::1").refusal
    assert enter(places, "2001:db8::2").refusal and not enter(places, "2001:db8:0:1::1").refusal
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::1", "192.0.2.7") * 3:
        assert not enter(places, address).refusal
    with pytest.raises(ValueError, match=r"10\.0\.0\.1/8"):
        networks(["10.0.0.1/8"])


def test_there_is_an_end_to_what_is_refused_with_an_answer() -> None:
    places = Places(HttpLimits(max_connections=1))
    enter(places, "10.0.0.1")
    refused = [enter(places, "10.0.0.1") for _ in range(64)]
    assert places.enter("10.0.0.1") is None
    refused[0].leave()
    assert enter(places, "10.0.0.1").refusal


def test_connections_share_what_descriptors_there_are(caplog: pytest.LogCaptureFixture) -> None:
    limits = FrontendLimits()
    assert fitted(limits, DescriptorRoom(limit=20_000, in_use=100)) is limits and not caplog.records
    room = DescriptorRoom(limit=1024, in_use=96)
    less = fitted(limits, room)
    assert (less.http.max_connections, less.grpc.max_connections, less.metrics_max_connections) == (396, 396, 6)
    assert less.connections <= room.connections == 1024 - 128 - 96
    assert less.http.max_refused_connections == 0
    assert "1024 open files (ulimit -n), of which 96 are in use" in caplog.text
    assert "396 instead of 4096 HTTP and 396 instead of 4096 gRPC connections" in caplog.text
    assert fitted(limits, DescriptorRoom(limit=40, in_use=60)).http.max_connections == 1


@dataclass
class Listening:
    """An acceptor whose connections do nothing."""

    places: Places
    port: int
    lost: list[Exception | None] = field(default_factory=list)

    async def read(self, send: bytes = b"") -> bytes:
        """All that a client gets."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(send)
        try:
            return await asyncio.wait_for(reader.read(), 10)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


@asynccontextmanager
async def listening(tls: ssl.SSLContext | None = None, first_reserved: int = MANY) -> AsyncIterator[Listening]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = Listening(Places(HttpLimits()), listener.getsockname()[1])

        class Held(asyncio.Protocol):
            def __init__(self, place: Place) -> None:
                self.place = place

            def connection_made(self, transport: Any) -> None:
                transport.write(b"hello")

            def connection_lost(self, exc: Exception | None) -> None:
                self.place.leave()
                running.lost.append(exc)

        acceptor = Acceptor(listener, running.places, Held, lambda: tls, 0.3, first_reserved)
        acceptor.start()
        yield running
        acceptor.close()
        await acceptor.wait_closed()


async def test_a_tls_handshake_is_a_connection_and_ends_in_time() -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with listening(context) as running:
        silent = asyncio.create_task(running.read())
        await eventually_async(lambda: num_connections(running.places) == 1)
        assert await silent == b"" and num_connections(running.places) == 0
        assert await running.read(b"GET / HTTP/1.1\r\n\r\n" * 100) == b"" and num_connections(running.places) == 0
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port, ssl=trusting)
        assert await reader.read(5) == b"hello" and num_connections(running.places) == 1
        writer.close()
        await eventually_async(lambda: num_connections(running.places) == 0)


def test_a_connection_whose_descriptor_is_reserved_is_refused_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with listening(first_reserved=3) as running:
            for _ in range(3):
                answer = await running.read()
                assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: 1\r\n" in answer
            assert not running.lost and not num_connections(running.places)

    asyncio.run(run())
    assert len(caplog.records) == 1 and "reserved for engines and files" in caplog.text


def test_websockets_are_counted_per_peer_and_bounded() -> None:
    places = Places(HttpLimits(max_websockets_per_peer=2, trusted_proxies=networks(["192.0.2.7"])))
    first, second, third = (enter(places, "10.0.0.1") for _ in range(3))
    assert not first.enter_websocket() and not second.enter_websocket()
    assert third.enter_websocket() == "the server is at its limit of 2 websockets from one address"
    assert not enter(places, "10.0.0.2").enter_websocket()
    for place in (first, first, third):
        place.leave()
    assert not enter(places, "10.0.0.1").enter_websocket() and enter(places, "10.0.0.1").enter_websocket()
    assert not any(enter(places, "192.0.2.7").enter_websocket() for _ in range(5))
