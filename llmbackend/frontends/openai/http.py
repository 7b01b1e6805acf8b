"""The HTTP side that all endpoints share: bodies in, event streams out, and clients that go away.

For: the router. Does not know: OpenAI's fields, the host. Invariant: a client that disconnects ends the work done for
it, in streaming and in non-streaming mode (a web framework watches for it in neither case on its own).

Streams are Starlette's StreamingResponse, not sse-starlette's EventSourceResponse: that one costs twice the CPU per
event, ends every open stream as soon as the server is told to exit (this server drains them), and once used wakes the
loop twice a second for ever, which an idle server must not do. It would add a keep-alive ping, which is one line
here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from llmbackend.core.errors import TritonError, shown
from llmbackend.frontends.inference import InferenceGate
from llmbackend.frontends.json_reader import check_depth, check_objects
from llmbackend.frontends.request_body import ENCODINGS, IDENTITY, BodyTooLargeError, content_encoding

from .errors import OpenAIError

T = TypeVar("T")
MAX_OBJECTS = 1 << 16
"""JSON objects and lists of a body."""


def check_content_type(request: Request) -> None:
    """Raises OpenAIError 415 for a body that does not say that it is JSON: a browser sends any other one to another
    site without asking that site first. vLLM's rule and text."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise OpenAIError(
            "Unsupported Media Type: Only 'application/json' is allowed", status=415, code="unsupported_media_type"
        )


async def read_body(gate: InferenceGate, request: Request, max_bytes: int) -> bytes:
    """The request's body, unpacked. Raises OpenAIError 413 over `max_bytes`, packed or not, and 415 for an unknown
    encoding; TritonError as `request_body.read_content`."""
    if (encoding := content_encoding(request)) not in (*ENCODINGS, IDENTITY):
        raise OpenAIError(
            f"Content-Encoding is {shown(encoding)}, expected one of {', '.join((*ENCODINGS, IDENTITY))}",
            status=415,
            code="unsupported_content_encoding",
        )
    try:
        return await gate.content(request, max_bytes)
    except BodyTooLargeError:
        raise _too_large(max_bytes) from None


def json_object(body: bytes) -> dict[str, Any]:
    """The object that `body` is.

    Raises OpenAIError 400 for anything but a JSON object and for one nested deeper than KServe's endpoints take it,
    TritonError INVALID_ARG for one of more objects than a parser makes in some milliseconds.
    """
    check_objects(body, MAX_OBJECTS)
    try:
        check_depth(body)
        value = orjson.loads(body)
    except (orjson.JSONDecodeError, TritonError) as error:
        raise OpenAIError(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise OpenAIError("the request body is not a JSON object", code="invalid_json")
    return value


def _too_large(max_bytes: int) -> OpenAIError:
    return OpenAIError(
        f"the request body is larger than the {max_bytes} bytes this server accepts; "
        "use --openai-max-input-size to increase the limit",
        status=413,
        code="content_too_large",
    )


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises ClientDisconnect when the client goes away first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Sends ready-made server-sent events. `on_close` is called once when the stream is over, however it ends."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], on_close: Callable[[], None], more_headers: Mapping[str, str]
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **more_headers}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self.stream_response(send))
        except (ClientDisconnect, OSError):
            return  # nobody is left to tell
        finally:
            self._on_close()
            await self._events.aclose()
