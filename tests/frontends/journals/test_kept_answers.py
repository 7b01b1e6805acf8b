"""What a server keeps for clients that come back: never more than its bound, and as long as it says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest

from llmbackend.frontends.journals.journal import EventsGoneError, Journal
from llmbackend.frontends.journals.kept_answers import KeptAnswer, KeptAnswers


@dataclass(eq=False, slots=True, kw_only=True)
class Other(KeptAnswer):
    """Another kind."""


def kept(key: str, kind: type[KeptAnswer] = KeptAnswer, **more: float) -> KeptAnswer:
    return kind(owner="", key=key, journal=Journal(1000), **more)  # type: ignore[arg-type]


async def pieces_of(answer: KeptAnswer) -> list[bytes]:
    return [part async for events in answer.journal.follow() for part in events.parts]


@pytest.mark.parametrize("seed", range(20))
async def test_all_kinds_together_stay_within_the_bound(seed: int) -> None:
    random, store, all_answers = Random(seed), KeptAnswers(60, max_bytes=2000), list[KeptAnswer]()
    for number in range(300):
        running = [one for one in all_answers if one.is_listed and not one.journal.has_ended]
        match random.choice(("add", "publish", "publish", "publish", "end", "forget")):
            case "add" if store.has_capacity():
                request_bytes = random.choice((0, 0, 20))
                all_answers.append(kept(str(number), random.choice((KeptAnswer, Other)), request_bytes=request_bytes))
                store.add(all_answers[-1])
            case "publish" if running:
                store.publish(random.choice(running), [bytes(random.randint(1, 120))])
            case "end" if running:
                store.end(random.choice(running))
            case "forget" if all_answers:
                store.forget(random.choice(all_answers))
        listed = [*store.all(KeptAnswer)]
        assert store.held_bytes == sum(one.journal.held_bytes + one.request_bytes for one in listed) <= 2000
        assert set(listed) == {one for one in all_answers if one.is_listed}
    for one in all_answers:
        store.forget(one)
    assert not store.held_bytes


async def test_what_has_ended_goes_before_what_is_read_or_grows() -> None:
    store = KeptAnswers(60, max_bytes=1000)
    oldest, read, growing = kept("oldest"), kept("read", Other), kept("growing")
    for answer in (oldest, read):
        store.add(answer)
        store.publish(answer, [bytes(300)])
        store.end(answer)
    store.add(growing)
    with read.journal.reading():
        store.publish(growing, [bytes(100)] * 6)
        assert (oldest.is_listed, read.is_listed) == (False, True)
        store.publish(growing, [bytes(100)] * 2)  # nothing else can go
        assert growing.journal.first_held == 1 and read.is_listed and not store.has_capacity()
        with pytest.raises(EventsGoneError):
            await pieces_of(growing)
    assert store.has_capacity() and not read.is_listed
    assert await pieces_of(read) == [bytes(300)], "who has it reads it to its end"


async def test_a_reader_that_keeps_up_gets_all_of_an_answer_that_does_not_fit() -> None:
    store, answer = KeptAnswers(60, max_bytes=50), kept("large")
    store.add(answer)
    reading = asyncio.ensure_future(pieces_of(answer))
    sent: list[bytes] = []
    for number in range(20):
        some: Sequence[bytes] = [b"%20d" % number, b"%20d" % -number]
        store.publish(answer, some)
        sent += some
        await asyncio.sleep(0.001)
    store.end(answer)
    assert await reading == sent and store.held_bytes <= 50


async def test_the_grace_begins_when_the_last_reader_leaves_and_a_time_to_live_at_the_end() -> None:
    store, stopped = KeptAnswers(0.05), list[str]()
    left, ended = kept("left"), kept("ended", retention_s=0.2)
    for answer in (left, ended):
        answer.stop = lambda key=answer.key: stopped.append(key)  # type: ignore[misc]
        store.add(answer)
    with left.journal.reading(), ended.journal.reading():
        await asyncio.sleep(0.1)
        store.end(ended)
        assert not stopped
    await asyncio.sleep(0.1)
    assert stopped == ["left"] and store.find(KeptAnswer, "", "ended") is ended
    await asyncio.sleep(0.2)
    assert stopped == ["left", "ended"] and store.find(KeptAnswer, "", "ended") is None
