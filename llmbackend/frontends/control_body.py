"""Bodies of requests that control the server: small ones.

For: the endpoints of settings, shared memory, stop and the repository, on HTTP and gRPC. Does not know: what is in
them. Invariant: parsing one takes milliseconds; only files of a load request may make a body larger.
"""

from __future__ import annotations

from typing import Final

from starlette.requests import Request

from llmbackend.core.errors import TritonError, invalid_argument

from .request_body import BodyTooLargeError, read_body

MOST_CONTROL_BYTES: Final = 1 << 20


def too_large() -> TritonError:
    return invalid_argument(f"the request has more than {MOST_CONTROL_BYTES} bytes, at most so many are accepted here")


async def read_control(request: Request) -> bytes:
    """As `read_body`, but TritonError INVALID_ARG beyond MOST_CONTROL_BYTES."""
    try:
        return await read_body(request, MOST_CONTROL_BYTES)
    except BodyTooLargeError:
        raise too_large() from None
