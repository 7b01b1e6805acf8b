"""Requests of web pages of other sites: refused on every route before they have an effect, over real sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from llmbackend.cli.flags.endpoints import CorsFlags
from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.access.settings import AccessSettings
from llmbackend.frontends.http.site_check import SiteCheck
from llmbackend.frontends.protocol_options import CorsOptions, ProtocolOptions
from tests.helpers.kserve_runner import Running
from tests.helpers.mock_llm_host import MODEL, mock_llm_host

BOARD = "https://board.example"
CHECK = SiteCheck({BOARD}, {"chat.example"})


def refusal(check: SiteCheck, method: str = "POST", **headers: str) -> str:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return check.refusal(method, pairs)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "localhost:8000"},
        {"host": "localhost:8000", "origin": "http://localhost:8000"},
        {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"},
        {"host": "[::1]:8000", "origin": "http://[::1]:8000"},
        {"host": "192.168.1.7:8000", "origin": "https://192.168.1.7:8000"},
        {"host": "CHAT.example:81", "origin": "http://chat.example:81"},
        {"host": f"{socket.gethostname()}:8000"},
        {"host": "localhost", "origin": "https://behind.a.proxy", "sec_fetch_site": "same-origin"},
        {"host": "localhost", "origin": BOARD, "sec_fetch_site": "cross-site"},
    ],
)
def test_this_site_and_allowed_ones_are_served(headers: dict[str, str]) -> None:
    assert refusal(CHECK, **headers) == ""


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"host": "evil.example:8000"}, "the Host of the request is 'evil.example:8000', expected an IP address"),
        ({"host": "evil", "origin": "http://evil"}, "--allowed-hosts"),
        ({"host": "user@127.0.0.1"}, "the Host of the request is"),
        ({"host": "127.0.0.1.evil.example"}, "the Host of the request is"),
        ({"host": "[::1"}, "the Host of the request is"),
        ({"host": "localhost:8000", "origin": "https://evil.example"}, "is 'https://evil.example', expected"),
        ({"host": "localhost:8000", "origin": "http://localhost:8001"}, "--allowed-origins"),
        ({"host": "localhost:8000", "origin": "null"}, "is 'null', expected"),
        ({"host": "localhost", "origin": "http://localhost", "sec_fetch_site": "cross-site"}, "--allowed-origins"),
        ({"host": "localhost", "sec_fetch_site": "same-site"}, "--allowed-origins"),
    ],
)
def test_other_sites_are_refused(headers: dict[str, str], expected: str) -> None:
    assert expected in refusal(CHECK, **headers)


def test_a_link_from_another_site_may_be_followed() -> None:
    assert refusal(CHECK, "GET", host="localhost", sec_fetch_site="cross-site") == ""


def test_where_the_host_is_not_checked_only_the_origin_is() -> None:
    check = SiteCheck(checks_host=False)
    assert refusal(check, host="behind.a.proxy") == ""
    assert refusal(check, host="behind.a.proxy", origin="http://evil.example") != ""
    assert refusal(SiteCheck({"*"}), host="localhost", origin="http://any.example") == ""
    assert check.host_refusal([]) != "" and CHECK.host_refusal([(b"host", b"chat.example")]) == ""


@dataclass
class Endpoint:
    """Two servers, one of them with keys."""

    running: Running

    def status(self, method: str, path: str, body: Any = None, port: int | None = None, **headers: str) -> int:
        connection = HTTPConnection("127.0.0.1", port or int(self.running.http.rpartition(":")[2]), timeout=20)
        content = None if body is None else json.dumps(body).encode()
        connection.request(method, path, content, headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status


def served(root: Path, **options: Any) -> Iterator[Endpoint]:
    with Running(root, start=mock_llm_host, **options) as running:
        yield Endpoint(running)


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    protocols = ProtocolOptions(cors=CorsOptions(origins=(BOARD,)), allowed_hosts=frozenset({"chat.example"}))
    yield from served(tmp_path_factory.mktemp("open"), protocols=protocols)


@pytest.fixture(scope="module")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    access = AccessControl(AccessSettings(api_keys=("secret",)))
    yield from served(tmp_path_factory.mktemp("keyed"), access=access)


ROUTES: list[tuple[str, str, Any]] = [
    ("POST", "/v2/logging", {"log_verbose_level": 1}),
    ("POST", f"/v2/repository/models/{MODEL}/unload", {}),
    ("POST", "/v2/repository/index", {}),
    ("POST", f"/v2/models/{MODEL}/generate", {"text_input": "x"}),
    ("POST", f"/v2/models/{MODEL}/generate_stream", {"text_input": "x"}),
    ("POST", f"/v2/models/{MODEL}/infer", {}),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": "x"}),
    ("POST", "/v2/engine/requests/1/cancel", None),
    ("GET", "/v2/health/ready", None),
    ("GET", "/metrics", None),
    ("GET", "/nowhere", None),
]


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
def test_every_route_refuses_a_page_of_another_site(
    open_server: Endpoint, keyed_server: Endpoint, method: str, path: str, body: Any
) -> None:
    plain: Any = {"Content-Type": "text/plain"}  # which a browser sends without asking first
    assert open_server.status(method, path, body, Origin="https://evil.example", **plain) == 403
    assert open_server.status(method, path, body, Host="evil", **plain) == 403
    assert keyed_server.status(method, path, body, Origin="https://evil.example", Authorization="Bearer secret") == 403
    assert open_server.status("GET", "/v2/health/ready") == 200  # the model is still there


def test_the_metrics_port_refuses_it_too(open_server: Endpoint) -> None:
    port = open_server.running.frontend.metrics_port
    assert open_server.status("GET", "/metrics", port=port) == 200
    assert open_server.status("GET", "/metrics", port=port, Origin="https://evil.example") == 403
    assert open_server.status("GET", "/metrics", port=port, Host="evil") == 403


def test_named_hosts_and_origins_are_served(open_server: Endpoint) -> None:
    path, body = f"/v2/models/{MODEL}/generate", {"text_input": "x"}
    assert open_server.status("POST", path, body, Host="chat.example") == 200
    assert open_server.status("POST", path, body, Host="chat.example", Origin="http://chat.example") == 200
    assert open_server.status("POST", path, body, Origin=BOARD) == 200


def test_with_keys_any_host_is_served(keyed_server: Endpoint) -> None:
    path, body = f"/v2/models/{MODEL}/generate", {"text_input": "x"}
    assert keyed_server.status("POST", path, body, Host="behind.a.proxy", Authorization="Bearer secret") == 200


def test_the_flag_takes_a_list_or_one_name() -> None:
    assert CorsFlags().hosts() == frozenset()
    assert CorsFlags(allowed_hosts='["A.example", "b"]').hosts() == {"a.example", "b"}
    assert CorsFlags(allowed_hosts="c.example").hosts() == {"c.example"}
