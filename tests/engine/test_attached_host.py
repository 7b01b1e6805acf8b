"""What a host that shares an engine is told: its own requests under its own names, and its part of the counters."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.messages import AdapterLoad, AdapterResult, EngineStats, RequestEvent, StepOutput
from llmbackend.engine.process.served.attached_host import AttachedHost, owner_of
from llmbackend.engine.process.served.locating import EngineUsers
from llmbackend.engine.process.served.remote_messages import Head, SharedCounters
from llmbackend.engine.reports import BlockMap, EngineReport, StepReport, Watch
from tests.helpers.mock_engine import make_request
from tests.helpers.served_engines import FixedLocator

SHARED = {"everybodys": "/adapters/e"}


def hosts(count: int = 2) -> dict[int, AttachedHost]:
    return {number: AttachedHost(number, b"%d" % number, "host", SHARED) for number in range(1, count + 1)}


def test_equal_ids_of_two_hosts_are_two_requests() -> None:
    attached = hosts()
    ids = [host.take(make_request("7")).request_id for host in attached.values()]
    assert len(set(ids)) == 2
    for host, engine_id in zip(attached.values(), ids, strict=True):
        assert owner_of(engine_id, attached) is host
        output, event = StepOutput(engine_id, (1, 2), "stop"), RequestEvent(engine_id, "prefill", 5)
        host.give_event(event)
        host.give(output)
        assert (output.request_id, event.request_id, host.requests, host.generation_tokens) == ("7", "7", {}, 2)
    assert owner_of("9/7", attached) is None and owner_of("everybodys", attached) is None


def test_adapters_that_a_host_loaded_are_its_own() -> None:
    first, second = hosts().values()
    loads = [host.take_adapter(AdapterLoad("a#1", f"/copies/{host.routing_id!r}")) for host in (first, second)]
    assert loads[0].name != loads[1].name
    request = msgspec.structs.replace(make_request("1"), lora_name="a#1")
    assert second.take(request).lora_name == loads[1].name
    request = msgspec.structs.replace(make_request("2"), lora_name="everybodys")
    assert first.take(request).lora_name == "everybodys" and first.take(make_request("3")).lora_name == ""
    result = AdapterResult(loads[0].name, f"LoRA '{loads[0].name}' has rank 64")
    assert first.give_adapter(result) == AdapterResult("a#1", "LoRA 'a#1' has rank 64")


def test_a_report_shows_only_the_watchers_own_requests() -> None:
    first, second = hosts().values()
    ours, theirs = first.take(make_request("1")).request_id, second.take(make_request("1")).request_id
    step = StepReport(
        *(3, 0.0, 0.01, 0.0, 0.0, (theirs, ours), bytes((1, 0)), (9, 1), (0, 1), (theirs,)),
        *(((ours, "prefix"), (theirs, "token_budget")), 2, 8, 5, 1),
    )
    blocks = BlockMap(0.0, 8, ((0, 1, "used", ours, 1), (1, 2, "used", theirs, 1), (3, 5, "free", None, 0)))
    assert first.report(EngineReport(step, blocks)) is None, "it does not watch"
    first.watch = Watch(steps=True, blocks=True)
    report = first.report(EngineReport(step, blocks))
    assert report is not None and report.step is not None and report.blocks is not None
    assert report.step.rows == [("1", "decode", 1, 0, 1)]
    assert (report.step.preempted, report.step.waiting) == ((), (("1", "prefix"),))
    assert (report.step.num_running, report.step.num_free_blocks) == (2, 5), "of the engine"
    assert [run[3] for run in report.blocks.runs] == ["1", None, None]


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 9)), max_size=30))
def test_what_the_hosts_of_an_engine_count_is_what_it_did(steps: list[tuple[int, bool, int]]) -> None:
    """The host that counts comes and goes; each message counts once, whoever gets it."""
    counters = [SharedCounters() for _ in range(3)]
    done = 0
    for one in counters:  # as when they are attached
        one.add(Head(False, 0, 0, 0), EngineStats())
    leader = 0
    for host, changes_leader, growth in steps:
        done += growth
        stats = EngineStats(num_preemptions=done)
        for number, one in enumerate(counters):
            one.add(Head(number == leader, 0, 0, 0), stats)
        if changes_leader:
            leader = host
    assert sum(one.stats(EngineStats(num_preemptions=done)).num_preemptions for one in counters) == done


def test_a_models_engine_is_released_by_its_last_user() -> None:
    """A reload starts the new one before the old one ends."""
    locator = FixedLocator(None)
    users, config, woken = EngineUsers(locator), EngineConfig(model="mock"), []
    old, new = (lambda: woken.append("old")), (lambda: woken.append("new"))
    users.enter(0, config, old)
    users.enter(0, config, new)
    users.leave(0, config, old)
    assert locator.released == []
    locator.move(0, None)
    assert woken == ["new"]
    users.leave(0, config, new)
    assert locator.released == [0]
