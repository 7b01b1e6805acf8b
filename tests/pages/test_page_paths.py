"""Which requests are a browser's for a page."""

from __future__ import annotations

import pytest

from llmbackend.frontends.page_proxy import is_for_pages


@pytest.mark.parametrize(
    ("path", "accept", "expected"),
    [
        ("/", b"text/html,*/*", True),
        ("/", b"*/*", False),
        ("/chat", b"text/html", True),
        ("/chat", b"", False),
        ("/_nicegui/3.18.0/static/nicegui.js", b"*/*", True),
        ("/_nicegui_ws/socket.io/", b"text/html", False),
        ("/v2/health/ready", b"text/html", False),
        ("/chat/", b"text/html", False),
    ],
)
def test_only_a_browser_gets_a_page(path: str, accept: bytes, expected: bool) -> None:
    assert is_for_pages(path, accept) is expected
