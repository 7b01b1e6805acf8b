"""Whose the request at hand is: carried in the context from the door to the host.

For: the doors, which set it; keyed_server.py and what bounds one key's share, which read it. Does not know: protocols
beyond their names. Invariant: a context variable follows its request into every task made for it, and into no other
request.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter

from .rate_limit import Account, Refusal

Protocol = Literal["http", "grpc"]
Outcome = Literal["accepted", "rate_limited", "restricted", "forbidden", "unauthenticated"]


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


class Visit:
    """One HTTP request or RPC of a key. Prompts are admitted once they are known: one at the door, before the body is
    read, which `enter` takes; the others when the body has said how many there are. One thread at a time uses it."""

    __slots__ = ("_is_decided", "_metrics", "_paid", "account", "protocol")

    def __init__(self, account: Account, protocol: Protocol, metrics: DoorMetrics) -> None:
        self.account = account
        self.protocol: Protocol = protocol
        self._metrics = metrics
        self._paid = 0
        self._is_decided = False

    def enter(self) -> Refusal | None:
        """Takes the first prompt in advance, or says why not."""
        return self.pay(1)

    def pay(self, prompts: int) -> Refusal | None:
        """Takes that many prompts in advance, those taken before among them, all or none."""
        if prompts <= self._paid:
            return None
        refusal = self.account.admit(prompts, self._paid)
        if refusal is None:
            self._paid = prompts
        if refusal is not None or not self._is_decided:
            self._is_decided = refusal is None
            self._metrics.decided(self.account, self.protocol, "accepted" if refusal is None else "rate_limited")
        return refusal

    def spend(self, prompts: int) -> Refusal | None:
        """Uses prompts that were taken in advance, and takes what lacks. Each request of a stream takes its own."""
        if not self._paid:
            self._is_decided = False
        refusal = self.pay(prompts)
        if refusal is None:
            self._paid -= prompts
        return refusal

    def token_counters(self) -> tuple[Counter, Counter]:
        return self._metrics.token_counters(self.account)


VISIT: Final[ContextVar[Visit | None]] = ContextVar("visit", default=None)
