"""The sequence batcher: slots, strategies, controls, idleness, backlog, cancellation (golden 42)."""

from __future__ import annotations

import gc
import json
import logging
import random
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import pytest

from llmbackend.core.backend_api import RequestFlag, ResponseFlag
from llmbackend.core.config.model_config import parse_text, set_defaults
from llmbackend.core.config.model_config_rules import validate_sequence_batching
from llmbackend.core.config_readers import config_to_json
from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import NO_TENANT, Tenant
from llmbackend.core.tensors import Tensor
from llmbackend.frontends.operations.probes import render
from tests.helpers.core_host import KEEPING_BACKEND, STAGE, Client, Repository, send, serving, version_of
from tests.helpers.sequence_host import (
    CONTROLS,
    NO_IDLENESS,
    SHOWING_BACKEND,
    flags,
    in_thread,
    sequences,
    serving_sequences,
    step,
)
from tests.helpers.waiting import eventually

MUST_START = (
    "inference request for sequence {} to model 'm' must specify the START flag on the first request of the sequence"
)

START = "kind: CONTROL_SEQUENCE_START"
CORRID = "kind: CONTROL_SEQUENCE_CORRID"


@pytest.fixture
def showing(repository: Repository) -> Repository:
    repository.backend("show", SHOWING_BACKEND)
    return repository


def finish(*clients: Client) -> None:
    STAGE.open("go")
    for client in clients:
        assert client.responses()[0].error is None


# --- one sequence ----------------------------------------------------------------------------------------------------


def test_a_sequence_stays_with_its_instance_and_keeps_its_order(showing: Repository) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS, 0, "instance_group { count: 2 }"))
    with serving_sequences(showing) as server:
        clients = [step(server, number, f"{number}a", start=True) for number in (1, 2)]
        eventually(lambda: len(STAGE.events) == 2)
        clients += [step(server, number, f"{number}{name}", end=name == "c") for name in "bc" for number in (1, 2)]
        finish(*clients)
        of = {event.split(":")[1][0]: event.split(":")[0] for event in STAGE.events}
        assert sorted(of.values()) == ["m_0_0", "m_0_1"]
        for number in "12":
            assert [event for event in STAGE.events if number in event.split(":")[1]] == [
                f"{of[number]}:{number}{name}" for name in "abc"
            ]


def test_a_request_without_correlation_id_is_refused(showing: Repository) -> None:
    showing.model("m", "show", sequences(""))
    with serving_sequences(showing) as server:
        for nothing in (0, ""):
            with pytest.raises(TritonError) as caught:
                step(server, nothing, "a", start=True)
            assert caught.value.status == (
                "Invalid argument: inference request to model 'm' must specify a non-zero or non-empty correlation ID"
            )
        assert version_of(server, "m").in_flight.count == 0


@pytest.mark.parametrize("sequence", [5, "five"])
def test_an_id_names_a_sequence_of_its_own_tenant(showing: Repository, sequence: int | str) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS, 0, "instance_group { count: 2 }"))
    STAGE.open("go")
    alice, bob = Tenant("alice"), Tenant("bob")
    with serving_sequences(showing) as server:
        finish(step(server, sequence, "a", start=True, tenant=alice))
        for other in (bob, NO_TENANT):
            with pytest.raises(TritonError, match="must specify the START flag"):
                step(server, sequence, "b", tenant=other)
        finish(step(server, sequence, "c", start=True, tenant=bob), step(server, sequence, "d", end=True, tenant=bob))
        finish(step(server, sequence, "e", end=True, tenant=alice))


@pytest.mark.parametrize("sequence", [5, "five"])
def test_a_sequence_begins_with_start_and_is_unknown_after_end(showing: Repository, sequence: int | str) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS))
    STAGE.open("go")
    with serving_sequences(showing) as server:
        for _ in range(2):
            with pytest.raises(TritonError) as caught:
                step(server, sequence, "a")
            assert caught.value.status == f"Invalid argument: {MUST_START.format(sequence)}"
            finish(step(server, sequence, "a", start=True), step(server, sequence, "b", end=True))
        assert server.check() == []


def test_ids_5_and_text_5_are_different_sequences(showing: Repository) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS, 4))
    with serving_sequences(showing) as server:
        finish(step(server, 5, "a", start=True, batched=True))
        with pytest.raises(TritonError, match="must specify the START flag"):
            step(server, "5", "b", batched=True)


def test_a_sequence_takes_requests_of_one_row_only(showing: Repository) -> None:
    showing.model("m", "show", sequences("", 4))
    with serving_sequences(showing) as server:
        with pytest.raises(TritonError) as caught:
            rows = Tensor.of("X", np.zeros((2, 2), np.float32))
            send(server, "m", rows, correlation_id=1, flags=RequestFlag.SEQUENCE_START)
        assert caught.value.status == (
            "Invalid argument: inference request to model 'm' must specify batch-size 1 due to requirements of "
            "sequence batcher"
        )


def test_a_second_start_ends_the_sequence_before_it(showing: Repository, caplog: pytest.LogCaptureFixture) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS + CONTROLS))
    STAGE.open("go")
    with serving_sequences(showing) as server, caplog.at_level(logging.WARNING):
        finish(*(step(server, 1, id, start=True) for id in "ab"), step(server, 1, "c", end=True))
        assert [[entry[1]["START"] for entry in batch] for batch in STAGE.kept] == [[1], [1], [0]]
        assert "The previous sequence did not end before this sequence start." in caplog.text


# --- control inputs --------------------------------------------------------------------------------------------------


def test_control_inputs_say_where_a_sequence_is(showing: Repository) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS + CONTROLS))
    STAGE.open("go")
    with serving_sequences(showing) as server:
        finish(step(server, 7, "a", start=True), step(server, 7, "b"), step(server, 7, "c", end=True))
        finish(step(server, 8, "d", start=True, end=True))
        seen = [(entry["START"], entry["READY"], entry["END"], entry["CORRID"]) for ((_, entry),) in STAGE.kept]
        assert seen == [(1, 1.0, False, 7), (0, 1.0, False, 7), (0, 1.0, True, 7), (1, 1.0, True, 8)]


@pytest.mark.parametrize(("max_batch_size", "shape"), [(0, (1,)), (4, (1, 1))])
def test_control_inputs_have_the_configured_types(
    repository: Repository, max_batch_size: int, shape: tuple[int, ...]
) -> None:
    repository.backend("keep", KEEPING_BACKEND)
    repository.model("m", "keep", sequences(NO_IDLENESS + CONTROLS, max_batch_size))
    with serving_sequences(repository) as server:
        client = step(server, 7, "a", start=True, batched=max_batch_size > 0)
        STAGE.wait("executed a")
        ((_, request),) = STAGE.kept
        STAGE.kept.clear()
        controls = {name: tensor for name, tensor in request.inputs.items() if name != "X"}
        assert {name: tensor.datatype for name, tensor in controls.items()} == {
            "START": "INT32",
            "READY": "FP32",
            "END": "BOOL",
            "CORRID": "UINT64",
        }
        assert {tensor.shape for tensor in controls.values()} == {shape}
        request.new_response().send(ResponseFlag.FINAL)
        request.release()
        client.responses()


@pytest.mark.parametrize(
    ("data_type", "sequence", "expected"),
    [
        ("TYPE_UINT64", (1 << 64) - 1, (1 << 64) - 1),
        ("TYPE_INT64", (1 << 64) - 1, -1),
        ("TYPE_UINT32", (1 << 32) + 5, 5),
        ("TYPE_INT32", 5, 5),
        ("TYPE_STRING", "abc", b"abc"),
        ("TYPE_STRING", 5, b"5"),
        # Triton's bytes: the length in four of them, then the characters.
        ("TYPE_UINT64", "abc", int.from_bytes(b"\x03\0\0\0abc\0", "little")),
    ],
)
def test_the_correlation_id_is_written_in_the_type_of_its_control(
    showing: Repository, data_type: str, sequence: int | str, expected: Any
) -> None:
    control = f'control_input {{ name: "CORRID" control {{ {CORRID} data_type: {data_type} }} }}'
    showing.model("m", "show", sequences(control))
    with serving_sequences(showing) as server:
        finish(step(server, sequence, "a", start=True, end=True))
        assert STAGE.kept == [[("a", {"CORRID": expected})]]


def test_long_text_ids_stay_different_in_an_integer_control(showing: Repository) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS + CONTROLS))
    STAGE.open("go")
    with serving_sequences(showing) as server:
        finish(*(step(server, f"session-{number}", "a", start=True, end=True) for number in range(20)))
        assert len({entry["CORRID"] for ((_, entry),) in STAGE.kept}) == 20


# --- direct ----------------------------------------------------------------------------------------------------------


def plugged(server: Any, batched: bool = True) -> Client:
    """A request that keeps the instance busy until gate "go" opens."""
    client = step(server, 99, "plug", start=True, end=True, batched=batched)
    eventually(lambda: STAGE.events)
    return client


def test_direct_gives_each_sequence_its_row_and_fills_the_gaps(showing: Repository) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS + CONTROLS, 4))
    with serving_sequences(showing) as server:
        clients = [plugged(server)]  # gives slot 0 back as soon as it runs
        clients += [step(server, number, f"{number}a", start=True, batched=True) for number in (1, 2, 3)]
        clients += [step(server, 3, "3b", batched=True), step(server, 1, "1b", batched=True)]
        clients += [step(server, 3, "3c", batched=True, end=True)]
        finish(*clients)
        assert STAGE.events == ["m_0:plug", "m_0:1a,2a,3a", "m_0:1b,-,3b", "m_0:-,-,3c"]
        gap = STAGE.kept[2][1][1]
        assert gap == {"START": 0, "READY": -1.0, "END": False, "CORRID": 0}
        (statistics,) = server.model_statistics("m")
        assert (statistics.inference_count, statistics.execution_count) == (7, 4)  # padding is not counted as requests
        eventually(lambda: version_of(server, "m").in_flight.count == 0)


def test_direct_batches_equal_shapes_only(showing: Repository) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS, 4))
    with serving_sequences(showing) as server:
        clients = [plugged(server)]
        for number, width in ((1, 2), (2, 3), (3, 2)):
            clients.append(step(server, number, str(number), start=True, batched=True, width=width))
        finish(*clients)
        assert STAGE.events == ["m_0:plug", "m_0:1,-,3", "m_0:-,2"]


def test_direct_pads_a_batch_up_to_the_last_slot_that_has_a_request(showing: Repository) -> None:
    """Also where that request has another shape, and so is not in this batch."""
    showing.model("m", "show", sequences(NO_IDLENESS, 4))
    with serving_sequences(showing) as server:
        clients = [plugged(server)]
        for number, width in ((1, 2), (2, 3)):
            clients.append(step(server, number, str(number), start=True, batched=True, width=width))
        finish(*clients)
        assert STAGE.events == ["m_0:plug", "m_0:1,-", "m_0:-,2"]


def test_direct_waits_for_the_minimum_slot_utilization(showing: Repository) -> None:
    direct = "direct { max_queue_delay_microseconds: 60000000 minimum_slot_utilization: 0.75 }"
    showing.model("m", "show", sequences(NO_IDLENESS + direct, 4))
    STAGE.open("go")
    with serving_sequences(showing) as server:
        finish(*[step(server, number, str(number), start=True, batched=True) for number in (1, 2, 3)])
        assert STAGE.events == ["m_0:1,2,3"]


def test_direct_does_not_wait_longer_than_the_queue_delay(showing: Repository) -> None:
    direct = "direct { max_queue_delay_microseconds: 1000 minimum_slot_utilization: 1.0 }"
    showing.model("m", "show", sequences(NO_IDLENESS + direct, 4))
    with serving_sequences(showing) as server:
        finish(step(server, 1, "1", start=True, batched=True))


def test_sequences_wait_in_the_backlog_until_a_slot_is_free(showing: Repository) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS))
    with serving_sequences(showing) as server:
        clients = [step(server, 1, "1a", start=True)]
        eventually(lambda: STAGE.events)
        clients += [step(server, 2, "2a", start=True), step(server, 3, "3a", start=True, end=True)]
        clients += [step(server, 2, "2b", end=True), step(server, 1, "1b"), step(server, 1, "1c", end=True)]
        assert version_of(server, "m").statistics.pending_count == 5
        finish(*clients)
        assert STAGE.events == [f"m_0:{id}" for id in ("1a", "1b", "1c", "2a", "2b", "3a")]
        assert 'nv_inference_pending_request_count{model="m",version="1"} 0' in render(server.metrics_registry).decode()


def test_a_sequence_of_the_backlog_gives_up_at_its_timeout(showing: Repository) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS))
    with serving_sequences(showing) as server:
        first = step(server, 1, "1a", start=True)
        eventually(lambda: STAGE.events)
        late = [step(server, 2, "2a", start=True), step(server, 2, "2b", timeout_us=1000)]
        for client in late:
            assert client.error().status == "Unavailable: timeout of the corresponding sequence has been expired"
        with pytest.raises(TritonError, match="must specify the START flag"):
            step(server, 2, "2c")
        finish(first, step(server, 1, "1b", end=True))
        assert 'nv_inference_request_failure{model="m",reason="REJECTED",version="1"} 2' in (
            render(server.metrics_registry).decode()
        )


# --- idleness --------------------------------------------------------------------------------------------------------


def test_an_idle_sequence_ends_and_gives_its_slot_to_the_backlog(showing: Repository) -> None:
    showing.model("m", "show", sequences("max_sequence_idle_microseconds: 50000"))
    STAGE.open("go")
    with serving_sequences(showing) as server:
        finish(step(server, 1, "1a", start=True))
        waiting = step(server, 2, "2a", start=True)  # its only slot is taken until 1 is idle for too long
        finish(waiting)
        with pytest.raises(TritonError, match=MUST_START.format(1)):
            step(server, 1, "1b")
        finish(step(server, 2, "2b", end=True))  # idle only since it has its slot


def test_requests_keep_a_sequence_from_being_idle(showing: Repository) -> None:
    showing.model("m", "show", sequences("max_sequence_idle_microseconds: 400000"))
    STAGE.open("go")
    with serving_sequences(showing) as server:
        finish(step(server, 1, "a", start=True))
        for _ in range(6):
            gate = STAGE.gates["never"]
            gate.wait(0.1)  # together longer than the idle time
            finish(step(server, 1, "b"))


def test_what_an_idle_sequence_sent_before_is_still_answered(showing: Repository) -> None:
    showing.model("m", "show", sequences("max_sequence_idle_microseconds: 20000"))
    with serving_sequences(showing) as server:
        clients = [step(server, 1, "a", start=True), step(server, 1, "b")]
        sequence_batcher = version_of(server, "m").sequences
        assert sequence_batcher is not None
        eventually(lambda: sequence_batcher.open_count == 0)
        finish(*clients)
        assert STAGE.events == ["m_0:a", "m_0:b"]


# --- cancellation ----------------------------------------------------------------------------------------------------


def test_a_cancelled_request_ends_its_sequence_and_frees_the_slot(showing: Repository) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS))
    with serving_sequences(showing) as server:
        clients = [step(server, 1, "1a", start=True)]
        eventually(lambda: STAGE.events)
        clients.append(step(server, 1, "1b"))
        cancelled = [step(server, 1, "1c"), step(server, 1, "1d")]
        clients.append(step(server, 2, "2a", start=True, end=True))
        cancelled[0].cancel()
        assert [client.error().code for client in cancelled] == [ErrorCode.CANCELLED] * 2
        with pytest.raises(TritonError, match="must specify the START flag"):
            step(server, 1, "1e")
        finish(*clients)
        assert STAGE.events == ["m_0:1a", "m_0:1b", "m_0:2a"]


def test_a_sequence_cancelled_in_the_backlog_never_gets_a_slot(showing: Repository) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS))
    with serving_sequences(showing) as server:
        first = step(server, 1, "1a", start=True)
        eventually(lambda: STAGE.events)
        gone = step(server, 2, "2a", start=True)
        last = step(server, 3, "3a", start=True, end=True)
        gone.cancel()
        assert gone.error().code is ErrorCode.CANCELLED
        finish(first, step(server, 1, "1b", end=True), last)
        assert STAGE.events == ["m_0:1a", "m_0:1b", "m_0:3a"]


# --- oldest ----------------------------------------------------------------------------------------------------------


def test_oldest_batches_the_first_requests_of_several_sequences(showing: Repository) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS + "oldest { max_candidate_sequences: 8 }", 4))
    with serving_sequences(showing) as server:
        clients = [plugged(server)]
        for name in "ab":
            for number in (1, 2, 3):
                last = name == "b"
                clients.append(step(server, number, f"{number}{name}", start=not last, end=last, batched=True))
        finish(*clients)
        assert STAGE.events == ["m_0:plug", "m_0:1a,2a,3a", "m_0:1b,2b,3b"]  # never two of one sequence at once


def test_oldest_sends_a_preferred_size_without_waiting(showing: Repository) -> None:
    oldest = "oldest { max_candidate_sequences: 8 preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 60000000 }"
    showing.model("m", "show", sequences(NO_IDLENESS + oldest, 4))
    STAGE.open("go")
    with serving_sequences(showing) as server:
        finish(*[step(server, number, str(number), start=True, end=True, batched=True) for number in (1, 2, 3, 4)])
        assert STAGE.events == ["m_0:1,2", "m_0:3,4"]


def test_oldest_has_at_most_max_candidate_sequences(showing: Repository) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS + "oldest { max_candidate_sequences: 2 }", 4))
    with serving_sequences(showing) as server:
        clients = [plugged(server)]
        clients += [step(server, number, f"{number}a", start=True, batched=True) for number in (1, 2, 3)]
        clients += [step(server, number, f"{number}b", end=True, batched=True) for number in (1, 2, 3)]
        finish(*clients)
        batches = [set(event.removeprefix("m_0:").split(",")) for event in STAGE.events]
        assert {"3a", "2a"} not in batches and all(len(batch) <= 2 for batch in batches)
        assert max(index for index, batch in enumerate(batches) if "1b" in batch) < min(
            index for index, batch in enumerate(batches) if "3a" in batch
        )


def test_the_next_request_of_an_oldest_sequence_waits_for_the_release(repository: Repository) -> None:
    repository.backend("keep", KEEPING_BACKEND)
    repository.model("m", "keep", sequences(NO_IDLENESS + "oldest { max_candidate_sequences: 8 }"))
    with serving_sequences(repository) as server:
        clients = [step(server, 1, "a", start=True), step(server, 1, "b")]
        STAGE.wait("executed a")
        clients.append(step(server, 2, "c", start=True, end=True))
        STAGE.wait("executed c")  # another sequence passes
        assert not STAGE.gates["executed b"].is_set()
        for id in ("a", "c", "b"):
            STAGE.wait(f"executed {id}")
            request = next(kept for _, kept in STAGE.kept if kept.id == id)
            STAGE.kept[:] = [entry for entry in STAGE.kept if entry[1].id != id]
            request.new_response().send(ResponseFlag.FINAL)
            request.release()
        del request
        for client in clients:
            client.responses()


def test_a_request_that_a_backend_loses_does_not_block_its_sequence(repository: Repository) -> None:
    repository.backend("keep", KEEPING_BACKEND)
    repository.model("m", "keep", sequences(NO_IDLENESS + "oldest { max_candidate_sequences: 1 }"))
    with serving_sequences(repository) as server:
        first, second = step(server, 1, "a", start=True), step(server, 1, "b", end=True)
        for id, client in (("a", first), ("b", second)):
            STAGE.wait(f"executed {id}")
            STAGE.kept.clear()
            gc.collect()
            assert "without" in client.error().message


def test_cancelling_a_batched_request_ends_an_oldest_sequence(showing: Repository) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS + "oldest { max_candidate_sequences: 4 }", 4))
    with serving_sequences(showing) as server:
        plug = plugged(server)
        clients = [step(server, 1, "1a", start=True, batched=True), step(server, 1, "1b", batched=True)]
        clients[0].cancel()
        assert [client.error().code for client in clients] == [ErrorCode.CANCELLED] * 2
        with pytest.raises(TritonError, match="must specify the START flag"):
            step(server, 1, "1c", batched=True)
        finish(plug)
        assert STAGE.events == ["m_0:plug"]


# --- the life of the model -------------------------------------------------------------------------------------------


def test_a_model_with_open_sequences_unloads(showing: Repository) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS))
    STAGE.open("go")
    with serving_sequences(showing) as server:
        finish(step(server, 1, "a", start=True))
        server.unload_model("m")
        eventually(lambda: server.repository_index()[0].reason == "unloaded")
        server.load_model("m")
        with pytest.raises(TritonError, match="must specify the START flag"):
            step(server, 1, "b")


def test_a_running_sequence_ends_while_the_server_stops(showing: Repository) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS))
    STAGE.open("go")
    with serving(showing, "m") as server:
        finish(step(server, 1, "a", start=True))
        stopped: list[bool] = []
        stopping = in_thread(lambda: stopped.append(server.stop(20)))
        eventually(lambda: server.is_exiting)
        with pytest.raises(TritonError, match="Server is stopping"):
            step(server, 2, "b", start=True)
        with pytest.raises(TritonError, match="Server is stopping"):
            step(server, 2, "b")
        finish(step(server, 1, "c"))
        assert not stopped
        finish(step(server, 1, "d", end=True))
        stopping.join(20)
        assert stopped == [True]


def test_a_stopping_server_waits_for_sequences_until_they_are_idle(showing: Repository) -> None:
    showing.model("m", "show", sequences("max_sequence_idle_microseconds: 100000"))
    STAGE.open("go")
    with serving(showing, "m") as server:
        finish(step(server, 1, "a", start=True))
        assert server.stop(20)


def test_each_instance_of_a_sequence_model_has_a_thread_of_its_own(
    showing: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMBACKEND_GPUS", "0")
    showing.backend("show", SHOWING_BACKEND.replace("ExecutionPolicy.BLOCKING", "ExecutionPolicy.DEVICE_BLOCKING"))
    showing.model("m", "show", sequences(NO_IDLENESS, 0, "instance_group { kind: KIND_GPU count: 2 gpus: [0] }"))
    with serving_sequences(showing) as server:
        clients = [step(server, number, str(number), start=True) for number in (1, 2)]
        eventually(lambda: len(STAGE.events) == 2)  # at the same time
        finish(*clients)


# --- many ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 3 }"])
def test_many_sequences_at_once_lose_nothing(showing: Repository, strategy: str) -> None:
    """Random lengths, cancellations and sequences that are left open: every request ends once and in order."""
    rng = random.Random(f"sequences {strategy}")
    idle = "max_sequence_idle_microseconds: 100000 "
    showing.model("m", "show", sequences(idle + strategy, 4, "instance_group { count: 2 }"))
    STAGE.open("go")
    with serving_sequences(showing) as server:
        clients: dict[str, Client] = {}
        plans = {number: rng.randint(1, 6) for number in range(1, 41)}
        sent: dict[int, int] = defaultdict(int)
        while plans:
            number = rng.choice(sorted(plans))
            index = sent[number]
            last = index + 1 == plans[number] and rng.random() < 0.8
            id = f"{number}.{index}"
            try:
                clients[id] = step(server, number, id, start=index == 0, end=last, batched=True)
            except TritonError as error:
                assert error.message == MUST_START.format(number)  # it was cancelled, or idle
                del plans[number]
                continue
            if rng.random() < 0.05 and (handle := clients[id].handle) is not None:
                handle.cancel()
            sent[number] += 1
            if sent[number] == plans[number]:
                del plans[number]
        outcomes = {id: client.responses()[0].error for id, client in clients.items()}
        assert {error.code for error in outcomes.values() if error is not None} <= {ErrorCode.CANCELLED}
        ran: dict[str, list[int]] = defaultdict(list)
        where: dict[str, set[str]] = defaultdict(set)
        for event in STAGE.events:
            instance, _, ids = event.partition(":")
            for id in ids.split(","):
                if id != "-":
                    ran[id.split(".")[0]].append(int(id.split(".")[1]))
                    where[id.split(".")[0]].add(instance)
        assert all(indices == list(range(len(indices))) for indices in ran.values())
        assert all(len(instances) == 1 for instances in where.values())
        assert sum(map(len, ran.values())) == sum(error is None for error in outcomes.values())


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 3 }"])
def test_sequences_from_many_threads_stay_apart(showing: Repository, strategy: str) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS + strategy, 4, "instance_group { count: 2 }"))
    STAGE.open("go")
    sequences_each, length = 15, 4

    def run(server: InferenceServer, thread: int, failed: list[str]) -> None:
        rng = random.Random(thread)
        for number in range(sequences_each):
            sequence = f"{thread}/{number}"
            for index in range(length):
                client = step(
                    server, sequence, f"{sequence}.{index}", start=index == 0, end=index == length - 1, batched=True
                )
                if index == length - 2 and rng.random() < 0.3 and client.handle is not None:
                    client.handle.cancel()
                    if client.responses()[0].error is not None:
                        break  # the sequence is over; otherwise it had run already
                elif (error := client.responses()[0].error) is not None:
                    failed.append(error.message)

    with serving_sequences(showing) as server:
        failed: list[str] = []
        threads = [in_thread(partial(run, server, thread, failed)) for thread in range(8)]
        for thread in threads:
            thread.join(60)
        assert failed == []
        batcher = version_of(server, "m").sequences
        assert batcher is not None and batcher.open_count == 0


def test_a_step_of_an_ensemble_may_be_a_model_with_sequences(showing: Repository) -> None:
    showing.model("m", "show", sequences(NO_IDLENESS + CONTROLS))
    maps = 'input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }'
    flow = f'step {{ model_name: "m" model_version: -1 {maps} }}'
    showing.model("e", "", f'platform: "ensemble"\nensemble_scheduling {{ {flow} }}')
    (showing.models / "e" / "config.pbtxt").write_text(
        (showing.models / "e" / "config.pbtxt").read_text().replace('backend: ""', "")
    )
    STAGE.open("go")
    with serving(showing, "e") as server:
        for index in range(3):
            x = Tensor.of("X", np.ones(2, np.float32))
            ends = flags(start=index == 0, end=index == 2)
            assert send(server, "e", x, correlation_id="s", flags=ends).responses()[0].error is None
        assert [(entry["START"], entry["END"]) for ((_, entry),) in STAGE.kept] == [(1, False), (0, False), (0, True)]
        with pytest.raises(TritonError, match="must specify the START flag"):
            step(server, "s", "late")


# --- configuration ---------------------------------------------------------------------------------------------------


def test_defaults_are_filled_in() -> None:
    config = parse_text('name: "m" max_batch_size: 8 sequence_batching { oldest { } }', "test")
    set_defaults(config)
    assert config.sequence_batching.max_sequence_idle_microseconds == 1_000_000
    assert list(config.sequence_batching.oldest.preferred_batch_size) == [8]


def test_the_configuration_shows_numbers_as_triton_does() -> None:
    """Recorded from Triton 2.51: [0, 1] for fp32_false_true."""
    control = f'control_input {{ name: "A" control {{ {START} fp32_false_true: [0, 0.1] }} }}'
    direct = "direct { minimum_slot_utilization: 1 }"
    config = parse_text(f'name: "m" sequence_batching {{ {control} {direct} }}', "test")
    shown = json.dumps(config_to_json(config)["sequence_batching"])
    assert '"fp32_false_true": [0, 0.1]' in shown and '"minimum_slot_utilization": 1' in shown


@pytest.mark.parametrize(
    ("batching", "error"),
    [
        (
            f"control_input {{ control {{ {START} int32_false_true: [0, 1] }} }}",
            "sequence batching control tensor must have a name for m",
        ),
        (
            f'control_input {{ name: "A" control {{ {START} int32_false_true: [0, 1] }} }} '
            'control_input { name: "A" }',
            "sequence batching control tensor 'A' is specified for multiple control kinds for m",
        ),
        (
            f'control_input {{ name: "A" control {{ {START} int32_false_true: [0, 1] }} }} '
            f'control_input {{ name: "B" control {{ {START} int32_false_true: [0, 1] }} }}',
            "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m",
        ),
        (
            f'control_input {{ name: "A" control {{ {START} }} }}',
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            "CONTROL_SEQUENCE_START for m",
        ),
        (
            f'control_input {{ name: "A" control {{ {START} int32_false_true: [0, 1] fp32_false_true: [0, 1] }} }}',
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            "'bool_false_true' for CONTROL_SEQUENCE_START for m",
        ),
        (
            f'control_input {{ name: "A" control {{ {START} fp32_false_true: [0] }} }}',
            "sequence batching control 'fp32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START for m",
        ),
        (
            f'control_input {{ name: "A" control {{ {CORRID} data_type: TYPE_UINT64 int32_false_true: [0, 1] }} }}',
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            "CONTROL_SEQUENCE_CORRID for m",
        ),
        (
            f'control_input {{ name: "A" control {{ {CORRID} data_type: TYPE_FP32 }} }}',
            "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64, "
            "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
        ),
        ("oldest { preferred_batch_size: [ 0 ] }", "sequence batching preferred batch size must be positive for m"),
        (
            "oldest { preferred_batch_size: [ 9 ] }",
            "sequence batching preferred batch size must be <= max batch size for m",
        ),
        (
            "direct { minimum_slot_utilization: 1.5 }",
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
        ),
        (
            'state { input_name: "S" use_growable_memory: true }',
            "In order to 'use_growable_memory', you must also enable 'use_single_buffer' for state input name 'S'.",
        ),
    ],
)
def test_a_configuration_that_breaks_a_rule_is_refused(batching: str, error: str) -> None:
    config = parse_text(f'name: "m" max_batch_size: 8 sequence_batching {{ {batching} }}', "test")
    with pytest.raises(TritonError) as caught:
        validate_sequence_batching(config)
    assert caught.value.status == f"Invalid argument: {error}"
