"""The identity of the current request: the account of its API key, and the prompts charged to the rate limit so far.

Invariant: the access checks set it as a context variable, which tasks and threads for the request inherit.
"""

from __future__ import annotations

import sys
from collections import Counter as Tally
from collections import defaultdict
from contextvars import ContextVar
from pathlib import Path
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.registry import Collector
from starlette.types import Scope

from ..http.request_body import address_of
from .process_counters import ProcessCounters, total_samples
from .rate_limit import Account, Refusal

Protocol = Literal["http", "grpc"]
Outcome = Literal["accepted", "rate_limited", "restricted", "forbidden", "unauthenticated"]
KeyTotals = Tally[str]
"""The totals of one key: requests by outcome, `prompt_tokens`, `generated_tokens`."""


class AccessMetrics:
    """Requests by decision, and tokens by key. The label key_name is "" without a valid key."""

    def __init__(self, registry: CollectorRegistry, of_frontends: Path | None = None) -> None:
        """of_frontends: folder of the frontend processes' counters, which are added to those of this process"""
        self._summed: Collector | None = None
        if of_frontends is not None:
            own = CollectorRegistry(auto_describe=False)
            self._summed = ProcessCounters(own, of_frontends)
            registry.register(self._summed)
            registry = own
        self._requests = Counter(
            "llmbackend:api_requests",
            "Requests to endpoints that are not open to every client, by the decision of access control",
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

    def totals(self) -> dict[str, KeyTotals]:
        """Totals since the server's start, by name, of the keys that sent something."""
        found: defaultdict[str, KeyTotals] = defaultdict(KeyTotals)
        collectors = (self._requests, self._tokens) if self._summed is None else (self._summed,)
        for sample in total_samples(metric for collector in collectors for metric in collector.collect()):
            what = sample.labels.get("outcome") or f"{sample.labels['kind']}_tokens"
            found[sample.labels["key_name"]][what] += int(sample.value)
        return dict(found)

    def token_counters(self, account: Account) -> tuple[Counter, Counter]:
        """The counters of prompt and generated tokens. Call once per request: the lookup costs more than counting."""
        return self._tokens.labels(account.name, "prompt"), self._tokens.labels(account.name, "generated")


class RequestIdentity:
    """One HTTP request or RPC of a key. One prompt is charged to the rate limit before the body is read, the others
    once their number is known. Used by one thread at a time."""

    __slots__ = ("_is_decided", "_metrics", "_taken", "account", "protocol")

    def __init__(
        self, account: Account, protocol: Protocol, metrics: AccessMetrics, *, is_counted: bool = False
    ) -> None:
        """is_counted: another process has counted that the request was accepted"""
        self.account = account
        self.protocol: Protocol = protocol
        self._metrics = metrics
        self._taken = 0
        self._is_decided = is_counted

    def continuing(self) -> RequestIdentity:
        """The identity of a request that another host has charged, and that continues here."""
        continuing = RequestIdentity(self.account, self.protocol, self._metrics, is_counted=True)
        continuing._taken = sys.maxsize
        return continuing

    def take(self, prompts: int) -> Refusal | None:
        """Charges prompts in advance, all or none, so that `prompts` are charged in total."""
        if prompts <= self._taken:
            return None
        refusal = self.account.admit(prompts, self._taken)
        if refusal is None:
            self._taken = prompts
        if refusal is not None or not self._is_decided:
            self._is_decided = refusal is None
            self._metrics.decided(self.account, self.protocol, "accepted" if refusal is None else "rate_limited")
        return refusal

    def use(self, prompts: int) -> Refusal | None:
        """Uses prompts charged in advance, and charges missing ones. Each request of a stream uses its own."""
        if not self._taken:
            self._is_decided = False
        refusal = self.take(prompts)
        if refusal is None:
            self._taken -= prompts
        return refusal

    def give_back(self) -> None:
        """Refunds unused prompts, which another process will charge for the same request."""
        self.account.give_back(self._taken)
        self._taken = 0

    def token_counters(self) -> tuple[Counter, Counter]:
        return self._metrics.token_counters(self.account)


REQUEST_IDENTITY: Final[ContextVar[RequestIdentity | None]] = ContextVar("request_identity", default=None)


def body_owner(scope: Scope) -> str:
    """The client that a request's body is accounted to: its key, or its address."""
    identity = REQUEST_IDENTITY.get()
    return address_of(scope) if identity is None else f"key {identity.account.name}"
