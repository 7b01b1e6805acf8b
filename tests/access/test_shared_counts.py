"""Counts and token buckets that several processes share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmbackend.frontends.access.rate_limit import Account, KeyShares, Limits
from llmbackend.frontends.shared_counts import Counts, LocalCounts, SharedCounts

ADDS = """
import sys
from pathlib import Path
from llmbackend.frontends.access.rate_limit import Account, Limits
from llmbackend.frontends.shared_counts import SharedCounts
counts = SharedCounts(Path(sys.argv[1]), int(sys.argv[2]))
account = Account("one", Limits(requests=1000), shared=counts)
admitted = 0
for _ in range(600):
    counts.add("all", 1)
    counts.add("brief", 1)
    admitted += account.admit() is None
    counts.add("brief", -1)
print(admitted)
"""
HOLDS = """
import sys
from pathlib import Path
from llmbackend.frontends.shared_counts import SharedCounts
counts = SharedCounts(Path(sys.argv[1]), 1)
with counts.lock:
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[int], SharedCounts]]:
    """The counts of four processes, as one of them has them."""
    path = tmp_path / "counts"
    made = [SharedCounts.create(path, 4)]

    def of(process: int) -> SharedCounts:
        made.append(SharedCounts(path, process))
        return made[-1]

    yield of
    for counts in made:
        counts.close()


def test_what_processes_count_at_once_adds_up(tmp_path: Path, opened: Callable[[int], SharedCounts]) -> None:
    command = [sys.executable, "-c", ADDS, str(tmp_path / "counts")]
    processes = [subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, text=True) for number in (1, 2, 3)]
    admitted = [int(process.communicate(timeout=60)[0]) for process in processes]
    counts = opened(0)
    assert counts.held("all") == 1800 and counts.held("brief") == 0
    assert 1000 <= sum(admitted) <= 1000 + 60 * 1000 / 60, "the bucket gains 17 a second meanwhile"
    counts.forget(2)
    assert counts.held("all") == 1200
    for number in (0, 1, 3):
        counts.forget(number)
    assert counts.held("all") == 0


@pytest.mark.parametrize("is_shared", [False, True])
def test_counts_of_one_process(is_shared: bool, opened: Callable[[int], SharedCounts]) -> None:
    counts: Counts = opened(1) if is_shared else LocalCounts()
    assert [counts.add(f"peer {number}", number) for number in range(300)] == [*range(300)]
    assert [counts.held(f"peer {number}") for number in (0, 7, 299, 300)] == [0, 7, 299, 0]
    counts.add("peer 7", -7)
    counts.add("peer 8", -1)
    assert (counts.held("peer 7"), counts.held("peer 8")) == (0, 7)


def test_a_bucket_stays_as_it_is_for_the_next_who_opens_it(opened: Callable[[int], SharedCounts]) -> None:
    first = Account("one", Limits(requests=2, tokens=10), shared=opened(1))
    assert first.admit() is None
    first.charge(30)
    second = Account("one", Limits(requests=2, tokens=10), shared=opened(2))
    requests, tokens = second.left()
    assert requests == 1 and tokens is not None and tokens < 0
    refusal = second.admit()
    assert refusal is not None and refusal.kind == "tokens"
    assert Account("one", Limits(requests=3), shared=opened(3)).left() == (3, None), "of another limit"


def test_a_key_s_share_is_that_of_all_processes(opened: Callable[[int], SharedCounts]) -> None:
    one, two = (KeyShares(opened(number)) for number in (1, 2))
    account = Account("one", Limits(concurrency=2))
    assert (one.enter(account), two.enter(account)) == (1, 2)
    assert one.held(account) == two.held(account) == 2
    one.leave(account)
    assert two.held(account) == 1


def test_nobody_waits_for_a_process_that_hangs_with_the_lock(
    tmp_path: Path, opened: Callable[[int], SharedCounts]
) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "counts")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        counts = opened(0)
        counts.add("one", 1)
        assert counts.held("one") == 1
        process.kill()


def test_a_name_without_room_is_not_counted_and_breaks_no_other_count(
    opened: Callable[[int], SharedCounts], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who counts in several names, as a connection in all and in those of its address, cannot go back from an error."""
    monkeypatch.setattr("llmbackend.frontends.shared_counts._digest", lambda name: name.encode().rjust(16, b"\0")[::-1])
    counts = opened(0)
    *names, last = [f"{number:02d}same" for number in range(65)]
    for name in (*names, last):
        counts.add(name, 1)
    assert [counts.held(name) for name in (names[3], last)] == [1, 0]
    assert "no record is free to count 64same" in caplog.text
    counts.add(names[3], -1)
    counts.add(last, -1)  # it was not counted
    counts.add(last, 1)
    assert [counts.held(name) for name in (names[3], names[4], last)] == [0, 1, 1]
