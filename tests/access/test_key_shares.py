"""One key's share of the requests that the server runs at once."""

from __future__ import annotations

from random import Random

import pytest

from llmbackend.frontends.access.rate_limit import Account, KeyShares, Limits
from llmbackend.frontends.errors import LimitReachedError
from llmbackend.frontends.shared_counts import LocalCounts

MOST = 120


class Room:
    """What a gate does around the shares."""

    def __init__(self) -> None:
        self.shares = KeyShares(LocalCounts())
        self.open = 0

    def enter(self, account: Account) -> bool:
        if self.open + 1 > MOST:
            return False
        try:
            self.shares.check(account, 1, self.shares.held(account), MOST - self.open - 1)
        except LimitReachedError:
            return False
        self.shares.enter(account)
        self.open += 1
        return True

    def leave(self, account: Account) -> None:
        self.shares.leave(account)
        self.open -= 1

    def fill(self, *accounts: Account) -> list[int]:
        """All keys ask in turns until none is admitted; returns how many each got."""
        got = [0] * len(accounts)
        while any(entered := [self.enter(account) for account in accounts]):
            got = [count + one for count, one in zip(got, entered, strict=True)]
        return got


def accounts(*limits: int) -> list[Account]:
    return [Account(f"k{number}", Limits(concurrency=limit)) for number, limit in enumerate(limits)]


def test_one_key_gets_a_half_and_later_keys_still_find_room() -> None:
    room = Room()
    first, second, third = accounts(0, 0, 0)
    assert room.fill(first) == [60]
    assert room.fill(second) == [30] and room.fill(third) == [15]


def test_busy_keys_get_equal_shares() -> None:
    assert Room().fill(*accounts(0, 0)) == [40, 40]
    assert Room().fill(*accounts(0, 0, 0)) == [30, 30, 30]


def test_a_limit_of_its_own_stands_in_place_of_the_share() -> None:
    room = Room()
    small, large, other = accounts(5, 100, 0)
    assert room.fill(small, large, other) == [5, 77, 38]
    for _ in range(5):
        room.leave(small)
    assert room.fill(small) == [5]


def test_a_servers_only_key_may_use_all_of_it() -> None:
    (alone,) = accounts(0)
    alone.is_only_one = True
    assert Room().fill(alone) == [MOST]


def test_several_at_once_enter_together_or_not_at_all() -> None:
    shares, (account,) = KeyShares(LocalCounts()), accounts(0)
    shares.check(account, 60, 0, MOST - 60)
    with pytest.raises(LimitReachedError, match=r"'k0' has reached its share .* it has 0 open and asks for 61 more"):
        shares.check(account, 61, 0, MOST - 61)


def test_a_key_without_requests_always_gets_one() -> None:
    choose, room, keys = Random(7), Room(), accounts(0, 0, 0, 0)
    held = dict.fromkeys(keys[:3], 0)
    for _ in range(3000):
        key = choose.choice(keys[:3])
        if held[key] and choose.random() < 0.4:
            room.leave(key)
            held[key] -= 1
        else:
            held[key] += room.enter(key)
        assert room.enter(keys[3])
        room.leave(keys[3])
    for key, count in held.items():
        for _ in range(count):
            room.leave(key)
    assert room.open == 0 and not any(map(room.shares.held, keys))
