"""Api: the server's HTTP API, called with the viewer's key.

Used by every page. Independent of what is shown. Invariants: all viewers share a connection pool over the Unix socket
that the server opened for this process; a key is only sent with requests, never stored; errors have the API's own text.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

_TIMEOUT_S: Final = 30.0
_CONNECT_TIMEOUT_S: Final = 5.0
_MAX_ERROR_BYTES: Final = 64 << 10

_pool: httpx.AsyncClient | None = None


class ApiError(Exception):
    """The text is that of the API. status: the HTTP status; 0 = there was no response"""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One server-sent event."""

    name: str
    """"message" if the stream does not name it."""
    data: str
    id: str = ""


@asynccontextmanager
async def connected(api_socket: Path) -> AsyncIterator[None]:
    """Opens the connection pool; Api works only within this context."""
    global _pool
    transport = httpx.AsyncHTTPTransport(uds=str(api_socket), limits=httpx.Limits(max_connections=None))
    async with httpx.AsyncClient(transport=transport, base_url="http://server", trust_env=False) as _pool:
        yield


class Api:
    """The API for one viewer. key: called for each request; "" = no key."""

    def __init__(self, key: Callable[[], str]) -> None:
        self._key = key

    async def get(self, path: str) -> Any:
        """The JSON of the response. Raises ApiError."""
        return await self._json("GET", path, None, _TIMEOUT_S)

    async def post(self, path: str, body: Any = None, timeout_s: float | None = _TIMEOUT_S) -> Any:
        """The JSON of the response, None for an empty one. Raises ApiError."""
        return await self._json("POST", path, body, timeout_s)

    async def stream(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[ServerEvent]:
        """The events of a stream until its end. Raises ApiError. Closing the generator cancels the request, unless
        `headers` ask for a resumable stream."""
        request = self._request(method, path, body, None)  # without a timeout: the request may stay silent for long
        request.headers.update(headers or {})
        try:
            response = await _opened().send(request, stream=True)
        except httpx.HTTPError as error:
            raise _unreachable(error) from None
        try:
            if response.is_error:
                raise _error(response.status_code, await _beginning(response))
            async for event in _events(_lines(response)):
                yield event
        except httpx.HTTPError as error:
            raise _unreachable(error) from None
        finally:
            await response.aclose()

    async def _json(self, method: str, path: str, body: Any, timeout_s: float | None) -> Any:
        try:
            response = await _opened().send(self._request(method, path, body, timeout_s))
        except httpx.HTTPError as error:
            raise _unreachable(error) from None
        if response.is_error:
            raise _error(response.status_code, response.content)
        return response.json() if response.content else None

    def _request(self, method: str, path: str, body: Any, timeout_s: float | None) -> httpx.Request:
        key = self._key()
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return _opened().build_request(method, path, json=body, headers=headers, timeout=timeout)


def _opened() -> httpx.AsyncClient:
    assert _pool is not None, "used within connected()"
    return _pool


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Not `aiter_lines`, which also splits lines at U+2028 and other characters that a model may write."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode()


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[ServerEvent]:
    name, event_id = "message", ""
    data: list[str] = []
    async for line in lines:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                yield ServerEvent(name, "\n".join(data), event_id)
            name, data = "message", []
        elif field == "event":
            name = value
        elif field == "data":
            data.append(value)
        elif field == "id":
            event_id = value


async def _beginning(response: httpx.Response) -> bytes:
    body = b""
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) >= _MAX_ERROR_BYTES:
            break
    return body


def _error(status: int, body: bytes) -> ApiError:
    """Reads the error bodies of OpenAI's and Triton's APIs; any other body becomes the text."""
    text = body[:_MAX_ERROR_BYTES].decode("utf-8", "replace")
    try:
        found = json.loads(text)["error"]
        text = found if isinstance(found, str) else str(found["message"])
    except (ValueError, LookupError, TypeError):
        pass
    return ApiError(status, text or f"the server answered with status {status}")


def _unreachable(error: httpx.HTTPError) -> ApiError:
    return ApiError(0, f"the server cannot be reached: {error or type(error).__name__}")
