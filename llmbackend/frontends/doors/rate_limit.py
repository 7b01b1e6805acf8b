"""What one API key may use: requests and tokens per minute, as token buckets; and on whose behalf it asks.

For: the doors. Does not know: keys, protocols. Invariants: a bucket never holds more than one minute's worth; prompts
are admitted together or not at all, and only while there is a token left; tokens are charged when they are known, after
the fact, so a bucket of tokens may fall below zero and then admits nobody until it has filled up again. Any thread may
charge.
Source: the fields of a refusal and the headers are those of OpenAI's API ("Rate limits").
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from llmbackend.core.tenants import Tenant

from .roles import Role

Kind = Literal["requests", "tokens"]
Clock = Callable[[], float]
_SHORT: Final = {"requests": "RPM", "tokens": "TPM"}
_HEADERS: Final = {
    kind: tuple(f"x-ratelimit-{what}-{kind}".encode() for what in ("limit", "remaining", "reset")) for kind in _SHORT
}


@dataclass(frozen=True, slots=True)
class Limits:
    """requests (counted in prompts) and tokens are per minute, 0 = no limit. concurrency: requests at once, 0 = the
    key's share of the server's."""

    requests: int = 0
    tokens: int = 0
    concurrency: int = 0


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Which limit was reached, and in how many seconds a request may be admitted again. `asked`: how many units it
    wanted at once."""

    kind: Kind
    limit: int
    retry_after_s: float
    asked: int = 1

    @property
    def retry_after(self) -> str:
        """The value of a Retry-After header."""
        return str(max(math.ceil(self.retry_after_s), 1))

    @property
    def message(self) -> str:
        if self.asked > self.limit:
            return (
                f"Request too large for {self.kind} per minute ({_SHORT[self.kind]}): limit {self.limit}, requested "
                f"{self.asked}. Each prompt counts: send fewer in one request."
            )
        return (
            f"Rate limit reached for {self.kind} per minute ({_SHORT[self.kind]}): limit {self.limit}. "
            f"Please try again in {duration(self.retry_after_s)}."
        )


class Bucket:
    """Holds up to `per_minute` units and gains them evenly over time. Its owner keeps other threads out."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._units = float(per_minute)
        self._filled_at_s = clock()

    def units(self) -> float:
        now_s = self._clock()
        gained = (now_s - self._filled_at_s) * self.per_minute / 60
        self._units = min(self._units + gained, self.per_minute)
        self._filled_at_s = now_s
        return self._units

    def take(self, units: int) -> None:
        self._units = self.units() - units

    def seconds_until(self, units: float) -> float:
        return max(units - self.units(), 0.0) * 60 / self.per_minute


class Account:
    """The limits of one key, and what is left of them. `is_only_one`: the server has no other key."""

    def __init__(
        self,
        name: str,
        limits: Limits,
        clock: Clock = time.monotonic,
        *,
        role: Role = Role.USER,
        shares_caches: bool = False,
    ) -> None:
        self.name = name
        self.limits = limits
        self.role = role
        self.tenant = Tenant(name, is_operator=role is Role.OPERATOR, cache_name="" if shares_caches else name)
        self.is_only_one = False
        self._lock = threading.Lock()
        self._requests = Bucket(limits.requests, clock) if limits.requests else None
        self._tokens = Bucket(limits.tokens, clock) if limits.tokens else None

    def admit(self, prompts: int = 1, paid: int = 0) -> Refusal | None:
        """Takes that many prompts, or says why not. `paid`: how many of them were taken before; they opened the way for
        the others, as far as tokens go."""
        with self._lock:
            refusal = _refusal("requests", self._requests, prompts, paid)
            if refusal is None and not paid:
                refusal = _refusal("tokens", self._tokens)
            if refusal is None and self._requests is not None:
                self._requests.take(prompts - paid)
            return refusal

    def charge(self, tokens: int) -> None:
        if self._tokens is None:
            return
        with self._lock:
            self._tokens.take(tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's x-ratelimit-* headers, for the limits there are."""
        with self._lock:
            return [*_headers("requests", self._requests), *_headers("tokens", self._tokens)]


def _refusal(kind: Kind, bucket: Bucket | None, units: int = 1, paid: int = 0) -> Refusal | None:
    if bucket is None or (units <= bucket.per_minute and bucket.units() >= units - paid):
        return None
    return Refusal(kind, bucket.per_minute, bucket.seconds_until(min(units, bucket.per_minute)), units)


def _headers(kind: Kind, bucket: Bucket | None) -> list[tuple[bytes, bytes]]:
    if bucket is None:
        return []
    limit, remaining, reset = _HEADERS[kind]
    units, full = bucket.units(), bucket.per_minute
    return [
        (limit, b"%d" % full),
        (remaining, b"%d" % max(units, 0)),
        (reset, duration((full - units) * 60 / full).encode()),
    ]


def duration(seconds: float) -> str:
    """As OpenAI writes one: `20ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    tenths = math.ceil(seconds * 10)
    minutes, rest = divmod(tenths, 600)
    text = f"{rest / 10:g}s"
    return f"{minutes}m{text}" if minutes else text
