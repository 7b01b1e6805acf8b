"""Protocols of the two ends of a link, for every kind of socket.

For: HostEndpoint and HostLink; endpoints.py chooses the kind. Invariants: neither end blocks, except in `close` with a
linger time, or keeps a process from ending; messages arrive complete and in order; each end notices when its peer is
lost or silent for long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from .wire import Frame

Sender = bytes
"""Identifies a frontend's connection on its host."""
Parts = list[memoryview]
"""A received message: header and frames, in memory of its own."""


class HostSocket(Protocol):
    """A host's end, with any number of frontends. Any thread may call `wake` and `send`, one thread the others.

    endpoint: where it listens; after `bind` with the actual port
    """

    endpoint: str

    def bind(self) -> None:
        """Raises OSError when the endpoint cannot be bound; then there is nothing to close."""

    def wait(self, timeout_s: float) -> None:
        """Until something can be received, a connection is lost, or `wake`. Only after `receive` returned nothing."""

    def wake(self) -> None: ...

    def receive(self) -> list[tuple[Sender, Parts]]:
        """Some of the messages that have arrived; empty when there are none."""

    def send(self, to: Sender, message: list[Frame]) -> bool:
        """False when the frontend is lost."""

    def has_lost(self) -> bool:
        """Whether connections have ended since the last call. Within two seconds, `send` fails for them."""

    def close(self) -> None:
        """Ends all connections."""


class ConnectionOwner(NamedTuple):
    """Callbacks of a connection, on its event loop.

    on_readable  something may have arrived
    on_fault     the connection cannot be established, and why; it keeps trying
    on_end       it has ended or could not begin; only `close` remains
    """

    on_readable: Callable[[], None]
    on_fault: Callable[[str], None]
    on_end: Callable[[], None]


class Connection(Protocol):
    """A frontend's end of one connection, used on one event loop."""

    def open(self) -> None:
        """Begins to connect. Messages sent meanwhile are sent afterwards, or lost with the connection."""

    def receive(self) -> Parts | None:
        """The next message; None when there is none."""

    def send(self, message: list[Frame]) -> None:
        """Does nothing after the connection's end."""

    def close(self, linger_s: float = 0.0) -> None:
        """Blocks for up to `linger_s` while messages wait to be sent. Idempotent."""
