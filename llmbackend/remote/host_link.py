"""HostLink: a frontend's connection to one host.

For: RemoteServer. Does not know: requests, other hosts, kinds of sockets. Invariants: it is used on one event loop;
nothing of an earlier connection is sent or heard after it has ended; while it is not connected it tries again, for
ever; the loop is not held for long by one host that says much.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

import msgspec

from llmbackend.core.outputs import OutputLayout, layout_of
from llmbackend.links.secrets import ClusterSecrets

from .endpoints import check_endpoint, new_connection
from .known_host import KnownHost
from .sockets import Connection, ConnectionOwner
from .tensors import Frame
from .wire import (
    Hello,
    HostState,
    Leave,
    Received,
    Refused,
    Responses,
    StateRead,
    decode_to_frontend,
    encode,
)

log = logging.getLogger(__name__)

_MESSAGES_AT_ONCE: Final = 64
_READ_PER_REPORT_BYTES: Final = 256 << 10
_AGAIN_S: Final = 0.05
GOODBYE_S: Final = 0.2
_LEAVE: Final = encode(Leave())
_AGAIN_AFTER_REFUSAL_S: Final = 2.0


class LinkOwner(Protocol):
    """Who uses a link. Called on the event loop."""

    def link_changed(self, link: HostLink) -> None:
        """The host has told its state."""

    def link_lost(self, link: HostLink) -> None:
        """The connection has ended; whatever waits for an answer gets none."""

    def receive(self, link: HostLink, message: Responses, frames: list[memoryview]) -> None: ...


class HostLink:
    """Between `open` and `close`. host: while attached; fault: why it is not attached, as far as known"""

    def __init__(
        self,
        endpoint: str,
        owner: LinkOwner,
        hello: Hello,
        keys: ClusterSecrets | None = None,
        heartbeat_timeout_s: float | None = None,
    ) -> None:
        """heartbeat_timeout_s: None = that of the endpoint's kind. Raises ValueError for an endpoint that cannot be
        used."""
        check_endpoint(endpoint, keys)
        self.endpoint = endpoint
        self.host: KnownHost | None = None
        self.fault = f"no host answers at {endpoint}"
        self.layouts: list[OutputLayout] = []
        """By the host's numbers."""
        self._owner = owner
        self._hello = encode(hello)
        self._keys = keys
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._again: asyncio.TimerHandle | None = None
        self._num_read_bytes = 0
        self._num_reported_bytes = 0

    def open(self) -> None:
        """Begins to connect."""
        self._again = None
        self._num_read_bytes = self._num_reported_bytes = 0
        self.layouts = []
        owner = ConnectionOwner(self._read, self._failed, self._ended)
        self._connection = new_connection(self.endpoint, self._keys, self._heartbeat_timeout_s, owner)
        self._connection.open()
        self._connection.send([self._hello])

    def close(self) -> None:
        """Waits for GOODBYE_S at most, for a host that reads no more."""
        if self._again is not None:
            self._again.cancel()
        if self.host is None:
            self._disconnect()
        else:
            self.send([_LEAVE])
            self._disconnect(GOODBYE_S)

    def send(self, message: list[Frame]) -> None:
        """To the host, if it is attached; else the caller hears of `link_lost`, or has."""
        if self._connection is not None:
            self._connection.send(message)

    def _read(self) -> None:
        for _ in range(_MESSAGES_AT_ONCE):
            if self._connection is None or (message := self._connection.receive()) is None:
                return
            header, *frames = message
            try:
                self._handle(header, frames)
            except msgspec.DecodeError as error:
                log.error("the host at %s sent a message that cannot be read: %s", self.endpoint, error)
                self._lose(f"the host at {self.endpoint} sent a message that cannot be read")
                return
            self._count(len(header) + sum(map(len, frames)))
        self._loop.call_soon(self._read)

    def _handle(self, header: memoryview, frames: list[memoryview]) -> None:
        message = decode_to_frontend(header)
        if isinstance(message, Responses):
            self.layouts += [layout_of(layout.names, layout.datatypes) for layout in message.layouts]
            self._owner.receive(self, message, frames)
        elif isinstance(message, HostState):
            self.host, self.fault = KnownHost(message, self.host), ""
            self._owner.link_changed(self)
            self.send([encode(StateRead(message.number))])
        elif isinstance(message, Refused):
            log.error("the host at %s refuses this frontend: %s", self.endpoint, message.reason)
            self._lose(message.reason, _AGAIN_AFTER_REFUSAL_S)

    def _count(self, num_bytes: int) -> None:
        self._num_read_bytes += num_bytes
        if self._num_read_bytes - self._num_reported_bytes >= _READ_PER_REPORT_BYTES:
            self._num_reported_bytes = self._num_read_bytes
            self.send([encode(Received(self._num_read_bytes))])

    def _failed(self, fault: str) -> None:
        self.fault = fault

    def _ended(self) -> None:
        self._lose("" if self.host is not None else self.fault)

    def _lose(self, fault: str, again_s: float = _AGAIN_S) -> None:
        """Ends the connection, and begins the next one after a while."""
        was_attached = self.host is not None
        self.fault = fault or f"the host at {self.endpoint} is gone"
        self._disconnect()
        self._again = self._loop.call_later(again_s, self.open)
        if was_attached:
            log.warning("%s", self.fault)
            self._owner.link_lost(self)

    def _disconnect(self, linger_s: float = 0.0) -> None:
        self.host = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(linger_s)
