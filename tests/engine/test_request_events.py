"""What an engine tells of traced requests: every chunk, every preemption, and nothing of other requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.messages import InferRequest, RequestEvent
from tests.helpers.mock_devices import devices_closed, make_overlapping
from tests.helpers.mock_engine import make_core, random_requests

SMALL: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 24, "max_num_batched_tokens": 16, "max_num_seqs": 4}


@pytest.fixture(autouse=True)
def devices_end() -> Iterator[None]:
    with devices_closed():
        yield


def run(core: EngineCore, requests: list[InferRequest]) -> tuple[list[RequestEvent], int]:
    """All events, and the preemptions that the engine counted."""
    for request in requests:
        core.add(request)
    events: list[RequestEvent] = []
    result = None
    while core.has_work:
        result = core.step()
        events += result.events
    core.check()
    core.close()
    assert result is not None
    return events, result.stats.num_preemptions


@pytest.mark.parametrize("steps_in_flight", [0, 1, 3])
def test_chunks_are_the_prompt_and_preemptions_are_all_told(steps_in_flight: int) -> None:
    requests = [msgspec.structs.replace(one, is_traced=True) for one in random_requests(seed=4, count=8)]
    make: Callable[..., EngineCore] = make_core
    if steps_in_flight:
        make = partial(make_overlapping, pace="drawn", in_flight=steps_in_flight)
    core = make(**SMALL, enable_prefix_caching=False)
    events, num_preemptions = run(core, requests)
    preempted = {event.request_id for event in events if event.name == "preempted"}
    assert sum(event.name == "preempted" for event in events) == num_preemptions > 0
    for request in requests:
        own = [event for event in events if event.request_id == request.request_id]
        assert own == sorted(own, key=lambda event: event.time_ns)
        num_prefilled = sum(event.num_tokens for event in own if event.name == "prefill")
        if request.request_id not in preempted:
            assert num_prefilled == len(request.prompt_token_ids)
            assert {event.name for event in own} == {"prefill"}
        else:
            assert num_prefilled >= len(request.prompt_token_ids)


def test_a_request_that_goes_on_in_another_engine_is_recomputed() -> None:
    (request,) = random_requests(seed=2, count=1)
    before = msgspec.structs.replace(request, is_traced=True, output_token_ids=(5, 6, 7))
    events, _ = run(make_core(**SMALL), [before])
    assert {event.name for event in events} == {"recompute"}
    assert sum(event.num_tokens for event in events) == len(request.prompt_token_ids) + 3


def test_nothing_is_told_of_requests_that_are_not_traced() -> None:
    traced, *others = random_requests(seed=6, count=5)
    events, _ = run(make_core(**SMALL), [msgspec.structs.replace(traced, is_traced=True), *others])
    assert {event.request_id for event in events} == {traced.request_id}
    assert run(make_core(**SMALL), others)[0] == []
