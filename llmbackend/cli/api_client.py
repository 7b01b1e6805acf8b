"""An HTTP client for `llmbackend chat` and `llmbackend top`: JSON and event streams.

Invariants: every failure is an ApiError that names the URL and the cause; a connection is closed when its block ends,
which cancels the request on the server. Uses only the standard library, and no proxy.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

CONNECT_TIMEOUT_S: Final = 10.0
MAX_BODY_BYTES: Final = 64 * 1024 * 1024
MAX_LINE_BYTES: Final = 8 * 1024 * 1024
_MAX_SHOWN_CHARACTERS: Final = 500


class ApiError(Exception):
    """status: the HTTP status; 0 = no answer."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class ServerEvent:
    name: str
    """"" = none."""
    data: str

    def json(self) -> Any:
        try:
            return json.loads(self.data)
        except (ValueError, RecursionError):
            raise ApiError(f"the server sent an event that is not JSON: {self.data[:_MAX_SHOWN_CHARACTERS]}") from None


class ApiClient:
    """url: http or https, with the prefix of all paths; http if it has no scheme."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 600.0) -> None:
        """timeout_s: the longest time that the server may be silent. Raises ValueError for an invalid URL."""
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._parts = _parsed(self.url)
        self._timeout_s = timeout_s
        self._headers = {"accept": "application/json, text/event-stream"}
        if api_key:
            if not api_key.isascii() or not api_key.isprintable():
                raise ValueError("the API key contains characters that are not allowed in a header")
            self._headers["authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Any:
        with self._answer("GET", path, None) as answer:
            return self._json(answer, path)

    @contextlib.contextmanager
    def events(self, path: str, body: Mapping[str, Any] | None = None) -> Iterator[Iterator[ServerEvent]]:
        """The events of a stream as they arrive, from a GET or from a POST with a JSON body. Raises ApiError, also
        while the events are read."""
        with self._answer("GET" if body is None else "POST", path, body) as answer:
            yield self._read_events(answer, path)

    @contextlib.contextmanager
    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        connection = self._connected()
        try:
            headers = self._headers if body is None else {**self._headers, "content-type": "application/json"}
            payload = None if body is None else json.dumps(body).encode()
            with self._failures(path):
                connection.request(method, f"{self._parts.path}{path}", payload, headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    raise self._refusal(answer, path)
            yield answer
        finally:
            connection.close()

    def _connected(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        connection: http.client.HTTPConnection
        if self._parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_TIMEOUT_S, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:
            connection.close()
            raise ApiError(f"no server at {self.url}: {_reason(error)}") from None
        connection.sock.settimeout(self._timeout_s)
        return connection

    @contextlib.contextmanager
    def _failures(self, path: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise ApiError(f"{self.url}{path} sent nothing for {self._timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"{self.url}{path}: the connection ended: {_reason(error)}") from None

    def _json(self, answer: http.client.HTTPResponse, path: str) -> Any:
        with self._failures(path):
            body = answer.read(MAX_BODY_BYTES)
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise ApiError(f"{self.url}{path} answers, but not with JSON: is this the right URL?") from None

    def _read_events(self, answer: http.client.HTTPResponse, path: str) -> Iterator[ServerEvent]:
        name, data = "", []
        while True:
            with self._failures(path):
                line = answer.readline(MAX_LINE_BYTES)
            if not line:
                return
            if not line.endswith(b"\n") and len(line) >= MAX_LINE_BYTES:
                raise ApiError(f"{self.url}{path}: a line of the stream is longer than {MAX_LINE_BYTES} bytes")
            field, _, value = line.decode("utf-8", "replace").rstrip("\r\n").partition(":")
            if field == "data":
                data.append(value.removeprefix(" "))
            elif field == "event":
                name = value.strip()
            elif not field and not value:
                if data:
                    yield ServerEvent(name, "\n".join(data))
                name, data = "", []

    def _refusal(self, answer: http.client.HTTPResponse, path: str) -> ApiError:
        text = _message(answer.read(MAX_BODY_BYTES))
        what = f"{self.url}{path}: HTTP {answer.status} {answer.reason}"
        return ApiError(f"{what}: {text}" if text else what, answer.status)


def _parsed(url: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"the URL is '{url}', expected one such as http://127.0.0.1:8000")
    _ = parts.port  # raises ValueError
    return parts


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, socket.gaierror):
        return f"the host name is unknown ({error.strerror})"
    if isinstance(error, TimeoutError):
        return f"no connection within {CONNECT_TIMEOUT_S:g} s"
    return str(error) or type(error).__name__


def _message(body: bytes) -> str:
    """The error text in the format of OpenAI, Triton or FastAPI, else the body."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode("utf-8", "replace").strip()[:_MAX_SHOWN_CHARACTERS]
    return error_text(document)


def error_text(document: Any) -> str:
    """The text of an error in a document, "" if there is none."""
    if not isinstance(document, dict):
        return ""
    found = document.get("error") or document.get("message") or document.get("detail")
    if isinstance(found, dict):
        found = found.get("message")
    return "" if found is None else str(found)[:_MAX_SHOWN_CHARACTERS]
