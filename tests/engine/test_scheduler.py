"""The scheduler alone: what it plans, without a model."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.mock_engine import make_request
from tests.helpers.scheduler_harness import Harness, counted_lookups


def test_one_budget_is_filled_in_order_of_arrival() -> None:
    harness = Harness(budget=16)
    for name, length in (("a", 6), ("b", 6), ("c", 6)):
        harness.add(name, length)
    assert harness.step() == ({"a": 6, "b": 6, "c": 4}, {"a", "b"})
    assert harness.step() == ({"a": 1, "b": 1, "c": 2}, {"a", "b", "c"})
    assert harness.step() == ({"a": 1, "b": 1, "c": 1}, {"a", "b", "c"})


def test_a_long_prompt_is_chunked_and_decodes_go_first() -> None:
    harness = Harness(budget=8)
    harness.add("short", 3)
    harness.add("long", 20)
    assert harness.step() == ({"short": 3, "long": 5}, {"short"})
    assert harness.step() == ({"short": 1, "long": 7}, {"short"})
    assert harness.step() == ({"short": 1, "long": 7}, {"short"})
    assert harness.step() == ({"short": 1, "long": 1}, {"short", "long"})


def test_running_requests_that_the_budget_does_not_reach_wait_their_turn() -> None:
    harness = Harness(budget=2)
    for name in "abc":
        harness.add(name, 1)
    assert harness.step()[0] == {"a": 1, "b": 1}
    assert harness.step()[0] == {"a": 1, "b": 1}
    harness.scheduler.remove(harness.sequences["a"])
    assert harness.step()[0] == {"b": 1, "c": 1}


def test_priority_then_arrival() -> None:
    harness = Harness(budget=8, rows=2)
    harness.add("later", 2, priority=5)
    harness.add("sooner", 2, priority=-1)
    harness.add("middle", 2, priority=0)
    assert harness.step()[0] == {"sooner": 2, "middle": 2}


def test_blocks_are_reserved_for_the_chunk_alone() -> None:
    harness = Harness(budget=8, block_size=4)
    harness.add("a", 40)
    harness.step()
    assert harness.kv_cache.num_free_blocks == 98


def test_the_head_of_the_queue_waits_until_it_fits_and_is_not_overtaken() -> None:
    harness = Harness(budget=64, blocks=10, block_size=4)
    harness.add("a", 24)
    harness.add("big", 20)
    harness.add("small", 1)
    assert harness.step()[0] == {"a": 24}
    harness.scheduler.remove(harness.sequences["a"])
    assert harness.step()[0] == {"big": 20, "small": 1}


def test_a_prompt_is_not_begun_until_all_of_it_would_fit() -> None:
    harness = Harness(budget=8, blocks=10, block_size=4)
    harness.add("a", 8)
    harness.step()
    harness.add("long", 36)
    assert harness.step()[0] == {"a": 1}
    harness.scheduler.remove(harness.sequences["a"])
    assert [harness.step()[0] for _ in range(5)] == [{"long": 8}] * 4 + [{"long": 4}]
    assert harness.scheduler.num_preemptions == 0


def test_a_head_that_waits_for_blocks_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(budget=64, blocks=10, block_size=4)
    lookups = counted_lookups(harness.kv_cache, monkeypatch)
    harness.add("a", 24)
    harness.add("big", 20)
    for _ in range(8):
        assert "big" not in harness.step()[0]
    assert len(lookups) == 2, "one for each request"
    harness.scheduler.remove(harness.sequences["a"])
    assert harness.step()[0] == {"big": 20}


def test_the_last_running_request_is_preempted_and_goes_to_the_head_of_the_queue() -> None:
    harness = Harness(budget=32, blocks=4, block_size=4)
    harness.add("a", 8)
    harness.add("b", 7)
    assert harness.step()[0] == {"a": 8, "b": 7}
    harness.add("c", 1)
    chunks, _ = harness.step()
    assert chunks == {"a": 1}
    b = harness.sequences["b"]
    assert harness.scheduler.num_preemptions == 1
    assert b.row >= 0, "a preempted request keeps its row"
    assert harness.table.num_computed_tokens[b.row] == 0
    assert harness.table.num_tokens[b.row] == 8, "and its tokens"
    assert harness.scheduler.num_waiting == 2
    harness.scheduler.remove(harness.sequences["a"])
    assert harness.step()[0] == {"b": 8, "c": 1}


def test_a_step_that_preempted_admits_no_request() -> None:
    harness = Harness(budget=32, blocks=4, block_size=4)
    harness.add("a", 8)
    harness.add("b", 8)
    harness.step()
    harness.add("tiny but urgent", 1, priority=-1)
    assert harness.step()[0] == {"a": 1}
    assert harness.step()[0] == {"a": 1, "tiny but urgent": 1}


def test_the_least_important_request_is_preempted() -> None:
    harness = Harness(budget=32, blocks=4, block_size=4)
    harness.add("low", 8, priority=1)
    harness.add("high", 8, priority=0)
    assert harness.step()[0] == {"high": 8, "low": 8}
    assert harness.step()[0] == {"high": 1}


def test_a_request_that_outgrows_the_whole_pool_alone_is_refused() -> None:
    harness = Harness(budget=32, blocks=2, block_size=4)
    harness.add("a", 8)
    assert harness.step() == ({"a": 8}, {"a"})
    schedule = harness.scheduler.schedule()
    assert schedule.plan is None
    [(sequence, error)] = schedule.refused
    assert sequence is harness.sequences["a"]
    assert "9 tokens" in error and "3 KV blocks" in error and "at most 2" in error
    assert harness.kv_cache.num_free_blocks == 2
    assert harness.rows.num_free == 4


def test_rows_limit_how_many_run_and_a_row_is_reused() -> None:
    harness = Harness(rows=2)
    for name in "abc":
        harness.add(name, 2)
    assert set(harness.step()[0]) == {"a", "b"}
    row = harness.sequences["a"].row
    harness.scheduler.remove(harness.sequences["a"])
    assert set(harness.step()[0]) == {"b", "c"}
    assert harness.sequences["c"].row == row


def test_removal_in_every_state_frees_row_and_blocks() -> None:
    harness = Harness(budget=32, rows=4, blocks=4, block_size=4)
    harness.add("running", 8)
    harness.add("preempted", 8)
    harness.step()
    harness.add("waiting", 1)
    harness.step()
    for name in ("waiting", "preempted", "running"):
        harness.scheduler.remove(harness.sequences[name])
        harness.kv_cache.check()
        harness.rows.check()
    assert harness.kv_cache.num_free_blocks == 4
    assert harness.rows.num_free == 4
    assert harness.step() == ({}, set())


def test_a_request_that_the_runner_refuses_ends_and_its_row_stays_free() -> None:
    harness = Harness()
    harness.add_request(make_request("bad", logit_bias={9999: 1.0}))
    harness.add("good", 2)
    schedule = harness.scheduler.schedule()
    assert [(s.request.request_id, e) for s, e in schedule.refused] == [
        ("bad", "logit_bias names token 9999, expected 0 to 258")
    ]
    assert schedule.plan is not None and len(schedule.plan.rows) == 1
    assert harness.rows.num_free == 3
    harness.rows.check()


def test_the_plan_names_each_row_once_and_samples_where_a_chunk_reaches_the_end() -> None:
    harness = Harness(budget=7, rows=8, blocks=200)
    draw = np.random.default_rng(3)
    for i in range(8):
        harness.add(str(i), int(draw.integers(1, 20)))
    for _ in range(30):
        plan = harness.scheduler.schedule().plan
        assert plan is not None
        assert len(set(plan.rows.tolist())) == len(plan.rows)
        assert plan.num_scheduled_tokens.min() >= 1
        assert plan.num_tokens <= 7
        reach = harness.table.num_computed_tokens[plan.rows] + plan.num_scheduled_tokens
        assert (plan.sample_rows == (reach == harness.table.num_tokens[plan.rows])).all()
        harness.commit(plan)
