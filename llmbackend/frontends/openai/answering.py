"""What endpoints have in common that answer with a generation: a whole body or a stream, and no request that outlives
its client.

For: the routers of the APIs. Does not know: their forms. Invariant: the generation is closed however the request ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .generation import Generation
from .prompt_details import Writer
from .streams import EventStream, events, first_arrival, unless_disconnected


async def whole_answer(
    http: Request, generation: Generation, work: Coroutine[Any, Any, bytes], headers: Callable[[], Mapping[str, str]]
) -> Response:
    """The answer that `work` makes of the generation. headers: asked for at the end. Raises ClientDisconnect when the
    client goes away, and what `work` raises."""
    try:
        body = await unless_disconnected(http.receive, work)
    finally:
        generation.close()
    return Response(body, headers=dict(headers()), media_type="application/json")


async def streamed_answer(
    http: Request,
    generation: Generation,
    writer: Writer,
    headers: Callable[[], Mapping[str, str]],
    before_end: Callable[[], Awaitable[None]] | None = None,
) -> Response:
    """The stream that `writer` makes of the generation, once its first response is here, which may be an error: that
    one is raised. before_end: awaited before the last events are sent."""
    try:
        first = await first_arrival(http.receive, generation)
        chunks = events(generation, first, writer, before_end)
        return EventStream(chunks, generation.close, headers())
    except BaseException:
        generation.close()
        raise
