"""The names of uvicorn that llmbackend/frontends/http overrides or reads, most of which are not public.

A version of uvicorn that has lost one of them, or changed its parameters, fails here by that name; then
http/protocol.py and http/endpoint.py have to be read against the new source, and the bound in pyproject.toml raised.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from llmbackend.frontends.http.protocol import CaseKeepingProtocol, GuardedProtocol

PROTOCOL_METHODS = {
    "__init__": ["config", "server_state", "app_state", "_loop"],
    "connection_made": ["transport"],
    "connection_lost": ["exc"],
    "data_received": ["data"],
    "eof_received": [],
    "on_message_begin": [],
    "on_header": ["name", "value"],
    "on_headers_complete": [],
    "on_body": ["body"],
    "on_message_complete": [],
    "on_response_complete": [],
    "shutdown": [],
    "pause_writing": [],
    "resume_writing": [],
    "timeout_keep_alive_handler": [],
    "_start_asgi_task": ["cycle", "app"],
    "_unset_keepalive_if_required": [],
    "_should_upgrade_to_ws": [],
    "_unsupported_upgrade_warning": [],
    "handle_websocket_upgrade": [],
}
PROTOCOL_FIELDS = ["loop", "transport", "flow", "cycle", "scope", "headers", "pipeline", "timeout_keep_alive_task"]
PROTOCOL_FIELDS += ["connections"]
CYCLE_FIELDS = ["scope", "transport", "message_event", "disconnected", "response_started", "response_complete"]
CYCLE_FIELDS += ["keep_alive", "chunked_encoding", "expected_content_length"]


async def no_app(scope: Any, receive: Any, send: Any) -> None: ...


def config() -> uvicorn.Config:
    made = uvicorn.Config(no_app, http="httptools", ws="none", lifespan="off", log_config=None)
    made.load()
    return made


def parameters(function: Any) -> list[str]:
    """Without `self`."""
    return list(inspect.signature(function).parameters)[1:]


@pytest.mark.parametrize("name", PROTOCOL_METHODS)
def test_a_method_of_the_protocol_has_its_parameters(name: str) -> None:
    assert parameters(getattr(HttpToolsProtocol, name)) == PROTOCOL_METHODS[name]


@pytest.mark.parametrize("protocol", [GuardedProtocol, CaseKeepingProtocol])
def test_every_method_that_is_overridden_is_listed_here(protocol: type) -> None:
    overridden = {
        name for name in vars(protocol) if name in dir(HttpToolsProtocol) and inspect.isfunction(vars(protocol)[name])
    }
    assert overridden <= PROTOCOL_METHODS.keys()


async def test_the_protocol_its_requests_and_their_flow_have_their_fields() -> None:
    protocol = HttpToolsProtocol(config(), ServerState(), {}, asyncio.get_running_loop())
    assert [name for name in PROTOCOL_FIELDS if not hasattr(protocol, name)] == []
    flow = FlowControl(asyncio.Transport())
    assert hasattr(flow, "read_paused")
    options: dict[str, Any] = dict.fromkeys(parameters(RequestResponseCycle.__init__))
    options |= {"flow": flow, "logger": logging.getLogger(), "message_event": asyncio.Event()}
    cycle = RequestResponseCycle(**options)
    assert [name for name in CYCLE_FIELDS if not hasattr(cycle, name)] == []


def test_a_server_that_was_not_started_by_uvicorn_can_be_shut_down_by_it() -> None:
    settings = config()
    server = uvicorn.Server(settings)
    assert {"timeout_keep_alive", "timeout_graceful_shutdown", "lifespan_class"} <= set(vars(settings))
    assert {"server_state", "started"} <= set(vars(server))
    assert parameters(uvicorn.Server.shutdown) == ["sockets"]
    server.servers, server.lifespan = [], settings.lifespan_class(settings)
    asyncio.run(server.shutdown())
