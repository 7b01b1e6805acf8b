"""What one API key may use: requests and tokens per minute, as token buckets, and a share of the concurrent requests.

For: the access checks and InferenceGate. Does not know: keys, protocols. Invariant: prompts are admitted together or
not at all, and only while there is a token left.
Source: the fields of a refusal and the headers are those of OpenAI's API ("Rate limits").
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from llmbackend.core.messages import Tenant

from ..errors import LimitReachedError
from ..shared_counts import Counts
from .permissions import Role

if TYPE_CHECKING:
    from ..shared_counts import SharedCounts

Kind = Literal["requests", "tokens"]
Clock = Callable[[], float]
_SHARE_OF: Final = "inferences of "
_SHORT: Final = {"requests": "RPM", "tokens": "TPM"}
_HEADERS: Final = {
    kind: tuple(f"x-ratelimit-{what}-{kind}".encode() for what in ("limit", "remaining", "reset")) for kind in _SHORT
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one API key."""

    requests: int = 0
    """Prompts per minute; 0: no limit."""
    tokens: int = 0
    """Per minute, prompt and generated together; 0: no limit."""
    concurrency: int = 0
    """Requests at once; 0: a share of the server's."""


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not admitted."""

    kind: Kind
    limit: int
    """Units per minute."""
    retry_after_s: float
    """When the same request may be admitted."""
    asked: int = 1
    """How many units it wanted at once."""

    @property
    def retry_after(self) -> str:
        """The value of a Retry-After header."""
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
    """What a bucket held, and when."""

    units: float
    at_s: float


@dataclass(slots=True)
class _LocalCell:
    units: float
    at_s: float


class Bucket:
    """Holds up to `per_minute` units, one minute's worth, and gains them evenly over time. Not thread-safe."""

    def __init__(self, per_minute: int, clock: Clock, cell: Cell | None = None) -> None:
        """cell: of a bucket that processes share; `clock` is then that of all of them."""
        self.per_minute = per_minute
        self._clock = clock
        self._cell = cell or _LocalCell(per_minute, clock())

    def units(self) -> float:
        now_s, cell = self._clock(), self._cell
        gained = (now_s - cell.at_s) * self.per_minute / 60
        cell.units = units = min(cell.units + gained, self.per_minute)
        cell.at_s = now_s
        return units

    def take(self, units: int) -> None:
        self._cell.units = self.units() - units

    def seconds_until(self, units: float) -> float:
        return max(units - self.units(), 0.0) * 60 / self.per_minute


class Account:
    """One key's role, tenant and limits, and what is left of the limits. Thread-safe.

    Tokens are charged when they are known, after the fact: their bucket may fall below zero, and then admits nothing
    until it has filled up again."""

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
        """owner: as whose the server stores what the key makes; "" = the name
        shared: where the buckets are, if several processes admit requests
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
        """Takes `prompts`, or returns why not. `taken`: how many of them were taken before; if any were, the tokens
        have been checked already."""
        with self._lock:
            refusal = _refusal("requests", self._requests, prompts, taken)
            if refusal is None and not taken:
                refusal = _refusal("tokens", self._tokens)
            if refusal is None and self._requests is not None:
                self._requests.take(prompts - taken)
            return refusal

    def give_back(self, prompts: int) -> None:
        """Of those that `admit` took."""
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
        """Prompts and tokens that it has left now; None without such a limit. Tokens may be below zero."""
        with self._lock:
            requests, tokens = (
                None if one is None else math.floor(one.units()) for one in (self._requests, self._tokens)
            )
        return requests, tokens

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's x-ratelimit-* headers, for the limits that the key has."""
        with self._lock:
            return [*_headers("requests", self._requests), *_headers("tokens", self._tokens)]


def _bucket(name: str, kind: Kind, per_minute: int, clock: Clock, shared: SharedCounts | None) -> Bucket | None:
    """None without a limit. A bucket belongs to its limit: where that changes, a new one is full."""
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
    """In OpenAI's form: `20ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    tenths = math.ceil(seconds * 10)
    minutes, rest = divmod(tenths, 600)
    text = f"{rest / 10:g}s"
    return f"{minutes}m{text}" if minutes else text


class KeyShares:
    """How many inferences each key has open.

    While there are several keys, one without a limit of its own holds no more than what is free: one busy key gets a
    half, two get a third each, and a new one always finds room."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def check(self, account: Account, count: int, free: int) -> None:
        """Raises LimitReachedError when `count` more would be too many for the key. `free`: how many more the server
        could take after them."""
        held, limit = self.held(account), account.limits.concurrency
        if limit and held + count > limit:
            raise LimitReachedError(f"API key '{account.name}' is at its limit of {limit} concurrent requests")
        if not limit and not account.is_only_one and held + count > free:
            raise LimitReachedError(
                f"API key '{account.name}' is at its share of the server's concurrent requests: it has {held}, asked "
                f"for {count} more, but must leave as many free as it has"
            )

    def held(self, account: Account) -> int:
        """How many inferences the key has open."""
        return self._counts.held(_SHARE_OF + account.name)

    def enter(self, account: Account, count: int = 1) -> None:
        self._counts.add(_SHARE_OF + account.name, count)

    def leave(self, account: Account, count: int = 1) -> None:
        self._counts.add(_SHARE_OF + account.name, -count)
