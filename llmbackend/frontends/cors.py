"""Cross-origin requests: which web pages of other sites may use this server from a browser.

For: the frontend server, which puts it before the doors: a browser's preflight carries no key, and a page may read why
it was refused. Does not know: paths, keys. Invariants: without allowed origins there is no middleware and no CORS
header; a request without an Origin header passes through untouched.
Source: the CORS protocol of the Fetch standard by Starlette's middleware; names of the options are vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_READABLE_HEADERS: Final = ("Inference-Header-Content-Length", "Retry-After", "endpoint-load-metrics")
"""Response headers that a page may read besides the few that it always may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorsOptions:
    """origins: of the pages that may use the server, "*" for any; none: no page. methods and headers "*" = any.
    credentials: browsers may send their cookies and client certificates along."""

    origins: tuple[str, ...] = ()
    credentials: bool = False
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)


NO_ORIGINS: Final = CorsOptions()


def around(app: ASGIApp, options: CorsOptions) -> ASGIApp:
    if not options.origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=options.origins,
        allow_credentials=options.credentials,
        allow_methods=options.methods,
        allow_headers=options.headers,
        expose_headers=_READABLE_HEADERS,
    )
