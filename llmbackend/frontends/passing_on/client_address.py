"""The address of a client, on its request's way from a frontend process to the host.

For: both ends of the private HTTP socket. Does not know: what addresses are used for. Invariants: the header is
believed on the private socket alone, which only frontend processes reach; one that a client sends is not passed on.
"""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

CLIENT_ADDRESS: Final = b"x-llmbackend-client-address"


def address_header(scope: Scope) -> tuple[bytes, bytes]:
    """The header that tells the host who sent the request of `scope`."""
    address, port = scope.get("client") or ("", 0)
    return CLIENT_ADDRESS, f"{address} {port}".encode()


def from_frontends(app: ASGIApp) -> ASGIApp:
    """`app`, for requests that frontend processes pass on: it sees their clients' addresses."""

    async def addressed(scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"]
        told = next((value for name, value in headers if name == CLIENT_ADDRESS), b"")
        address, _, port = told.decode("latin-1").rpartition(" ")
        if address:
            scope["client"] = (address, int(port))
        scope["headers"] = [pair for pair in headers if pair[0] != CLIENT_ADDRESS]
        await app(scope, receive, send)

    return addressed
