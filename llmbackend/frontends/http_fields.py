"""One header of an HTTP request.

For: handlers of inference. Does not know: what headers mean. starlette's `request.headers` builds an object and looks
for names in any case; names come from the protocol in lower case, and a handful of them is looked through at once.
"""

from __future__ import annotations

from starlette.requests import Request


def header(request: Request, name: bytes, default: str = "") -> str:
    """The value of the first header of that name, which is given in lower case."""
    for key, value in request.scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return default
