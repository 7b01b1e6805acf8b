"""The router of /v2/engine: reports and control for operators.

Independent of who may call (access control decides). Invariants: nothing here waits for a backend on the event loop; a
report contains no secret, only the name of a key, and has a bounded size; faults are injected only if that is allowed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, get_args

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from typing_extensions import TypedDict  # pydantic accepts typing.TypedDict only from Python 3.12 on

from llmbackend.core.errors import invalid_argument, shown
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_log import ServerLog

from ..access.access_control import AccessControl
from ..access.permissions import Role
from ..access.rate_limit import Account
from ..access.request_identity import KeyTotals
from ..errors import PermissionDeniedError
from ..http.routing import Count, Endpoints, get, post, whole_number
from ..inference_gate import InferenceGate
from .engine_events import EngineEventsEndpoint

NO_FAULTS: Final = "this server does not kill engines: it was started without --allow-fault-injection"
MAX_KEYS: Final = 1000
"""Limit of one report; a key file may have ten thousand keys."""
_MAX_NUMBER: Final = 10**18 - 1
_Limit = Annotated[int, Field(ge=1)] | None
_Use = Literal["accepted", "rate_limited", "forbidden", "restricted", "prompt_tokens", "generated_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Constant while the server runs."""

    allows_load: bool = False
    """Whether requests may load and unload models (model control mode explicit)."""
    allows_kill: bool = False
    """Whether requests may kill engines (--allow-fault-injection)."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Command-line flags and their values, without secrets."""
    started: float = field(default_factory=time.time)
    """Unix seconds."""


def create_operations_router(
    server: InferenceServer,
    gate: InferenceGate,
    access: AccessControl,
    facts: ServerFacts | None = None,
    log: ServerLog | None = None,
) -> APIRouter:
    """gate, access, log: shared with the other frontends of `server`"""
    facts = facts or ServerFacts()
    recent_log = (log or ServerLog()).recent
    router = APIRouter()
    EngineControlEndpoints(server, allows_faults=facts.allows_kill).add_to(router)
    EngineEventsEndpoint(server, recent_log, allows_kill=facts.allows_kill).add_to(router)
    ServerReportEndpoints(server, gate, access, facts).add_to(router)
    return router


class CancelledRequest(TypedDict):
    request: int


class KilledInstance(TypedDict):
    instance: str
    pids: list[int]


class EngineControlEndpoints(Endpoints):
    def __init__(self, server: InferenceServer, *, allows_faults: bool) -> None:
        self._server = server
        self._allows_faults = allows_faults

    @post("/v2/engine/requests/{request}/cancel")
    async def cancel(self, http: Request) -> CancelledRequest:
        """Cancel a request in flight by its number in /v2/engine/events; the request itself gets an answer"""
        number = _number(http, "request", "the number of a request, as in /v2/engine/events")
        self._server.cancel_request(number)
        return {"request": number}

    @post("/v2/engine/instances/{name}/{version}/{instance}/kill")
    async def kill(self, http: Request) -> KilledInstance:
        """Kill an instance's engine, as if it had crashed (--allow-fault-injection)"""
        if not self._allows_faults:
            raise PermissionDeniedError(NO_FAULTS)
        model, instance = http.path_params["name"], http.path_params["instance"]
        version = _number(http, "version", "the number of a version")
        pids = await asyncio.to_thread(self._server.kill_instance, model, version, instance)
        return {"instance": instance, "pids": pids}


def _number(http: Request, name: str, expected: str) -> int:
    """A number in the path. Raises TritonError INVALID_ARG naming it."""
    text: str = http.path_params[name]
    if (number := whole_number(text, 0, _MAX_NUMBER)) is None:
        raise invalid_argument(f"{name} is {shown(text)}, expected {expected}")
    return number


class Flag(TypedDict):
    flag: str
    value: str


class ServerSettings(TypedDict):
    name: str
    version: str
    started: float
    pid: Count
    allows_load: bool
    allows_kill: bool
    needs_key: bool
    flags: list[Flag]


class KeyLimits(TypedDict):
    requests_per_minute: _Limit
    tokens_per_minute: _Limit
    concurrent_requests: _Limit


class KeyRemaining(TypedDict):
    requests: int | None
    tokens: int | None


class KeyUse(TypedDict):
    name: str
    role: Role
    limits: KeyLimits
    left: KeyRemaining
    concurrent_requests: Count
    total: dict[_Use, Count]


class AccessReport(TypedDict):
    needs_key: bool
    num_keys: Count
    keys: Annotated[list[KeyUse], Field(max_length=MAX_KEYS)]


class ServerReportEndpoints(Endpoints):
    def __init__(self, server: InferenceServer, gate: InferenceGate, access: AccessControl, facts: ServerFacts) -> None:
        self._server = server
        self._gate = gate
        self._access = access
        self._facts = facts

    @get("/v2/engine/settings")
    async def settings(self, http: Request) -> ServerSettings:
        """The server's settings"""
        server, facts = self._server.server_metadata(), self._facts
        return {
            "name": server.name,
            "version": server.version,
            "started": facts.started,
            "pid": os.getpid(),
            "allows_load": facts.allows_load,
            "allows_kill": facts.allows_kill,
            "needs_key": self._access.accounts is not None,
            "flags": [{"flag": flag, "value": value} for flag, value in facts.flags.items()],
        }

    @get("/v2/engine/access")
    async def access(self, http: Request) -> AccessReport:
        """API keys: limits and usage"""
        accounts, totals = self._access.accounts, self._access.totals()
        rows = [self._row(account, totals.get(account.name)) for account in (accounts or ())[:MAX_KEYS]]
        return {"needs_key": accounts is not None, "num_keys": len(accounts or ()), "keys": rows}

    def _row(self, account: Account, totals: KeyTotals | None) -> KeyUse:
        limits, counted = account.limits, totals or KeyTotals()
        requests_left, tokens_left = account.left()
        return {
            "name": account.name,
            "role": account.role,
            "limits": {
                "requests_per_minute": limits.requests or None,
                "tokens_per_minute": limits.tokens or None,
                "concurrent_requests": limits.concurrency or None,
            },
            "left": {"requests": requests_left, "tokens": tokens_left},
            "concurrent_requests": self._gate.open_inferences_of(account),
            "total": {what: counted[what] for what in get_args(_Use)},
        }
