"""What a frontend process and its parent say to each other, over the socket that is the process's standard input.

For: both of them. Does not know: what either does. Invariants: the settings come first; then each message is one line;
the end of the channel is the end of the other process, so that neither outlives the other unnoticed.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from typing import Final

import msgspec

from .frontend_settings import FrontendSettings

_SIZE_BYTES: Final = 4


class Serve(msgspec.Struct, frozen=True, tag=True):
    """To the process: the host answers, so listen."""


class Reload(msgspec.Struct, frozen=True, tag=True):
    """To the process: read API keys and certificates again."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """To the process: the host is stopping, so gRPC accepts no more connections and calls."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """To the process: accept nothing more, give what runs so many seconds, then end."""

    grace_s: float


class Serving(msgspec.Struct, frozen=True, tag=True):
    """From the process: it listens. Sent again every ALIVE_EVERY_S, so that one that hangs is noticed."""


ALIVE_EVERY_S: Final = 5.0
Message = Serve | Reload | Leave | Drain | Serving


def send_settings(channel: socket.socket, settings: FrontendSettings) -> None:
    """The parent's first message. (Pickled, as it goes to a child of this process alone.)"""
    content = pickle.dumps(settings)
    channel.sendall(len(content).to_bytes(_SIZE_BYTES) + content)


def receive_settings(channel: socket.socket) -> FrontendSettings:
    """Raises EOFError when the parent is gone."""
    size = int.from_bytes(_receive(channel, _SIZE_BYTES))
    settings: FrontendSettings = pickle.loads(_receive(channel, size))
    return settings


def _receive(channel: socket.socket, size_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < size_bytes:
        piece = channel.recv(size_bytes - len(content))
        if not piece:
            raise EOFError("the parent process is gone")
        content += piece
    return bytes(content)


class ControlChannel:
    """The messages after the settings."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, channel: socket.socket) -> ControlChannel:
        return cls(*await asyncio.open_connection(sock=channel))

    def send(self, message: Message) -> None:
        """To a process that is gone: does nothing."""
        self._writer.write(msgspec.json.encode(message) + b"\n")

    async def receive(self) -> Message | None:
        """None: the other process is gone."""
        try:
            line = await self._reader.readline()
        except OSError:
            return None
        return msgspec.json.decode(line, type=Message) if line else None

    def close(self) -> None:
        self._writer.close()
