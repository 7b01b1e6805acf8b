"""What an engine says of its prefix cache is exactly what its prefix cache finds, whatever became of the requests."""

from __future__ import annotations

import random
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from llmbackend.adapter.tasks.placement import PrefixIndex
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.memory.prefix_cache import BlockJournal, PrefixCache, numbers, prefix_hashes
from llmbackend.engine.messages import BlockChanges, InferRequest
from tests.helpers.mock_engine import FaultyRunner, Outcomes, make_core, make_request

BLOCK = 4
ENGINE = 1


class Follower:
    """A host's index of one engine."""

    def __init__(self) -> None:
        self._index = PrefixIndex()

    def take(self, changes: BlockChanges | None) -> None:
        if changes is None:
            return
        stored, removed = set(numbers(changes.stored)), set(numbers(changes.removed))
        assert not stored & removed
        if not changes.is_snapshot:
            assert not stored & self.blocks, "a block that is known is stored again"
            assert removed <= self.blocks, "a block that is not known is removed"
        self._index.apply(ENGINE, changes)

    @property
    def blocks(self) -> set[int]:
        blocks = self._index.blocks_of(ENGINE)
        assert self._index.num_blocks(ENGINE) == len(blocks)
        return blocks


def found(core: EngineCore, requests: list[InferRequest], outcomes: Outcomes) -> set[int]:
    """The oracle: the blocks that each text so far would find, were it asked for now."""
    blocks: set[int] = set()
    for request in requests:
        text = (*request.prompt_token_ids, *outcomes[request.request_id].token_ids, 0)
        prefix = core._kv_cache.find(np.array(text, np.int32), request.prefix_salt)
        blocks |= set(prefix_hashes(request.prefix_salt, text, BLOCK)[: len(prefix.blocks)])
    return blocks


def random_request(draw: random.Random, number: int) -> InferRequest:
    """One of few beginnings, some of which make a row fail; sometimes of another tenant or with a salt."""
    first = draw.choice([1, 2, 3, FaultyRunner.POISON, FaultyRunner.NAN])
    prompt = [first, *(draw.choice([7, 8]) for _ in range(draw.randrange(3))), *[9] * draw.randrange(24)]
    request = make_request(f"r{number}", prompt, max_tokens=draw.randrange(1, 20), priority=draw.randrange(2))
    return msgspec.structs.replace(
        request, tenant=draw.choice(["", "", "t"]), cache_salt=draw.choice(["", "", "", "s"])
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_host_kv_blocks", [0, 5])
def test_the_index_has_what_the_cache_finds_after_each_step(seed: int, num_host_kv_blocks: int) -> None:
    """Few blocks, so that texts are evicted, preempted and moved to host memory all the time."""
    draw = random.Random(seed)
    core = make_core(
        FaultyRunner, block_size=BLOCK, num_kv_blocks=16, max_num_seqs=5, max_model_len=64,
        max_num_batched_tokens=24, num_host_kv_blocks=num_host_kv_blocks,
    )  # fmt: skip
    first, second = Follower(), Follower()
    requests: list[InferRequest] = []
    outcomes = Outcomes()
    joins_at = draw.randrange(60)
    core.prefixes.publish(True)
    for turn in range(120):
        if turn == joins_at:
            core.prefixes.publish(True)
        if draw.random() < 0.5:
            requests.append(random_request(draw, len(requests)))
            core.add(requests[-1])
        if requests and draw.random() < 0.1:
            core.abort(draw.choice(requests).request_id)
        if core.has_work:
            result = outcomes.add(core.step())
            first.take(result.blocks)
            if turn >= joins_at:
                second.take(result.blocks)
        core.check()
        assert first.blocks == found(core, requests, outcomes)
        assert turn < joins_at or second.blocks == first.blocks
    assert core._scheduler.num_preemptions, "the test has no preemptions"
    assert core._stats().num_reloaded_blocks or not num_host_kv_blocks
    core.close()


def test_what_was_cached_before_anyone_asked_is_told_and_nothing_afterwards() -> None:
    core = make_core(block_size=BLOCK, num_kv_blocks=16)
    request = make_request("a", range(10, 30), max_tokens=3)
    follower, outcomes = Follower(), Outcomes()
    core.add(request)
    while core.has_work:
        assert outcomes.add(core.step()).blocks is None
    core.prefixes.publish(True)
    assert core.has_work
    follower.take(core.step().blocks)
    assert follower.blocks == found(core, [request], outcomes) != set()
    core.prefixes.publish(False)
    core.add(make_request("b", range(50, 70)))
    while core.has_work:
        assert core.step().blocks is None
    core.close()


def test_an_engine_without_a_prefix_cache_has_no_blocks_to_tell_of() -> None:
    core = make_core(block_size=BLOCK, num_kv_blocks=16, enable_prefix_caching=False)
    core.prefixes.publish(True)
    core.add(msgspec.structs.replace(make_request("a", range(10, 30)), prefix_group="g"))
    snapshot, *others = [core.step().blocks for _ in iter(lambda: core.has_work, False)]
    assert snapshot == BlockChanges(is_snapshot=True)
    assert not any(others)
    core.close()


def test_blocks_behind_a_forgotten_one_are_not_found_until_they_are_computed_again() -> None:
    cache, journal = PrefixCache(8), BlockJournal()
    cache.set_journal(journal)
    one = cache.register(("",), b"1111", 0)
    two = cache.register(one, b"2222", 1)
    cache.register(two, b"3333", 2)
    beside = cache.register(one, b"4444", 3)
    changes = journal.take()
    assert changes is not None and len(numbers(changes.stored)) == 4
    cache.forget(1)
    changes = journal.take()
    assert changes is not None and (len(numbers(changes.stored)), len(numbers(changes.removed))) == (0, 2)
    cache.register(one, b"2222", 4)
    changes = journal.take()
    assert changes is not None and (len(numbers(changes.stored)), len(numbers(changes.removed))) == (1, 0)
    cache.forget(2)  # it was behind the forgotten one
    assert journal.take() is None
    cache.forget(0)
    cache.register(beside, b"5555", 5)
    changes = journal.take()
    assert changes is not None and (len(numbers(changes.stored)), len(numbers(changes.removed))) == (0, 3)


def test_hashes_are_the_same_in_every_process_and_depend_on_all_before() -> None:
    salt, text = ("tenant", "", "ä"), list(range(1000, 1050))
    code = (
        "from llmbackend.engine.memory.prefix_cache import prefix_hashes\n"
        f"print(list(prefix_hashes({salt!r}, {text!r}, 16)))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    hashes = list(prefix_hashes(salt, text, 16))
    assert printed.stdout == f"{hashes}\n"
    assert len(hashes) == 3
    assert prefix_hashes(salt, text[:48], 16).tolist() == hashes[:2], "the last token is never found"
    changed = prefix_hashes(salt, [0, *text[1:]], 16)
    assert not set(changed) & set(hashes)
    assert not set(prefix_hashes(("tenantä", "", ""), text, 16)) & set(hashes)
    assert not set(prefix_hashes(("", "tenant", "ä"), text, 16)) & set(hashes)
