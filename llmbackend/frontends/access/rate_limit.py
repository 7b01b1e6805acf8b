"""Limits of one API key: requests and tokens per minute, as token buckets, and a share of the concurrent requests.

Invariant: the prompts of a request are admitted all or none, and only while at least one token is left. Source: the
fields of a refusal and the headers are those of OpenAI's API ("Rate limits").
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from llmbackend.core.messages import Tenant

from ..errors import LimitReachedError
from ..shared_counts import Counts, SharedCounts
from .permissions import Role

Kind = Literal["requests", "tokens"]
Clock = Callable[[], float]
_SHARE_OF: Final = "inferences of "
_SHORT: Final = {"requests": "RPM", "tokens": "TPM"}
_HEADERS: Final = {
    kind: tuple(f"x-ratelimit-{what}-{kind}".encode() for what in ("limit", "remaining", "reset")) for kind in _SHORT
}


@dataclass(frozen=True, slots=True)
class Limits:
    requests: int = 0
    """Prompts per minute; 0: no limit."""
    tokens: int = 0
    """Prompt and generated tokens per minute; 0: no limit."""
    concurrency: int = 0
    """Concurrent requests; 0: a share of the server's limit."""


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Refusal:
    kind: Kind
    limit: int
    """Units per minute."""
    retry_after_s: float
    """Time until the same request may be admitted."""
    asked: int = 1
    """Units of the request."""

    @property
    def retry_after(self) -> str:
        return str(max(math.ceil(self.retry_after_s), 1))

    def error(self) -> LimitReachedError:
        return LimitReachedError(self.message, self.retry_after, self.kind)

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


class Cell(Protocol):
    def read(self) -> tuple[float, float]:
        """The units of a bucket, and the time (s) at which it had them."""

    def write(self, units: float, at_s: float) -> None: ...


class _LocalCell:
    def __init__(self, units: float, at_s: float) -> None:
        self.write(units, at_s)

    def read(self) -> tuple[float, float]:
        return self._content

    def write(self, units: float, at_s: float) -> None:
        self._content = units, at_s


class Bucket:
    """A token bucket: holds up to `per_minute` units, and refills at that rate. Not thread-safe."""

    def __init__(self, per_minute: int, clock: Clock, cell: Cell | None = None) -> None:
        """cell: the state of a bucket that several processes share; they must also share the clock."""
        self.per_minute = per_minute
        self._clock = clock
        self._cell = cell or _LocalCell(per_minute, clock())

    def units(self) -> float:
        return self._changed(0)

    def take(self, units: int) -> None:
        self._changed(-units)

    def _changed(self, change: int) -> float:
        """The units after `change`, as of now."""
        (units, at_s), now_s = self._cell.read(), self._clock()
        units = min(units + (now_s - at_s) * self.per_minute / 60, self.per_minute) + change
        self._cell.write(units, now_s)
        return units

    def seconds_until(self, units: float) -> float:
        return max(units - self.units(), 0.0) * 60 / self.per_minute


class Account:
    """One key's role, tenant and limits, and how much of its limits is used. Thread-safe.

    Tokens are charged afterwards: their bucket may become negative, and admits nothing until it is positive again.
    """

    def __init__(
        self,
        name: str,
        limits: Limits,
        clock: Clock = time.monotonic,
        *,
        role: Role = Role.USER,
        owner: str = "",
        shares_caches: bool = False,
        shared: SharedCounts | None = None,
    ) -> None:
        """owner: under which the key's data is stored; "": its name
        shared: holds the buckets if several processes admit requests
        """
        self.name = name
        self.owner = owner or name
        self.limits = limits
        self.role = role
        self.tenant = Tenant(name, is_operator=role is Role.OPERATOR, cache_name="" if shares_caches else name)
        self.is_only_one = False
        """Whether the server has no other key."""
        self._lock: AbstractContextManager[Any] = threading.Lock() if shared is None else shared.lock
        self._requests = _bucket(name, "requests", limits.requests, clock, shared)
        self._tokens = _bucket(name, "tokens", limits.tokens, clock, shared)

    def admit(self, prompts: int = 1, taken: int = 0) -> Refusal | None:
        """Charges `prompts`, or returns a refusal. taken: how many were charged before; if any, tokens were checked,
        too"""
        with self._lock:
            refusal = _refusal("requests", self._requests, prompts, taken)
            if refusal is None and not taken:
                refusal = _refusal("tokens", self._tokens)
            if refusal is None and self._requests is not None:
                self._requests.take(prompts - taken)
            return refusal

    def give_back(self, prompts: int) -> None:
        """Undoes `admit`."""
        if self._requests is None:
            return
        with self._lock:
            self._requests.take(-prompts)

    def charge(self, tokens: int) -> None:
        if self._tokens is None:
            return
        with self._lock:
            self._tokens.take(tokens)

    def left(self) -> tuple[int | None, int | None]:
        """Remaining prompts and tokens; None: no limit. Tokens may be negative."""
        with self._lock:
            requests, tokens = (
                None if one is None else math.floor(one.units()) for one in (self._requests, self._tokens)
            )
        return requests, tokens

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's x-ratelimit-* headers for the key's limits."""
        with self._lock:
            return [*_headers("requests", self._requests), *_headers("tokens", self._tokens)]


def _bucket(name: str, kind: Kind, per_minute: int, clock: Clock, shared: SharedCounts | None) -> Bucket | None:
    """None: no limit. A shared bucket belongs to its limit: if the limit changes, a new, full bucket is used."""
    if not per_minute:
        return None
    cell = None if shared is None else shared.bucket(f"{kind} of {name}, {per_minute} per minute", per_minute)
    return Bucket(per_minute, clock, cell)


def _refusal(kind: Kind, bucket: Bucket | None, units: int = 1, taken: int = 0) -> Refusal | None:
    if bucket is None or (units <= bucket.per_minute and bucket.units() >= units - taken):
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
    """A duration in OpenAI's notation: `20ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    tenths = math.ceil(seconds * 10)
    minutes, rest = divmod(tenths, 600)
    text = f"{rest / 10:g}s"
    return f"{minutes}m{text}" if minutes else text


class KeyShares:
    """The open inferences of each key.

    If there are several keys, a key without a limit of its own may use at most as many requests as remain free: one
    busy key gets a half, two get a third each, and a new one always finds some capacity.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def check(self, account: Account, count: int, held: int, free: int) -> None:
        """Raises LimitReachedError if the key may not have `count` more than `held`. free: capacity left after them"""
        limit = account.limits.concurrency
        if limit and held + count > limit:
            raise LimitReachedError(f"API key '{account.name}' is at its limit of {limit} concurrent requests")
        if not limit and not account.is_only_one and held + count > free:
            raise LimitReachedError(
                f"API key '{account.name}' has reached its share of the server's concurrent requests: it has {held} "
                f"open and asks for {count} more, together more than would remain free for other keys"
            )

    def held(self, account: Account) -> int:
        return self._counts.held(_SHARE_OF + account.name)

    def enter(self, account: Account, count: int = 1) -> int:
        """Returns the key's number of open inferences afterwards."""
        return self._counts.add(_SHARE_OF + account.name, count)

    def leave(self, account: Account, count: int = 1) -> None:
        self._counts.add(_SHARE_OF + account.name, -count)
