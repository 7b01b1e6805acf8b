"""Connections between ranks on several machines: who has the key comes in, and who is gone is noticed."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import msgspec
import pytest
import torch

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.gpu.parallel import collectives, links
from llmbackend.engine.gpu.parallel.collectives import LOOPBACK, RankPlace, Ranks
from llmbackend.engine.gpu.parallel.followers import meet_followers
from llmbackend.engine.gpu.parallel.links import Loaded, RankListener, Stop, connect, watch
from llmbackend.engine.rank_order import RankMeeting, RankOrder

KEY = "0123456789abcdef" * 2


@pytest.fixture
def meeting() -> RankMeeting:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return RankMeeting("127.0.0.1", probe.getsockname()[1], KEY)


@pytest.fixture
def listener(meeting: RankMeeting) -> Iterator[RankListener]:
    listener = RankListener(meeting)
    listener.listen()
    yield listener
    listener.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_frames_go_both_ways_and_an_end_is_noticed(
    meeting: RankMeeting, listener: RankListener, pool: ThreadPoolExecutor
) -> None:
    coming = pool.submit(connect, meeting, 30)
    come = listener.accept(30)
    assert come is not None and come[1] == "127.0.0.1"
    ours, theirs, lost = come[0], coming.result(30), threading.Event()
    with theirs:
        ours.send_bytes(b"x" * 100_000)
        assert theirs.recv_bytes() == b"x" * 100_000
        theirs.send_bytes(b"y")
        assert ours.recv_bytes() == b"y"
        watch(theirs, lost.set)
        assert not lost.is_set()
        ours.close()
        assert lost.wait(30)


def test_who_has_no_key_does_not_get_in(
    meeting: RankMeeting, listener: RankListener, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another key, nonsense, and nothing at all; nobody comes in their wake."""
    other = msgspec.structs.replace(meeting, key=KEY[::-1])
    refused = pool.submit(connect, other, 30)
    assert listener.accept(30) is None
    with pytest.raises(ValueError, match=f"rank 0 at 127.0.0.1 port {meeting.port} has another key"):
        refused.result(30)
    monkeypatch.setattr(links, "HANDSHAKE_S", 1)
    for said in (b"GET / HTTP/1.1\r\n\r\n", b""):
        with socket.create_connection(("127.0.0.1", meeting.port)) as stranger:
            stranger.send(said)
            assert listener.accept(30) is None
    assert listener.accept(0.01) is None


def test_a_rank_waits_for_rank_0_until_it_is_there(meeting: RankMeeting, pool: ThreadPoolExecutor) -> None:
    coming = pool.submit(connect, meeting, 30)
    listener = RankListener(meeting)
    try:
        assert not coming.done()
        listener.listen()
        come = listener.accept(30)
        assert come is not None
        come[0].close()
        coming.result(30).close()
    finally:
        listener.close()
    with pytest.raises(OSError, match=f"rank 0 is not at 127.0.0.1 port {meeting.port}: Connection refused"):
        connect(meeting, 0)


def test_a_rank_does_not_wait_longer_for_what_is_not_rank_0(pool: ThreadPoolExecutor) -> None:
    """Another server at its port, which ends the connection."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        closed = pool.submit(lambda: other.accept()[0].close())
        with pytest.raises(OSError, match=f"rank 0 is not at 127.0.0.1 port {port}: the connection was closed"):
            connect(RankMeeting("127.0.0.1", port, KEY), 0)
        closed.result(30)


def test_orders_that_can_not_be_are_refused() -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2)
    good = msgspec.json.encode({"config": config, "rank": 1, "meeting": {"address": "::1", "port": 7, "key": KEY}})
    assert msgspec.json.decode(good, type=RankOrder).meeting.port == 7
    for wrong, message in (
        (good.replace(b'"rank":1', b'"rank":2'), "'rank' is 2, expected 1 to 1 of 2 ranks"),
        (good.replace(b'"port":7', b'"port":70000'), "'port' of the ranks' meeting is 70000, expected 1 to 65535"),
        (good.replace(KEY.encode(), b"short"), "'key' of the ranks' meeting has 5 characters, expected at least 32"),
    ):
        with pytest.raises(msgspec.ValidationError, match=message):
            msgspec.json.decode(wrong, type=RankOrder)


CONFIG = EngineConfig(model="m", pipeline_parallel_size=3, load_timeout_s=30)


def come(meeting: RankMeeting, *messages: Loaded) -> list[Connection]:
    """Ranks that have loaded."""
    links = []
    for message in messages:
        links.append(connect(meeting, 30))
        links[-1].send_bytes(msgspec.msgpack.encode(message))
    return links


def test_all_ranks_are_waited_for_and_one_comes_once(
    meeting: RankMeeting, listener: RankListener, pool: ThreadPoolExecutor
) -> None:
    coming = pool.submit(come, meeting, *(Loaded(rank, "m", "same") for rank in (2, 2, 3, 1)))
    followers = meet_followers(CONFIG, listener, "same")
    links = coming.result(30)
    followers.send(Stop())
    stop = msgspec.msgpack.encode(Stop())
    assert [link.recv_bytes() for link in (links[0], links[3])] == [stop, stop]
    for refused in links[1:3]:
        with pytest.raises(EOFError):
            refused.recv_bytes()
    for link in links:
        link.close()
    followers.reap()


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        (
            Loaded(1, "node7", "0.9 aa"),
            "rank 1 on node7 (127.0.0.1) has release and arguments 0.9 aa, expected 1.0 bb",
        ),
        (Loaded(2, "node7", "1.0 bb", "no such file"), "rank 2 on node7 (127.0.0.1): no such file"),
    ],
)
def test_a_rank_that_can_not_take_part_ends_the_load(
    meeting: RankMeeting, listener: RankListener, pool: ThreadPoolExecutor, loaded: Loaded, message: str
) -> None:
    coming = pool.submit(come, meeting, loaded)
    with pytest.raises(ValueError, match=re.escape(message)):
        meet_followers(CONFIG, listener, "1.0 bb")
    for link in coming.result(30):
        link.close()


def test_a_rank_that_never_comes_is_named(listener: RankListener) -> None:
    config = msgspec.structs.replace(CONFIG, load_timeout_s=0.01)
    with pytest.raises(ValueError, match=r"rank 1, 2 did not join within 0\.01 s"):
        meet_followers(config, listener, "")


def test_an_address_that_is_taken_is_named(meeting: RankMeeting, listener: RankListener) -> None:
    with pytest.raises(OSError, match=f"cannot meet at 127.0.0.1 port {meeting.port}: Address already in use"):
        RankListener(meeting)


@pytest.fixture(scope="module", autouse=True)
def gloo_has_started() -> None:
    """What Gloo keeps for the whole process is not left behind by a test."""
    meeting, port = collectives.listen(LOOPBACK)
    Ranks(RankPlace(0)).join(torch.device("cpu"), LOOPBACK, port, 30, meeting)
    collectives.leave()


def test_ranks_use_no_interface_but_that_of_their_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """To NCCL a name without = is a prefix of the names of several."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    meeting, port = collectives.listen(LOOPBACK)
    try:
        Ranks(RankPlace(0)).join(torch.device("cpu"), LOOPBACK, port, 30, meeting)
    finally:
        collectives.leave()
    assert [os.environ[name] for name in names] == ["lo", "=lo"]
