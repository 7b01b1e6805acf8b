"""What readers of a journal get."""

from __future__ import annotations

import pytest

from llmbackend.frontends.journals.journal import Journal


@pytest.mark.parametrize("after", [99, 300, 800, 998, 999])
async def test_a_reader_gets_each_event_once_and_few_at_a_time(after: int) -> None:
    journal = Journal(max_bytes=900_000)
    events = [b"%1000d" % number for number in range(1000)]
    journal.publish(events)  # the first hundred are dropped
    journal.end()
    steps = [step async for step in journal.follow(after)]
    assert [part for step in steps for part in step.parts] == events[after + 1 :]
    assert all(sum(map(len, step.parts)) < 270_000 for step in steps)
    assert [step.first for step in steps] == [int(step.parts[0]) for step in steps]
