"""The flags of `llmbackend serve` that let web pages of other sites use the server.

For: the command line. Does not know: how it is done (`frontends/cors.py`). Invariant: names are vLLM's; a list is JSON
as there, or one value; without --allowed-origins no page may (vLLM's default is every page).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from llmbackend.frontends.cors import CorsOptions

PANEL = "Cross-origin requests (CORS)"


def _list(name: str, help_text: str) -> Any:
    return typer.Option(f"--{name}", metavar="JSON", rich_help_panel=PANEL, help=help_text)


@dataclass(frozen=True)
class CorsFlags:
    allowed_origins: Annotated[
        str, _list("allowed-origins", """Pages that may use the server: '["https://a.example"]', or '["*"]' for all.""")
    ] = "[]"
    allow_credentials: Annotated[
        bool,
        typer.Option("--allow-credentials", rich_help_panel=PANEL, help="Browsers may send credentials along."),
    ] = False
    allowed_methods: Annotated[str, _list("allowed-methods", "HTTP methods that pages may use.")] = '["*"]'
    allowed_headers: Annotated[str, _list("allowed-headers", "Request headers that pages may send.")] = '["*"]'

    def options(self) -> CorsOptions:
        return CorsOptions(
            origins=_strings("--allowed-origins", self.allowed_origins),
            credentials=self.allow_credentials,
            methods=_strings("--allowed-methods", self.allowed_methods),
            headers=_strings("--allowed-headers", self.allowed_headers),
        )


def _strings(flag: str, text: str) -> tuple[str, ...]:
    if not text.lstrip().startswith(("[", "{", '"')):
        return (text,)
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise typer.BadParameter(f"{flag} is {text}, expected a JSON list of strings or one value", param_hint=flag)
    return tuple(values)
