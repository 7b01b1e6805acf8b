"""The flags of `llmbackend serve` for the web pages.

For: the command line. Does not know: the pages. Invariant: pages that are asked for and not installed end the command
with a message that says how to install them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from llmbackend.frontends.protocol_options import PageSettings, pages_are_installed

from .flag_groups import bad_option, switch


@dataclass(frozen=True)
class PageFlags:
    PANEL: ClassVar = "Web pages"

    allow_pages: Annotated[
        Any, switch("--allow-pages", "Serve the web pages (chat, engine, operations); default: if they are installed.")
    ] = None
    pages_host: Annotated[
        list[str] | None,
        typer.Option("--pages-host", help="As --allowed-hosts, for one name; repeatable."),
    ] = None

    def settings(self) -> PageSettings:
        is_installed = pages_are_installed()
        if self.allow_pages and not is_installed:
            raise bad_option("--allow-pages", "the pages are not installed: pip install 'llmbackend[pages]'")
        is_allowed = is_installed if self.allow_pages is None else bool(self.allow_pages)
        return PageSettings(enabled=is_allowed)
