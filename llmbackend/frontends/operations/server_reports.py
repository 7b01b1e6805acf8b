"""What operators read about a server: what it runs with, and what the holders of its keys use.

For: the operations router. Does not know: how flags are parsed, the keys themselves. Invariants: no secret is in a
report, of a key only its name; the answer's size is bounded, whichever number of keys there is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from llmbackend.core.inference_server import InferenceServer

from ..access.access_control import AccessControl
from ..access.rate_limit import Account
from ..access.request_identity import KeyTotals
from ..http.openapi_parts import Json, array, closed, operation
from ..http.openapi_parts import json_response as described_response
from ..http.responses import json_response
from ..http.routing import Router
from ..inference_gate import InferenceGate

SETTINGS_PATH: Final = "/v2/engine/settings"
ACCESS_PATH: Final = "/v2/engine/access"
MAX_KEYS: Final = 1000
"""In one report, by name; the largest key file has some ten thousand."""
_STRING: Final = {"type": "string"}
_BOOLEAN: Final = {"type": "boolean"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_LEFT: Final = {"type": ["integer", "null"]}
_LIMIT: Final = {"type": ["integer", "null"], "minimum": 1}
_USE: Final = ("accepted", "rate_limited", "forbidden", "restricted", "prompt_tokens", "generated_tokens")
SCHEMAS: Json = {
    "ServerSettings": closed(
        {
            "name": _STRING,
            "version": _STRING,
            "started": {"type": "number"},
            "pid": _COUNT,
            "allows_load": _BOOLEAN,
            "allows_kill": _BOOLEAN,
            "needs_key": _BOOLEAN,
            "flags": array(closed({"flag": _STRING, "value": _STRING})),
        }
    ),
    "KeyUse": closed(
        {
            "name": _STRING,
            "role": {"type": "string", "enum": ["user", "operator"]},
            "limits": closed(
                dict.fromkeys(("requests_per_minute", "tokens_per_minute", "concurrent_requests"), _LIMIT)
            ),
            "left": closed({"requests": _LEFT, "tokens": _LEFT}),
            "concurrent_requests": _COUNT,
            "total": closed(dict.fromkeys(_USE, _COUNT)),
        }
    ),
    "AccessReport": closed(
        {
            "needs_key": _BOOLEAN,
            "num_keys": _COUNT,
            "keys": {"type": "array", "items": {"$ref": "#/components/schemas/KeyUse"}, "maxItems": MAX_KEYS},
        }
    ),
}
OPERATIONS: dict[tuple[str, str], Json] = {
    ("GET", SETTINGS_PATH): operation("What the server runs with", {"200": described_response("ServerSettings")}),
    ("GET", ACCESS_PATH): operation("API keys: limits and use", {"200": described_response("AccessReport")}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What does not change while the server runs."""

    allows_load: bool = False
    """Whether models are loaded and unloaded by request (model control mode explicit)."""
    allows_kill: bool = False
    """Whether engines may be killed by request (--allow-fault-injection)."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """The flags that were given, with their values as texts, without secrets."""
    started: float = field(default_factory=time.time)
    """Unix seconds."""


class ServerReportEndpoints:
    def __init__(self, server: InferenceServer, gate: InferenceGate, access: AccessControl, facts: ServerFacts) -> None:
        self._server = server
        self._gate = gate
        self._access = access
        self._facts = facts

    def add_to(self, router: Router) -> None:
        router.add_handler(SETTINGS_PATH, self.settings, methods=["GET"])
        router.add_handler(ACCESS_PATH, self.access, methods=["GET"])

    async def settings(self, request: Request) -> Response:
        server, facts = self._server.server_metadata(), self._facts
        report = {
            "name": server.name,
            "version": server.version,
            "started": facts.started,
            "pid": os.getpid(),
            "allows_load": facts.allows_load,
            "allows_kill": facts.allows_kill,
            "needs_key": self._access.accounts is not None,
            "flags": [{"flag": flag, "value": value} for flag, value in facts.flags.items()],
        }
        return json_response(report)

    async def access(self, request: Request) -> Response:
        accounts, totals = self._access.accounts, self._access.totals()
        rows = [self._row(account, totals.get(account.name)) for account in (accounts or ())[:MAX_KEYS]]
        return json_response({"needs_key": accounts is not None, "num_keys": len(accounts or ()), "keys": rows})

    def _row(self, account: Account, totals: KeyTotals | None) -> dict[str, Any]:
        limits, counted = account.limits, totals or KeyTotals()
        requests_left, tokens_left = account.left()
        return {
            "name": account.name,
            "role": account.role.value,
            "limits": {
                "requests_per_minute": limits.requests or None,
                "tokens_per_minute": limits.tokens or None,
                "concurrent_requests": limits.concurrency or None,
            },
            "left": {"requests": requests_left, "tokens": tokens_left},
            "concurrent_requests": self._gate.open_inferences_of(account),
            "total": {what: counted[what] for what in _USE},
        }
