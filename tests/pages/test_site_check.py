"""Which requests are a browser's for a page, and which of them come from another site."""

from __future__ import annotations

import socket

import pytest

from llmbackend.frontends.page_proxy.site_check import SiteCheck, is_for_pages


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


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("localhost", None),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("192.168.1.7:8000", "https://192.168.1.7:8000"),
        ("chat.example", "https://chat.example"),
        ("CHAT.example:81", "http://chat.example:81"),
        (f"{socket.gethostname()}:8000", None),
    ],
)
def test_this_site_is_served(host: str, origin: str | None) -> None:
    assert SiteCheck({"chat.example"}).refusal(headers(host, origin)) == ""


@pytest.mark.parametrize(
    ("host", "origin", "expected"),
    [
        ("evil.example:8000", None, "not served for the Host 'evil.example:8000'"),
        ("", None, "not served for the Host ''"),
        ("user@127.0.0.1", None, "not served for the Host"),
        ("127.0.0.1.evil.example", None, "not served for the Host"),
        ("[::1", None, "not served for the Host"),
        ("localhost:8000", "https://evil.example", "Origin of the request is 'https://evil.example'"),
        ("localhost:8000", "http://localhost:8001", "Origin of the request is"),
        ("localhost:8000", "null", "Origin of the request is 'null'"),
    ],
)
def test_another_site_is_refused(host: str, origin: str | None, expected: str) -> None:
    assert expected in SiteCheck().refusal(headers(host, origin))


def headers(host: str, origin: str | None) -> list[tuple[bytes, bytes]]:
    pairs = [(b"accept", b"text/html"), (b"host", host.encode())]
    return pairs if origin is None else [*pairs, (b"origin", origin.encode())]
