"""The two ends of a link as their users see them, whichever kind of socket they are.

For: HostEndpoint and HostLink; endpoints.py chooses the kind. Does not know: what messages say. Invariants: neither end
blocks, but to say goodbye, or keeps a process from ending; messages arrive whole and in order; an end whose peer has
gone, or is silent for long, finds out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from .wire import Frame

Sender = bytes
"""A frontend's connection, as its host knows it."""
Parts = list[memoryview]
"""A message as it arrives: its header and its frames, in memory that nothing else uses."""


class HostSocket(Protocol):
    """A host's end: any number of frontends. `wake` and `send` may be called by any thread, the others by one.

    endpoint: where it listens, once it is bound
    """

    endpoint: str

    def bind(self) -> None:
        """Raises OSError when the endpoint cannot be bound; then there is nothing to close."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Until there may be something to receive, something was lost, or `wake`. Only after `receive` gave nothing."""
        ...

    def wake(self) -> None: ...

    def receive(self) -> list[tuple[Sender, Parts]]:
        """Some of what has come; nothing when there is nothing."""
        ...

    def send(self, to: Sender, message: list[Frame]) -> bool:
        """False when there is nobody any more."""
        ...

    def has_lost(self) -> bool:
        """Whether connections have ended since this was asked last. `send` knows which, within two seconds."""
        ...

    def close(self) -> None:
        """Ends all connections."""
        ...


class ConnectionOwner(NamedTuple):
    """What a connection calls, on its event loop.

    on_readable: there may be something to receive
    on_fault: it cannot be established, and why; it keeps trying
    on_end: it has ended, or has not come about; only `close` remains
    """

    on_readable: Callable[[], None]
    on_fault: Callable[[str], None]
    on_end: Callable[[], None]


class Connection(Protocol):
    """A frontend's end of one connection, used on one event loop."""

    def open(self) -> None:
        """Begins to connect. What is sent meanwhile is sent then, or lost with the connection."""
        ...

    def receive(self) -> Parts | None:
        """The next message; None when there is none."""
        ...

    def send(self, message: list[Frame]) -> None:
        """After the connection's end: does nothing."""
        ...

    def close(self, linger_s: float = 0.0) -> None:
        """Blocks for `linger_s` at most, while something waits to be sent. Idempotent."""
        ...
