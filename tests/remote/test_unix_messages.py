"""MessageSocket over a real pair of sockets: whole messages in order, whatever the pieces; ends, and silence."""

from __future__ import annotations

import fcntl
import random
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from llmbackend.remote.unix_sockets import CHECKS, MessageSocket, _flush_within
from tests.helpers.waiting import eventually

Pair = tuple[MessageSocket, MessageSocket]
MESSAGES = [
    [b"header"],
    [b""],
    [b"header", b"", b"frame"],
    [bytes(64 << 10)],
    [b"x" * ((64 << 10) - 11)],
    [b"header", random.Random(1).randbytes(5 << 20), b"between", random.Random(2).randbytes(300 << 10)],
    [b"a"] * 1000,
    [b"the last"],
]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = map(MessageSocket, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def received(messages: MessageSocket) -> list[list[bytes]]:
    """All that has come."""
    found = []
    while (message := messages.receive()) is not None:
        found.append([bytes(part) for part in message])
    return found


def test_messages_arrive_whole_and_in_order_and_never_block_their_sender(pair: Pair) -> None:
    one, other = pair
    for message in MESSAGES:
        one.send(message)
    assert one.is_waiting, "they are more than a socket holds"
    found: list[list[bytes]] = []
    while one.is_waiting or len(found) < len(MESSAGES):
        one.flush()
        found += received(other)
    assert found == MESSAGES


@pytest.mark.parametrize("seed", range(5))
def test_messages_arrive_whole_in_pieces_of_any_size(seed: int) -> None:
    random_ = random.Random(seed)
    sent = [
        [random_.randbytes(random_.choice((0, 1, 100, 70_000))) for _ in range(random_.randint(1, 4))]
        for _ in range(20)
    ]
    writer, wire = socket.socketpair()
    pieces, end = socket.socketpair()
    with writer, wire, pieces, end:
        sender, receiver = MessageSocket(writer), MessageSocket(end)
        wire.setblocking(False)
        found: list[list[bytes]] = []
        for message in sent:
            sender.send(message)
        while len(found) < len(sent):
            sender.flush()
            pieces.sendall(wire.recv(random_.choice((1, 3, 4, 13, 5000, 100_000))))
            found += received(receiver)
        assert found == sent


def test_a_message_keeps_its_memory_when_others_arrive(pair: Pair) -> None:
    one, other = pair
    one.send([b"first", b"frame"])
    kept = other.receive()
    assert received(other) == []
    for _ in range(100):
        one.send([bytes(1000)])
        assert received(other) == [[bytes(1000)]]
    assert kept is not None and list(map(bytes, kept)) == [b"first", b"frame"]


def test_what_was_sent_before_the_end_is_received_before_it(pair: Pair) -> None:
    one, other = pair
    other.send([b"unread, which makes the end of the other a reset"])
    one.send([b"the last"])
    one.close()
    assert received(other) == [[b"the last"]]
    with pytest.raises((EOFError, OSError)):
        other.receive()
    with pytest.raises(OSError):
        other.send([b"nobody is there"])


def test_the_last_messages_are_sent_over_a_descriptor_of_any_number(request: pytest.FixtureRequest) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    near, far = socket.socketpair()
    high = socket.socket(fileno=fcntl.fcntl(near, fcntl.F_DUPFD_CLOEXEC, 1024))
    near.close()
    messages, other = MessageSocket(high), MessageSocket(far)
    large = [b"x" * (4 << 20)]
    messages.send(large)
    assert messages.is_waiting
    found: list[list[bytes]] = []

    def has_come() -> bool:
        found.extend(received(other))
        return bool(found)

    reader = threading.Thread(target=eventually, args=(has_come,))
    reader.start()
    _flush_within(messages, 20)
    reader.join()
    assert found == [large]
    messages.close()
    other.close()


def test_what_speaks_something_else_is_found_out() -> None:
    writer, end = socket.socketpair()
    with writer, end:
        writer.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ValueError, match="parts"):
            MessageSocket(end).receive()


def test_a_peer_that_says_nothing_is_asked_and_gone_when_it_does_not_answer(pair: Pair) -> None:
    one, other = pair
    for _ in range(5 * CHECKS):
        assert one.check_peer(), "it has answered"
        assert received(other) == []
        assert received(one) == []
    assert [one.check_peer() for _ in range(CHECKS + 1)] == [True] * CHECKS + [False]


def test_a_peer_that_speaks_is_not_asked(pair: Pair) -> None:
    one, other = pair
    for _ in range(3 * CHECKS):
        other.send([b"news"])
        assert received(one) == [[b"news"]]
        assert one.check_peer()
    with pytest.raises(BlockingIOError):
        other._socket.recv(1)
