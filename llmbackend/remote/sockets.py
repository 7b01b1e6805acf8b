"""Interfaces of the two ends of a link, for every kind of socket.

Used by HostEndpoint and HostLink; endpoints.py chooses the kind. Invariants: neither end blocks (except in `close` with
a linger time) or keeps a process from ending; messages arrive complete and in order; each end notices if its peer is
lost or silent for long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from .wire import Frame

Sender = bytes
"""Identifies a frontend's connection on its host."""
Parts = list[memoryview]
"""A received message: header and frames, in separate memory."""


class HostSocket(Protocol):
    """A host's end, with any number of frontends. `wake` and `send` are for any thread, the rest for one.

    endpoint: where it listens; contains the actual port after `bind`
    """

    endpoint: str

    def bind(self) -> None:
        """Raises OSError if the endpoint cannot be bound; there is then nothing to close."""

    def wait(self, timeout_s: float) -> None:
        """Waits until something can be received, a connection is lost, or `wake`. Only to be called after `receive`
        returned nothing."""

    def wake(self) -> None: ...

    def receive(self) -> list[tuple[Sender, Parts]]:
        """Some of the messages that have arrived; empty if there are none."""

    def send(self, to: Sender, message: list[Frame]) -> bool:
        """Returns False if the frontend is lost."""

    def has_lost(self) -> bool:
        """Whether connections have ended since the last call. `send` fails for them within two seconds."""

    def close(self) -> None:
        """Ends all connections."""


class ConnectionOwner(NamedTuple):
    """Callbacks of a connection, on its event loop.

    on_readable  something may have arrived
    on_fault     the connection cannot be established, and why; it keeps trying
    on_end       it has ended or could not be established; only `close` remains
    """

    on_readable: Callable[[], None]
    on_fault: Callable[[str], None]
    on_end: Callable[[], None]


class Connection(Protocol):
    """A frontend's end of one connection, used on one event loop."""

    def open(self) -> None:
        """Begins to connect. Messages sent in the meantime are sent afterwards, or lost with the connection."""

    def receive(self) -> Parts | None:
        """The next message; None if there is none."""

    def send(self, message: list[Frame]) -> None:
        """Does nothing after the connection's end."""

    def close(self, linger_s: float = 0.0) -> None:
        """Blocks for up to `linger_s` while messages are waiting to be sent. Idempotent."""
