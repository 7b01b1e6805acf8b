"""URLs that a started server shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from llmbackend.core.server_options import ServerOptions
from llmbackend.frontends.protocol_options import PageSettings
from llmbackend.server.ports import Endpoint
from llmbackend.server.settings import ServerSettings
from llmbackend.server.terminal import page_url, urls_of


def test_ipv6_addresses_have_brackets() -> None:
    settings = ServerSettings(
        options=ServerOptions(),
        http=Endpoint("::", 8000),
        grpc=Endpoint("::1", 8001),
        metrics=Endpoint("127.0.0.1", 8002),
        pages=PageSettings(enabled=True),
    )
    listening: Any = SimpleNamespace(http_port=8000, grpc_port=8001, metrics_port=8002)
    urls = urls_of(listening, settings)
    assert urls == {"http": "http://[::]:8000", "grpc": "[::1]:8001", "metrics": "http://127.0.0.1:8002/metrics"}
    assert page_url(urls, settings) == {"pages": "http://localhost:8000/"}
