"""Connections between rank 0 and ranks in processes that others start, on this or on other machines.

For: rank 0's start, and the process of such a rank. Does not know: models, what the messages say. A connection carries
bytes in frames; nothing is unpickled. Invariants: both sides prove that they have the meeting's key before anything
else is read; a connection whose other side ended, or whose machine or network is gone, fails within LOST_S seconds,
also when nothing is sent; one who connects and says nothing delays others by HANDSHAKE_S at most.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Final

from ...rank_order import RankMeeting

logger = logging.getLogger(__name__)

LOST_S: Final = 6
HANDSHAKE_S: Final = 10
RETRY_S: Final = 0.2
_PROBE_S: Final = 2
_REFUSED = (OSError, EOFError, AuthenticationError)


class RankListener:
    """Where rank 0 waits. It has the address at once, and nobody gets there before `listen`."""

    def __init__(self, meeting: RankMeeting) -> None:
        """Raises OSError naming the address."""
        self._meeting = meeting
        self._socket = socket.socket(socket.AF_INET6 if ":" in meeting.address else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((meeting.address, meeting.port))
        except OSError as error:
            self._socket.close()
            raise OSError(
                error.errno, f"the ranks can not meet at {meeting.address} port {meeting.port}: {error.strerror}"
            ) from error

    def listen(self) -> None:
        self._socket.listen()

    def accept(self, timeout_s: float) -> tuple[Connection, str] | None:
        """The next one that has the key, and its address; None when nobody came within timeout_s, or one without."""
        self._socket.settimeout(timeout_s)
        try:
            accepted, address = self._socket.accept()
        except TimeoutError:
            return None
        try:
            return _prove(accepted, self._meeting.key, is_server=True), str(address[0])
        except _REFUSED as error:
            logger.warning("%s came to the ranks' meeting without its key: %s", address[0], error)
            return None

    def close(self) -> None:
        self._socket.close()


def connect(meeting: RankMeeting, timeout_s: float) -> Connection:
    """To rank 0, which may not be there yet. Raises OSError when it does not come within timeout_s, and ValueError when
    it has another key."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            link = socket.create_connection((meeting.address, meeting.port), HANDSHAKE_S)
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise OSError(
                    error.errno, f"rank 0 is not at {meeting.address} port {meeting.port}: {error.strerror or error}"
                ) from error
            time.sleep(RETRY_S)
            continue
        try:
            return _prove(link, meeting.key, is_server=False)
        except AuthenticationError as error:
            raise ValueError(f"rank 0 at {meeting.address} port {meeting.port} has another key") from error
        except (OSError, EOFError):  # it ended, or is busy with others
            time.sleep(RETRY_S)


def watch(link: Connection, lost: Callable[[], None]) -> None:
    """Calls `lost` from a thread when the other side is gone. Reads nothing."""

    def wait() -> None:
        poll = select.poll()
        poll.register(link.fileno(), select.POLLRDHUP)
        poll.poll()
        lost()

    threading.Thread(target=wait, name="llm-rank-link", daemon=True).start()


def _prove(link: socket.socket, key: str, is_server: bool) -> Connection:
    """The connection of two that know each other. Raises one of _REFUSED; the socket is closed then."""
    link.settimeout(None)
    _notice_loss(link)
    connection = Connection(link.detach())
    try:
        with _time_limit(connection, HANDSHAKE_S):
            for prove in (deliver_challenge, answer_challenge)[:: 1 if is_server else -1]:
                prove(connection, key.encode())
    except _REFUSED:
        connection.close()
        raise
    return connection


def _notice_loss(link: socket.socket) -> None:
    """The kernel asks for signs of life where nothing is sent, and gives up on what is not acknowledged."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_S - _PROBE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_S)


@contextlib.contextmanager
def _time_limit(connection: Connection, seconds: int) -> Iterator[None]:
    """Reads and writes fail after that many seconds."""
    with socket.socket(fileno=os.dup(connection.fileno())) as options:
        _limit(options, seconds)
        yield
        _limit(options, 0)


def _limit(options: socket.socket, seconds: int) -> None:
    for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        options.setsockopt(socket.SOL_SOCKET, name, struct.pack("ll", seconds, 0))
