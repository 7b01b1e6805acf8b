"""How many inferences each API key has open, and how many it may have.

For: InferenceGate, which asks before each inference. Does not know: requests. Invariant: while there are several keys,
a key without a limit of its own holds no more than what is free, so that no key, and no number of them, takes all: one
busy key gets a half, two get a third each, and a new one always finds room.
"""

from __future__ import annotations

from collections import Counter

from llmbackend.frontends.limits import LimitReachedError

from .rate_limit import Account


class KeyShares:
    """Used on the event loop alone."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    def check(self, account: Account, count: int, free: int) -> None:
        """Raises LimitReachedError when `count` more would be too many for the key. `free`: what would be left."""
        held, limit = self._held[account.name], account.limits.concurrency
        if limit and held + count > limit:
            raise LimitReachedError(f"API key '{account.name}' is at its limit of {limit} concurrent requests")
        if not limit and not account.is_only_one and held + count > free:
            raise LimitReachedError(
                f"API key '{account.name}' is at its share of the server's concurrent requests: it has {held}, asked "
                f"for {count} more, and must leave as many free as it has"
            )

    def enter(self, account: Account) -> None:
        self._held[account.name] += 1

    def leave(self, account: Account) -> None:
        self._held[account.name] -= 1
        if not self._held[account.name]:
            del self._held[account.name]
