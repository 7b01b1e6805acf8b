"""The identity of the current request: the account of its API key, and what of its rate limit it has taken.

For: the access checks, which set it; KeyedServer and InferenceGate, which read it. Does not know: protocols beyond
their names. Invariant: it is a context variable, which follows its request into every task and thread made for it, and
into no other request.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, Literal

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from starlette.types import Scope

from ..http.request_body import address_of
from .rate_limit import Account, Refusal


class ProcessCounters(Collector):
    def __init__(self, own: CollectorRegistry, folder: Path) -> None:
        """own: the counters of this process. folder: where the others have theirs."""
        self._own = own
        self._folder = str(folder)

    def collect(self) -> Iterator[Metric]:
        of_files: Any = MultiProcessCollector
        others = {family.name: family for family in of_files(None, self._folder).collect()}
        for family in self._own.collect():
            other = others.get(family.name)
            yield family if other is None else _sum(family, other)


def _sum(*families: Metric) -> Metric:
    first = families[0]
    total = Metric(first.name, first.documentation, first.type)
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for sample in _counted(families):
        key = sample.name, frozenset(sample.labels.items())
        values[key] = values.get(key, 0.0) + sample.value
    for (name, labels), value in values.items():
        total.add_sample(name, dict(labels), value)
    return total


def _counted(families: Iterable[Metric]) -> Iterator[Any]:
    return (sample for family in families for sample in family.samples if sample.name.endswith("_total"))


Protocol = Literal["http", "grpc"]
Outcome = Literal["accepted", "rate_limited", "restricted", "forbidden", "unauthenticated"]


KeyTotals = Tally[str]
"""What one key's requests came to: their number by outcome, `prompt_tokens`, `generated_tokens`."""


class AccessMetrics:
    """Requests by decision, and tokens by key. The label key_name is "" where there is no valid key."""

    def __init__(self, registry: CollectorRegistry, of_frontends: Path | None = None) -> None:
        """of_frontends: where frontend processes keep their counters, which are added to those of this process."""
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
        """Since the server's start, by key name; keys that sent nothing are left out."""
        found: defaultdict[str, KeyTotals] = defaultdict(KeyTotals)
        for sample in _samples(*((self._requests, self._tokens) if self._summed is None else (self._summed,))):
            what = sample.labels.get("outcome") or f"{sample.labels['kind']}_tokens"
            found[sample.labels["key_name"]][what] += int(sample.value)
        return dict(found)

    def token_counters(self, account: Account) -> tuple[Counter, Counter]:
        """The counters of prompt and of generated tokens. Looking them up costs more than counting, so a request does
        it once."""
        return self._tokens.labels(account.name, "prompt"), self._tokens.labels(account.name, "generated")


def _samples(*collectors: Collector) -> Iterator[Sample]:
    metrics = (metric for collector in collectors for metric in collector.collect())
    return (sample for metric in metrics for sample in metric.samples if sample.name.endswith("_total"))


class RequestIdentity:
    """One HTTP request or RPC of a key. Prompts are taken from the rate limit in two steps: `take_first` takes one
    before the body is read, `take` and `use` take the others once the body shows how many there are. One thread at a
    time uses it."""

    __slots__ = ("_is_decided", "_metrics", "_taken", "account", "protocol")

    def __init__(self, account: Account, protocol: Protocol, metrics: AccessMetrics) -> None:
        self.account = account
        self.protocol: Protocol = protocol
        self._metrics = metrics
        self._taken = 0
        self._is_decided = False

    def take_first(self) -> Refusal | None:
        """Takes the first prompt in advance, or returns why not."""
        return self.take(1)

    def take(self, prompts: int) -> Refusal | None:
        """Takes prompts in advance until `prompts` are taken in all, all or none."""
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
        """Uses prompts that were taken in advance, and takes those that are missing. Each request of a stream takes its
        own."""
        if not self._taken:
            self._is_decided = False
        refusal = self.take(prompts)
        if refusal is None:
            self._taken -= prompts
        return refusal

    def give_back(self) -> None:
        """Gives back what was taken in advance and not used: another process takes it for the same request."""
        self.account.give_back(self._taken)
        self._taken = 0

    def token_counters(self) -> tuple[Counter, Counter]:
        return self._metrics.token_counters(self.account)


REQUEST_IDENTITY: Final[ContextVar[RequestIdentity | None]] = ContextVar("request_identity", default=None)


def body_owner(scope: Scope) -> str:
    """The client that holds a request's body: its key, or its address where there are no keys."""
    identity = REQUEST_IDENTITY.get()
    return address_of(scope) if identity is None else f"key {identity.account.name}"
