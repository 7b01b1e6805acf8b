"""Connections of the HTTP clients.

Invariant: each request has its own connection, so that a client that disconnects affects no other.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

from ..specs import StreamSpec


def http_transport(httpx: ModuleType, receive_buffer_bytes: int = 0) -> Any:
    """The AsyncHTTPTransport of `httpx`, or of httpx2, which the openai client uses. receive_buffer_bytes: of each
    socket; 0 = the system's choice, which may grow to several MB."""
    options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)] if receive_buffer_bytes else []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncHTTPTransport(limits=limits, socket_options=options, trust_env=False)


def key_header(spec: StreamSpec) -> dict[str, str]:
    return {"idempotency-key": spec.key} if spec.key else {}


async def lines_of(answer: Any) -> AsyncIterator[str]:
    """Lines of server-sent events. httpx's `aiter_lines` also ends lines at U+2028 and other characters of a text."""
    rest = b""
    async for part in answer.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode()
