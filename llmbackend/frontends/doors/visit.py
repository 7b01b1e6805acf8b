"""Who the request at hand belongs to: carried in the context from the door to the host's infer_async.

For: the doors, which set it, and metering.py, which reads it. Does not know: protocols beyond their names. Invariant:
a context variable follows its request into every task made for it, and into no other request.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter

from .rate_limit import Account, Refusal

Protocol = Literal["http", "grpc"]
Outcome = Literal["accepted", "rate_limited", "restricted", "unauthenticated"]


class DoorMetrics:
    """What the doors decided, and what passed them. The label key_name is "" where there is no valid key."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "llmbackend:api_requests",
            "Requests to endpoints that are not open to everybody, by what the door decided",
            ["key_name", "protocol", "outcome"],
            registry=registry,
        )
        self._tokens = Counter(
            "llmbackend:api_tokens",
            "Tokens of requests with an API key",
            ["key_name", "kind"],
            registry=registry,
        )

    def decided(self, account: Account | None, protocol: Protocol, outcome: Outcome) -> None:
        self._requests.labels("" if account is None else account.name, protocol, outcome).inc()

    def token_counters(self, account: Account) -> tuple[Counter, Counter]:
        """Of prompt and of generated tokens. Looking them up costs more than counting: once per request will do."""
        return self._tokens.labels(account.name, "prompt"), self._tokens.labels(account.name, "generated")


@dataclass(frozen=True, slots=True)
class Visit:
    """One HTTP request or RPC of a key. `asks_each`: it is a stream of requests, and each must be admitted."""

    account: Account
    protocol: Protocol
    metrics: DoorMetrics
    asks_each: bool = False

    def admit(self) -> Refusal | None:
        refusal = self.account.admit()
        self.metrics.decided(self.account, self.protocol, "accepted" if refusal is None else "rate_limited")
        return refusal


VISIT: Final[ContextVar[Visit | None]] = ContextVar("visit", default=None)
