"""Which engine takes which request: prefixes, room, waits that end, and the order of the queue."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from llmbackend.adapter.tasks.placement import (
    MAX_WAIT_S,
    REQUEST_TOKENS,
    WAKE_S,
    Placement,
    PlacementState,
    PrefixIndex,
)
from llmbackend.adapter.tasks.task_map import EngineAssignment, TaskMap
from llmbackend.engine.messages import BlockChanges, StepOutput
from llmbackend.waiting.queue_policy import QueuePolicies
from tests.adapter.test_task_map import make_task

BLOCK_TOKENS = 16
LONG = range(100, 100 + 8 * REQUEST_TOKENS // BLOCK_TOKENS)
"""Hashes of a text that outweighs eight requests."""


class Model:
    """A TaskMap whose engines have the room that the test says."""

    def __init__(self, *rooms: int, prompt_token_s: float = 1e-4) -> None:
        self.index = PrefixIndex()
        placement = Placement(self.index)
        placement.block_size = BLOCK_TOKENS
        for _ in range(100):
            placement.prompt_computed(1000, 1000 * prompt_token_s)
        self.tasks = TaskMap(QueuePolicies(levels=2, default_level=2), 1000, placement)
        self.rooms = list(rooms)
        self.engines = [EngineAssignment(lambda: None, self._room_of(i), 1 << i) for i in range(len(rooms))]

    def _room_of(self, engine: int) -> Any:
        return lambda: self.rooms[engine]

    def queue(self, name: str, hashes: Sequence[int] = (), priority: int = 2) -> Any:
        task = make_task(name, priority)
        task.placement = PlacementState(hashes)
        assert self.tasks.admit(task) == ""
        self.tasks.enqueue(task)
        return task

    def has(self, engine: int, hashes: Sequence[int]) -> None:
        self.index.apply(1 << engine, BlockChanges(array("Q", hashes).tobytes()))

    def take(self, engine: int, now_s: float = 1.0, ready: Sequence[int] | None = None) -> list[str]:
        ready = range(len(self.engines)) if ready is None else ready
        taken = self.tasks.take(
            self.engines[engine], self.rooms[engine], [self.engines[one] for one in ready], int(now_s * 1e9)
        )
        self.rooms[engine] -= len(taken)
        return [task.request_id for task in taken]

    def look_again_s(self, engine: int) -> float:
        return self.engines[engine].look_again_ns / 1e9


def test_a_request_goes_to_the_engine_with_its_longest_prefix() -> None:
    model = Model(10, 10, 10)
    model.has(0, LONG[:40])
    model.has(1, LONG[:80])
    model.queue("a", LONG)
    assert [model.take(engine) for engine in (0, 2, 1)] == [[], [], ["a"]]


def test_room_outweighs_a_short_prefix_and_a_long_one_outweighs_room() -> None:
    blocks = REQUEST_TOKENS // BLOCK_TOKENS
    model = Model(10, 13)
    model.has(0, LONG)
    model.queue("short", LONG[: 2 * blocks])
    model.queue("long", LONG[: 5 * blocks])
    assert model.take(0) == ["long"]
    assert model.take(1) == ["short"]


def test_requests_without_a_prefix_are_spread_by_room() -> None:
    model = Model(2, 4)
    for name in "abcdef":
        model.queue(name)
    assert model.take(0) == ["c", "e"]
    assert model.take(1) == ["a", "b", "d", "f"]


def test_requests_that_came_together_with_one_new_beginning_go_together() -> None:
    model = Model(10, 10)
    for name in "abc":
        model.queue(name, LONG)
    assert model.take(0) == ["a", "b", "c"]
    assert model.take(1) == []


def test_what_an_engine_was_to_compute_is_forgotten_when_its_request_ends() -> None:
    model = Model(10, 10)
    model.queue("a", LONG)
    assert model.take(0) == ["a"]
    model.tasks.pop("a")
    model.rooms = [9, 10]
    model.queue("b", LONG)
    assert (model.take(0), model.take(1)) == ([], ["b"])
    model.tasks.record_outputs(model.engines[1], [StepOutput("b", (1,))])  # it told what it has before this
    assert model.index.longest(3, LONG) == (0, 3)


def test_a_full_engine_is_waited_for_as_long_as_its_prefix_takes_to_compute() -> None:
    model = Model(1, 0, prompt_token_s=1e-4)
    model.has(1, LONG)
    model.queue("a", LONG)
    wait_s = (len(LONG) * BLOCK_TOKENS - REQUEST_TOKENS) * 1e-4
    assert model.take(0, 5.0) == []
    assert model.look_again_s(0) == pytest.approx(5.0 + wait_s, rel=1e-3)
    assert model.take(0, 5.0 + 0.99 * wait_s) == []
    assert model.take(0, 5.0 + 1.01 * wait_s) == ["a"]


def test_an_engine_with_room_is_waited_for_until_it_must_have_woken_up() -> None:
    model = Model(1, 1, prompt_token_s=1e-9)
    model.has(1, LONG)
    model.queue("a", LONG)
    assert model.take(0, 5.0) == []
    assert model.take(0, 5.0 + 0.99 * WAKE_S) == []
    assert model.take(0, 5.0 + 1.01 * WAKE_S) == ["a"]


def test_no_request_waits_longer_whatever_becomes_of_its_prefix() -> None:
    """The best place changes all the time, and never has room."""
    model = Model(1, 0, 0, prompt_token_s=1.0)
    model.queue("a", LONG)
    now_s, turn, taken = 5.0, 0, list[str]()
    while not taken:
        model.index.forget(0b110)
        model.has(1 + turn % 2, LONG)
        taken = model.take(0, now_s)
        now_s, turn = now_s + 0.01, turn + 1
    assert now_s < 5.0 + MAX_WAIT_S + 0.05


def test_an_engine_that_is_not_ready_is_not_waited_for() -> None:
    model = Model(5, 5, 5)
    model.has(1, LONG)
    model.queue("a", LONG)
    assert model.take(0, ready=(0, 2, 1)) == []
    assert model.take(0, ready=(0, 2)) == ["a"]


def test_those_that_wait_hold_nobody_up_and_keep_their_order() -> None:
    model = Model(5, 0, prompt_token_s=1e-4)
    model.has(1, LONG)
    for name in ("w1", "w2"):
        model.queue(name, LONG)
    for name in "abc":
        model.queue(name)
    assert model.take(0) == ["a", "b", "c"]
    model.rooms[1] = 1
    assert model.take(1) == ["w1"]
    assert model.take(0, now_s=3.0) == ["w2"]


def test_priorities_go_first_wherever_prefixes_are() -> None:
    model = Model(3, 0)
    model.has(0, LONG)
    for name in ("low1", "low2", "low3"):
        model.queue(name, LONG)
    for name in ("high1", "high2"):
        model.queue(name, priority=1)
    assert model.take(0) == ["high1", "high2", "low1"]


def test_what_lost_its_engine_goes_to_the_first_with_room_and_a_suspect_alone() -> None:
    model = Model(5, 5, 5)
    model.has(1, LONG)
    lost = [model.queue(name, LONG) for name in ("a", "b")]
    assert model.take(1) == ["a", "b"]
    model.tasks.engine_died(model.engines[1], ["a", "b"], "signal", 7)
    assert all(task.is_suspect for task in lost)
    assert model.take(0) == ["a"]
    assert model.take(2) == ["b"]
    model.queue("c", LONG)
    model.has(0, LONG)
    assert model.take(0) == [], "it has a suspect"
    assert model.take(1) == ["c"], "an engine with a suspect has no room for others"


def test_the_index_forgets_an_engine_and_keeps_the_others() -> None:
    index = PrefixIndex()
    for engine, hashes in ((1, LONG), (4, LONG[:50])):
        index.apply(engine, BlockChanges(array("Q", hashes).tobytes()))
    assert index.longest(5, LONG) == (len(LONG), 1)
    index.forget(1)
    assert (index.longest(5, LONG), len(index), index.blocks_of(1)) == ((50, 4), 50, set())
    assert (index.num_blocks(1), index.num_blocks(4)) == (0, 50)
    index.apply(4, BlockChanges(array("Q", LONG[:9]).tobytes(), b"", True))
    assert (index.longest(5, LONG), len(index), index.num_blocks(4)) == ((9, 4), 9, 9)


def test_of_equals_the_one_with_the_emptier_cache_takes_it() -> None:
    model = Model(3, 3, 3)
    model.has(0, LONG)
    model.has(2, LONG[:5])
    model.queue("a")
    assert [model.take(engine) for engine in (0, 2, 1)] == [[], [], ["a"]]


def test_of_many_engines_the_one_with_the_prefix_is_found() -> None:
    model = Model(*[5] * 40)
    model.has(33, LONG)
    model.queue("a", LONG)
    assert (model.take(7), model.take(33)) == ([], ["a"])
    model.has(12, LONG)
    model.rooms[33] = 0
    model.queue("b", LONG)
    assert (model.take(7), model.take(12)) == ([], ["b"])


class _Interrupted(list[int]):
    """Hashes, during whose last look-up another thread has its turn."""

    def __init__(self, hashes: Sequence[int], num_lookups: int, others: Callable[[], None]) -> None:
        super().__init__(hashes)
        self._num_lookups = num_lookups
        self._others = others

    def __getitem__(self, index: Any) -> Any:
        self._num_lookups -= 1
        if not self._num_lookups:
            self._others()
        return super().__getitem__(index)


def test_a_prefix_that_is_forgotten_while_it_is_looked_up_is_nowhere() -> None:
    turns = range(1, 30)
    for turn in turns:
        model = Model(*[5] * 40)
        model.has(33, LONG)
        hashes = _Interrupted(LONG, turn, lambda model=model: model.index.forget(1 << 33))  # type: ignore[misc]
        num_blocks, holders = model.index.longest((1 << 40) - 1, hashes)
        assert holders and (holders == 1 << 33 if num_blocks else holders == (1 << 40) - 1)
        model.has(33, LONG)
        hashes = _Interrupted(LONG, turn, lambda model=model: model.index.forget(1 << 33))  # type: ignore[misc]
        model.queue("a", hashes)
        assert set(model.take(7)) <= {"a"}
