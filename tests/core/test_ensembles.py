"""Ensembles: flow, decoupled steps, errors, cancellation, limits, statistics (golden 43)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from llmbackend.core.backend_api import RequestFlag
from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import RESPONSE_BYTES, InferenceResponse, Tenant
from llmbackend.core.scheduling.ensembles.graph import StepLauncher
from llmbackend.core.tensors import Tensor
from tests.helpers.core_host import STAGE, WAIT_S, Client, Repository, send, serving, version_of, x
from tests.helpers.ensemble_host import AB_TO_Y, X_TO_YZ, chain, ensemble, part, parts, step, tensors
from tests.helpers.waiting import eventually


def values(response: InferenceResponse, name: str = "Y") -> list[float]:
    assert response.error is None, response.error
    (found,) = [tensor.data.ravel().tolist() for tensor in response.outputs if tensor.name == name]
    return found


def one(client: Client, name: str = "Y") -> list[float]:
    (response,) = client.responses()
    return values(response, name)


def executed(model: str) -> int:
    return STAGE.events.count(f"execute {model}")


def counts(server: InferenceServer, model: str) -> tuple[int, int, int, int]:
    (statistics,) = server.model_statistics(model)
    totals = statistics.inference_stats
    return statistics.inference_count, statistics.execution_count, totals.success.count, totals.fail.count


# --- the flow -------------------------------------------------------------------------------------------------------


def test_steps_run_one_after_the_other_and_the_response_tells_the_sequence(repository: Repository) -> None:
    part(repository, "add", "add")
    chain(repository, "e", "add", "add", "add")
    with serving(repository, "e") as server:
        (response,) = send(server, "e", x(1, 2), id="7").responses()
        assert values(response) == [4, 5]
        assert (response.model_name, response.model_version, response.request_id) == ("e", 1, "7")
        assert response.parameters == {"sequence_id": 0, "sequence_start": False, "sequence_end": False}


def test_an_output_that_is_listed_twice_is_one_output(repository: Repository) -> None:
    """As TensorRT-LLM's `ensemble` lists one of its own."""
    part(repository, "add", "add")
    chain(repository, "e", "add", io=tensors("input", "X") + tensors("output", "Y", "Y"))
    with serving(repository, "e") as server:
        (response,) = send(server, "e", x(1, 2)).responses()
        assert [tensor.name for tensor in response.outputs] == ["Y"] and values(response) == [2, 3]
        (response,) = send(server, "e", x(1), requested_outputs=("Y",)).responses()
        assert values(response) == [2]


def test_the_steps_of_an_ensemble_are_made_for_its_client(repository: Repository) -> None:
    part(repository, "tell", "tell")
    chain(repository, "inner", "tell")
    chain(repository, "e", "tell", "inner")
    with serving(repository, "e") as server:
        for tenant in (Tenant("alice", cache_name="alice"), Tenant("bob", is_operator=True)):
            STAGE.kept.clear()
            send(server, "e", tenant=tenant).responses()
            assert [told["tenant"] for told in STAGE.kept] == [tenant, tenant]


def test_independent_steps_run_side_by_side(repository: Repository) -> None:
    part(repository, "left", "gate")
    part(repository, "right", "gate")
    part(repository, "sum", "sum", AB_TO_Y)
    steps = [
        step("left", {"X": "X"}, {"Y": "l"}),
        step("right", {"X": "X"}, {"Y": "r"}),
        step("sum", {"A": "l", "B": "r"}, {"Y": "Y"}),
    ]
    ensemble(repository, "e", *steps)
    with serving(repository, "e") as server:
        client = send(server, "e", x(1))
        eventually(lambda: executed("left") and executed("right"))
        STAGE.open("left")
        eventually(lambda: counts(server, "left")[2] == 1)
        assert executed("sum") == 0
        STAGE.open("right")
        assert one(client) == [4]


def test_only_what_the_requested_outputs_need_is_run(repository: Repository) -> None:
    part(repository, "first", "add")
    part(repository, "second", "add")
    part(repository, "other", "add")
    steps = [
        step("first", {"X": "X"}, {"Y": "P"}),
        step("second", {"X": "P"}, {"Y": "Q"}),
        step("other", {"X": "X"}, {"Y": "R"}),
    ]
    ensemble(repository, "e", *steps, io=tensors("input", "X") + tensors("output", "P", "Q", "R"))
    with serving(repository, "e") as server:
        (response,) = send(server, "e", x(1), requested_outputs=("R",)).responses()
        assert [tensor.name for tensor in response.outputs] == ["R"] and executed("first") == 0
        # P is not asked for, but needed to make Q.
        (response,) = send(server, "e", x(1), requested_outputs=("Q",)).responses()
        assert [tensor.name for tensor in response.outputs] == ["Q"] and values(response, "Q") == [3]
        assert executed("other") == 1
        (response,) = send(server, "e", x(1)).responses()
        assert {tensor.name for tensor in response.outputs} == {"P", "Q", "R"}


def test_random_flows_compute_what_their_graph_says(repository: Repository) -> None:
    part(repository, "add", "add")
    part(repository, "sum", "sum", AB_TO_Y, "instance_group { count: 2 }")
    part(repository, "split", "split", X_TO_YZ)
    chance = random.Random(5)
    expected: dict[str, dict[str, tuple[float, float]]] = {}
    for index in range(12):
        expected[f"e{index}"] = random_flow(repository, f"e{index}", chance)
    with serving(repository, *expected) as server:
        clients = {name: [send(server, name, x(start)) for start in (1, 10)] for name in expected}
        for name, outputs in expected.items():
            for client, start in zip(clients[name], (1, 10), strict=True):
                (response,) = client.responses()
                found = {tensor.name: float(tensor.data[0]) for tensor in response.outputs}
                assert found == {output: slope * start + offset for output, (slope, offset) in outputs.items()}


def random_flow(repository: Repository, name: str, chance: random.Random) -> dict[str, tuple[float, float]]:
    """Writes a random ensemble of three models; its outputs as linear functions (slope, offset) of its input."""
    known: dict[str, tuple[float, float]] = {"X": (1, 0)}
    unread, steps = {"X"}, []

    def take() -> str:
        tensor = chance.choice(sorted(unread) if unread and chance.random() < 0.7 else sorted(known))
        unread.discard(tensor)
        return tensor

    for index in range(chance.randint(3, 9)):
        kind = chance.choice(["add", "sum", "split"])
        if kind == "sum":
            a, b = take(), take()
            outputs = {"Y": (known[a][0] + known[b][0], known[a][1] + known[b][1])}
            inputs = {"A": a, "B": b}
        else:
            a = take()
            outputs = {"Y": (known[a][0], known[a][1] + 1)}
            inputs = {"X": a}
            if kind == "split":
                outputs["Z"] = (-known[a][0], -known[a][1])
        names = {output: f"t{index}{output}" for output in outputs}
        known |= {names[output]: line for output, line in outputs.items()}
        unread |= set(names.values())
        steps.append(step(kind, inputs, names))
    results = sorted(unread - {"X"}) or [next(iter(names.values()))]
    chance.shuffle(steps)
    ensemble(repository, name, *steps, io=tensors("input", "X") + tensors("output", *results))
    return {output: known[output] for output in results}


def test_optional_inputs_may_be_absent(repository: Repository) -> None:
    optional = tensors("input", "A") + tensors("input", "B", more="optional: true")
    part(repository, "sum", "sum", optional + tensors("output", "Y"))
    ensemble(repository, "e", step("sum", {"A": "A", "B": "B"}, {"Y": "Y"}), io=optional + tensors("output", "Y"))
    a = Tensor.of("A", np.array([1], np.float32))
    with serving(repository, "e") as server:
        assert one(send(server, "e", a)) == [1]
        assert one(send(server, "e", a, Tensor.of("B", np.array([5], np.float32)))) == [6]


def test_an_output_that_a_step_leaves_out_is_an_absent_input_of_the_next(repository: Repository) -> None:
    part(repository, "drop", "drop", X_TO_YZ)
    optional = tensors("input", "A") + tensors("input", "B", more="optional: true")
    part(repository, "tell", "tell", optional + tensors("output", "Y"))
    steps = [step("drop", {"X": "X"}, {"Y": "y", "Z": "z"}), step("tell", {"A": "y", "B": "z"}, {"Y": "Y"})]
    ensemble(repository, "e", *steps)
    ensemble(repository, "holes", steps[0].replace('"y"', '"Y"').replace('"z"', '"Z"'), io=X_TO_YZ)
    with serving(repository, "e", "holes") as server:
        assert one(send(server, "e", x(3))) == [3] and STAGE.kept[0]["inputs"] == ["A"]
        (response,) = send(server, "holes", x(3)).responses()
        assert [tensor.name for tensor in response.outputs] == ["Y"]


def test_steps_may_ask_for_versions(repository: Repository) -> None:
    part(repository, "tell", "tell", config="version_policy { all {} }", versions=(1, 2, 3))
    pairs = ({"X": "X"}, {"Y": "t"}), ({"X": "t"}, {"Y": "Y"})
    ensemble(repository, "e", step("tell", *pairs[0], version=1), step("tell", *pairs[1], version=-1))
    with serving(repository, "e") as server:
        assert one(send(server, "e", x(3))) == [3]
        assert [kept["version"] for kept in STAGE.kept] == [1, 3]


def test_what_belongs_to_the_request_reaches_every_step(repository: Repository) -> None:
    part(repository, "tell", "tell")
    chain(repository, "e", "tell", "tell")
    with serving(repository, "e") as server:
        sent = {
            "id": "r",
            "parameters": {"k": 1, "s": "v"},
            "timeout_us": 10**7,
            "correlation_id": "talk",
            "flags": RequestFlag.SEQUENCE_START,
        }
        (response,) = send(server, "e", x(3), **sent).responses()
        assert len(STAGE.kept) == 2
        for kept in STAGE.kept:
            assert {name: kept[name] for name in sent} == sent and kept["outputs"] == ["Y"]
        assert response.parameters == {"sequence_id": "talk", "sequence_start": True, "sequence_end": False}


@pytest.mark.parametrize(("told", "correlation_id"), [(42, 42), (-2, 2**64 - 2)])
def test_a_step_may_change_the_sequence_for_those_after_it(
    repository: Repository, told: int, correlation_id: int
) -> None:
    part(repository, "starts", "tell", sequence=str(told))
    part(repository, "tell", "tell")
    chain(repository, "e", "starts", "tell")
    with serving(repository, "e") as server:
        (response,) = send(server, "e", x(3), correlation_id=7, flags=RequestFlag.SEQUENCE_END).responses()
        assert [(kept["correlation_id"], kept["flags"]) for kept in STAGE.kept] == [
            (7, RequestFlag.SEQUENCE_END),
            (correlation_id, RequestFlag.SEQUENCE_START),
        ]
        assert response.parameters == {"sequence_id": told, "sequence_start": True, "sequence_end": False}


def test_tensors_pass_between_models_that_batch_and_models_that_do_not(repository: Repository) -> None:
    fixed = tensors("input", "X", dims="[ 2 ]") + tensors("output", "Y", dims="[ 2 ]")
    part(repository, "batched", "tell", fixed, "max_batch_size: 4")
    part(repository, "single", "tell", fixed)
    chain(repository, "e", "batched", "single", "batched", io=fixed, config="max_batch_size: 4")
    chain(repository, "flat", "single", "batched", "single", io=fixed)
    with serving(repository, "e", "flat") as server:
        (response,) = send(server, "e", Tensor.of("X", np.array([[1, 2]], np.float32))).responses()
        assert values(response) == [1, 2] and response.outputs[0].shape == (1, 2)
        assert [kept["shapes"]["X"] for kept in STAGE.kept] == [(1, 2), (2,), (1, 2)]
        (response,) = send(server, "flat", x(1, 2)).responses()
        assert values(response) == [1, 2] and response.outputs[0].shape == (2,)
        # A larger batch can not go through a model that does not batch.
        error = send(server, "e", Tensor.of("X", np.array([[1, 2], [3, 4]], np.float32)), id="big").error()
        assert error.code is ErrorCode.INVALID_ARG
        assert error.message.startswith(
            "in ensemble 'e', [request id: big] unexpected shape for input 'X' for model 'single'. "
            "Expected [2], got [2,2]"
        )


def test_nested_ensembles(repository: Repository) -> None:
    parts(repository, "add", "fail")
    chain(repository, "inner", "add", "add")
    chain(repository, "outer", "inner", "add", "inner")
    chain(repository, "broken", "fail")
    chain(repository, "outermost", "outer", "broken")
    with serving(repository, "outer", "outermost") as server:
        assert one(send(server, "outer", x(1))) == [6]
        eventually(lambda: counts(server, "outer") == (1, 1, 1, 0) and counts(server, "inner") == (2, 2, 2, 0))
        error = send(server, "outermost", x(1)).error()
        assert error.status == "Unavailable: in ensemble 'outermost', in ensemble 'broken', no such luck"


# --- decoupled steps ------------------------------------------------------------------------------------------------


def test_every_response_of_a_decoupled_step_runs_the_steps_after_it(repository: Repository) -> None:
    parts(repository, "repeat", "add")
    chain(repository, "e", "add", "repeat", "add")
    with serving(repository, "e") as server:
        assert server.model_config("e").model_transaction_policy.decoupled
        responses = send(server, "e", x(1, 2, 3), id="s").responses()
        assert [values(response) for response in responses] == [[3], [4], [5]]
        assert executed("add") == 4 and {response.request_id for response in responses} == {"s"}
        eventually(lambda: counts(server, "e") == (1, 1, 1, 0))


def test_decoupled_steps_multiply(repository: Repository) -> None:
    part(repository, "repeat", "repeat")
    part(repository, "pair", "split", X_TO_YZ)
    part(repository, "sum", "sum", AB_TO_Y)
    steps = [
        step("repeat", {"X": "X"}, {"Y": "single"}),
        step("pair", {"X": "single"}, {"Y": "a", "Z": "b"}),
        step("sum", {"A": "a", "B": "b"}, {"Y": "joined"}),
        step("repeat", {"X": "joined"}, {"Y": "Y"}),
    ]
    ensemble(repository, "e", *steps)
    with serving(repository, "e") as server:
        responses = send(server, "e", x(*range(50))).responses()
        assert sorted(value for response in responses for value in values(response)) == [1.0] * 50


def test_a_decoupled_step_without_responses_ends_the_stream_and_a_silent_step_is_a_deadlock(
    repository: Repository,
) -> None:
    parts(repository, "repeat", "silent")
    chain(repository, "none", "repeat", "silent")
    chain(repository, "stuck", "silent")
    with serving(repository, "none", "stuck") as server:
        assert send(server, "none", x()).responses() == []
        assert send(server, "none", x(1, 2)).responses() == []
        error = send(server, "stuck", x(1), id="d").error()
        assert error.status == (
            "Invalid argument: in ensemble 'stuck', [request id: d] unexpected deadlock, at least one output is not "
            "set while no more ensemble steps can be made"
        )
        eventually(lambda: counts(server, "stuck") == (0, 0, 0, 1) and counts(server, "none")[2] == 2)


def test_a_stream_keeps_its_order_whichever_instance_is_faster(repository: Repository) -> None:
    part(repository, "repeat", "repeat")
    part(repository, "late", "late", config="instance_group { count: 2 }")
    chain(repository, "e", "repeat", "late")
    with serving(repository, "e") as server:
        client = send(server, "e", x(0, 1, 2, 3))
        eventually(lambda: counts(server, "late")[2] == 3)
        assert client.events.empty()
        STAGE.open("late")
        assert [values(response) for response in client.responses()] == [[1], [2], [3], [4]]


def test_branches_behind_a_decoupled_step_are_joined_response_by_response(repository: Repository) -> None:
    part(repository, "repeat", "repeat")
    part(repository, "late", "late", config="instance_group { count: 2 }")
    part(repository, "add", "add")
    part(repository, "sum", "sum", AB_TO_Y)
    steps = [
        step("repeat", {"X": "X"}, {"Y": "t"}),
        step("late", {"X": "t"}, {"Y": "a"}),
        step("add", {"X": "t"}, {"Y": "b"}),
        step("sum", {"A": "a", "B": "b"}, {"Y": "Y"}),
    ]
    ensemble(repository, "e", *steps)
    with serving(repository, "e") as server:
        client = send(server, "e", x(0, 10, 20))
        eventually(lambda: counts(server, "sum")[2] == 2)
        STAGE.open("late")
        assert [values(response) for response in client.responses()] == [[2], [22], [42]]


def test_a_second_response_of_a_step_that_is_not_decoupled_is_an_error(repository: Repository) -> None:
    parts(repository, "twice", "gate")
    chain(repository, "e", "twice", "gate")
    with serving(repository, "e") as server:
        error = send(server, "e", x(1)).error()
        assert error.status == (
            "Internal: in ensemble 'e', model 'twice' sent more than one response, but is not decoupled"
        )


# --- errors and cancellation ----------------------------------------------------------------------------------------


def test_the_error_of_a_step_fails_the_request_with_its_status_and_stops_the_other_steps(
    repository: Repository,
) -> None:
    part(repository, "wait", "gate")
    parts(repository, "block", "fail")
    part(repository, "sum", "sum", AB_TO_Y)
    steps = [
        step("wait", {"X": "X"}, {"Y": "l"}),
        step("block", {"X": "X"}, {"Y": "t"}),
        step("fail", {"X": "t"}, {"Y": "r"}),
        step("sum", {"A": "l", "B": "r"}, {"Y": "Y"}),
    ]
    ensemble(repository, "e", *steps)
    with serving(repository, "e") as server:
        client = send(server, "e", x(1))
        eventually(lambda: executed("wait"))
        STAGE.open("block")
        error = client.error()
        assert error.status == "Unavailable: in ensemble 'e', no such luck"
        eventually(lambda: "cancel wait" in STAGE.events)
        eventually(lambda: counts(server, "e") == (0, 0, 0, 1))
        assert executed("sum") == 0


def test_a_step_that_is_refused_fails_the_request(repository: Repository) -> None:
    small_queue = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    part(repository, "gate", "gate", config=small_queue)
    part(repository, "add", "add", tensors("input", "X", dims="[ 2 ]") + tensors("output", "Y"))
    chain(repository, "e", "gate")
    chain(repository, "shape", "add")
    with serving(repository, "e", "shape") as server:
        error = send(server, "shape", x(1, 2, 3), id="s").error()
        assert error.code is ErrorCode.INVALID_ARG
        assert error.message.startswith(
            "in ensemble 'shape', [request id: s] unexpected shape for input 'X' for model 'add'. Expected [2], got [3]"
        )
        assert server.check() == []


def test_what_comes_before_an_error_in_a_stream_is_still_answered(repository: Repository) -> None:
    part(repository, "repeat", "repeat")
    part(repository, "late", "late", config="instance_group { count: 2 }")
    part(repository, "picky", "picky")
    chain(repository, "e", "repeat", "late", "picky")
    with serving(repository, "e") as server:
        client = send(server, "e", x(0, 1, 2, 3, 4))
        eventually(lambda: executed("picky") >= 2)
        assert client.events.empty()  # the first value is still under way
        STAGE.open("late")
        *responses, last = client.responses()
        assert [values(response) for response in responses] == [[1], [2]]
        assert last.error is not None and last.error.status == "Invalid argument: in ensemble 'e', not that one"
        eventually(lambda: counts(server, "e") == (0, 0, 0, 1))


def test_an_error_amid_a_stream_ends_it_once_however_many_steps_run(repository: Repository) -> None:
    parts(repository, "repeat", "fail")
    chain(repository, "e", "repeat", "fail")
    with serving(repository, "e") as server:
        client = send(server, "e", x(*range(3000)))
        assert client.error().message == "in ensemble 'e', no such luck"
        eventually(lambda: counts(server, "e") == (0, 0, 0, 1))
        assert client.events.empty()


def test_cancellation_reaches_the_step_that_runs(repository: Repository) -> None:
    parts(repository, "add", "gate")
    chain(repository, "inner", "gate")
    chain(repository, "e", "add", "inner", "add")
    with serving(repository, "e") as server:
        client = send(server, "e", x(1))
        eventually(lambda: executed("gate"))
        client.cancel()
        error = client.error()
        assert error.status == "Cancelled: in ensemble 'e', in ensemble 'inner', stopped"
        assert "cancel gate" in STAGE.events and executed("add") == 1


def test_cancellation_reaches_a_step_that_is_queued(repository: Repository) -> None:
    part(repository, "slow", "block")
    chain(repository, "e", "slow")
    with serving(repository, "e") as server:
        first = send(server, "e", x(1))
        eventually(lambda: executed("slow"))
        second = send(server, "e", x(1))
        second.cancel()
        assert second.error().status == "Cancelled: in ensemble 'e', Request cancelled"
        STAGE.open("slow")
        assert one(first) == [1]


def test_a_decoupled_step_sees_that_its_request_was_cancelled(repository: Repository) -> None:
    part(repository, "repeat", "repeat", is_patient=True)  # else it may have sent all before the cancel
    part(repository, "gate", "gate")
    chain(repository, "e", "repeat", "gate", scheduling="max_inflight_requests: 1")
    with serving(repository, "e") as server:
        client = send(server, "e", x(*range(1000)))
        eventually(lambda: executed("gate"))
        client.cancel()
        assert client.error().code is ErrorCode.CANCELLED
        eventually(lambda: "repeat stopped" in STAGE.events)
        assert executed("gate") == 1


def test_a_server_that_stops_cuts_ensembles_off(repository: Repository) -> None:
    parts(repository, "add", "gate")
    chain(repository, "e", "add", "gate", "add")
    server = InferenceServer(repository.options(startup_models=["e"]))
    server.start()
    client = send(server, "e", x(1))
    eventually(lambda: executed("gate"))
    assert not server.stop(0.0)
    assert client.error().code is ErrorCode.UNAVAILABLE
    eventually(lambda: "finalize gate" in STAGE.events)


def test_a_server_that_stops_cuts_off_what_waits_for_a_slot(repository: Repository) -> None:
    parts(repository, "repeat", "gate")
    chain(repository, "e", "repeat", "gate", scheduling="max_inflight_requests: 2")
    server = InferenceServer(repository.options(startup_models=["e"]))
    server.start()
    clients = [send(server, "e", x(1, 2, 3, 4)) for _ in range(3)]
    eventually(lambda: executed("gate") == 2)
    assert not server.stop(0.0)
    assert {client.error().code for client in clients} == {ErrorCode.UNAVAILABLE}
    assert {"finalize gate", "finalize repeat"} <= set(STAGE.events)


def test_requests_in_flight_end_while_the_server_stops(repository: Repository) -> None:
    """The steps that are still to come are served although the server takes no new requests."""
    parts(repository, "add", "gate")
    chain(repository, "e", "gate", "add", "add")
    server = InferenceServer(repository.options(startup_models=["e"]))
    server.start()
    client = send(server, "e", x(1))
    eventually(lambda: executed("gate"))
    stopping = threading.Thread(target=server.stop, args=(WAIT_S,))
    stopping.start()
    eventually(lambda: server.is_exiting)
    with pytest.raises(TritonError, match="Server is stopping"):
        send(server, "e", x(1))
    STAGE.open("gate")
    assert one(client) == [4]
    stopping.join()


def test_unloading_a_composing_model_lets_the_requests_of_its_ensembles_end(repository: Repository) -> None:
    parts(repository, "gate", "add")
    chain(repository, "e", "gate", "add")
    with serving(repository, "e") as server:
        client = send(server, "e", x(1))
        eventually(lambda: executed("gate"))
        server.unload_model("add")  # not used yet, but the request will need it
        server.unload_model("gate")
        with pytest.raises(TritonError, match="'e' has no available versions"):
            send(server, "e", x(1))
        assert not any(event.startswith("finalize") for event in STAGE.events)
        STAGE.open("gate")
        assert one(client) == [3]
        eventually(lambda: {"finalize add", "finalize gate"} <= set(STAGE.events))


def test_many_threads_that_send_and_cancel_leave_nothing_behind(repository: Repository) -> None:
    part(repository, "add", "add", config="instance_group { count: 2 }")
    parts(repository, "repeat", "fail")
    chain(repository, "stream", "add", "repeat", "add", scheduling="max_inflight_requests: 2")
    chain(repository, "plain", "add", "add")
    chain(repository, "broken", "repeat", "add", "fail")
    chain(repository, "nested", "plain", "stream")

    def use(server: InferenceServer, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(40):
            name = chance.choice(["stream", "plain", "broken", "nested"])
            client = send(server, name, x(*range(chance.randint(1, 6))))
            if chance.random() < 0.3:
                client.cancel()
            errors = [response.error for response in client.responses() if response.error is not None]
            assert len(errors) <= 1 and (errors or name != "broken")

    with serving(repository, "broken", "nested") as server:
        threads = [threading.Thread(target=use, args=(server, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_the_launcher_keeps_the_order_and_takes_nothing_after_its_end() -> None:
    launcher = StepLauncher("e")
    launcher.stop()  # no thread yet
    launcher = StepLauncher("e")

    def fail() -> None:
        raise ZeroDivisionError

    done: list[int] = []
    for number in range(100):
        launcher.submit(partial(done.append, number))
    launcher.submit(fail)  # logged, and no harm to the next
    launcher.submit(partial(done.append, 100))
    launcher.stop()
    launcher.submit(partial(done.append, 101))
    assert done == list(range(101))
    assert not any(thread.name == "ensemble-e" for thread in threading.enumerate())


# --- limits ---------------------------------------------------------------------------------------------------------


def test_max_inflight_requests_bounds_a_step_and_holds_a_patient_producer_back(repository: Repository) -> None:
    part(repository, "repeat", "repeat", is_patient=True)
    part(repository, "peak", "gate")
    chain(repository, "e", "repeat", "peak", scheduling="max_inflight_requests: 2")
    with serving(repository, "e") as server:
        client = send(server, "e", x(*range(6)))
        eventually(lambda: executed("peak") == 2)
        # Two are under way; the third response waits inside of the producer's send.
        assert not happens(lambda: executed("peak") > 2 or "sent 2" in STAGE.events)
        STAGE.open("peak")
        assert sorted(values(response) for response in client.responses()) == [[1], [2], [3], [4], [5], [6]]


@pytest.mark.parametrize("in_between", ["add", "inner"])
def test_a_patient_producer_also_waits_for_steps_further_behind_it(repository: Repository, in_between: str) -> None:
    part(repository, "repeat", "repeat", is_patient=True)
    part(repository, "add", "add")
    part(repository, "peak", "gate")
    chain(repository, "inner", "repeat", "add", scheduling="max_inflight_requests: 1")
    models = ["inner", "peak"] if in_between == "inner" else ["repeat", "add", "peak"]
    chain(repository, "e", *models, scheduling="max_inflight_requests: 1")
    with serving(repository, "e") as server:
        client = send(server, "e", x(*range(100)))
        eventually(lambda: executed("peak") == 1)
        assert not happens(lambda: "sent 10" in STAGE.events)
        STAGE.open("peak")
        assert len(client.responses()) == 100


def test_a_send_blocks_no_backend_that_did_not_ask_for_it(repository: Repository) -> None:
    """One thread sends for many requests: a full step must not stop the streams beside it."""
    parts(repository, "repeat", "gate", "add")
    chain(repository, "slow", "repeat", "gate", scheduling="max_inflight_requests: 1")
    chain(repository, "quick", "repeat", "add")
    with serving(repository, "slow", "quick") as server:
        stalled = send(server, "slow", x(*range(500)))
        eventually(lambda: "sent 499" in STAGE.events)
        assert [values(response) for response in send(server, "quick", x(1, 2)).responses()] == [[2], [3]]
        assert executed("gate") == 1
        STAGE.open("gate")
        assert [values(response) for response in stalled.responses()] == [[value + 1] for value in range(500)]


def test_a_stream_too_far_ahead_of_its_ensemble_ends_alone_after_what_was_kept(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmbackend.core.scheduling.ensembles.run.MAX_WAITING_BYTES", 100 * RESPONSE_BYTES)
    parts(repository, "repeat", "gate")
    chain(repository, "e", "repeat", "gate", scheduling="max_inflight_requests: 1")
    with serving(repository, "e") as server:
        ahead = send(server, "e", x(*range(50_000)))  # more than it sends before it hears that it should stop
        eventually(lambda: "repeat stopped" in STAGE.events)
        other = send(server, "e", x(7))
        STAGE.open("gate")
        *kept, last = ahead.responses()
        assert [values(response) for response in kept] == [[value + 1] for value in range(len(kept))]
        assert 90 < len(kept) <= 102
        assert last.error is not None and last.error.code is ErrorCode.UNAVAILABLE
        assert "model 'repeat' responds faster than model 'gate' reads" in last.error.message
        assert one(other) == [8]


def test_max_inflight_requests_is_shared_by_all_requests_of_the_ensemble(repository: Repository) -> None:
    part(repository, "gate", "gate")
    part(repository, "free", "add")
    chain(repository, "e", "free", "gate", scheduling="max_inflight_requests: 3")
    with serving(repository, "e") as server:
        clients = [send(server, "e", x(index)) for index in range(10)]
        eventually(lambda: executed("gate") == 3)
        assert not happens(lambda: executed("gate") > 3)
        STAGE.open("gate")
        assert [one(client) for client in clients] == [[index + 2] for index in range(10)]


def test_a_request_that_waits_for_a_slot_can_be_cancelled(repository: Repository) -> None:
    part(repository, "gate", "gate")
    chain(repository, "e", "gate", scheduling="max_inflight_requests: 1")
    with serving(repository, "e") as server:
        first, second, third = (send(server, "e", x(1)) for _ in range(3))
        second.cancel()
        assert second.error().status == "Cancelled: in ensemble 'e', Request cancelled"
        STAGE.open("gate")
        assert one(first) == [2] and one(third) == [2] and executed("gate") == 2


def happens(condition: Callable[[], object], within_s: float = 0.15) -> bool:
    """For what must not happen: waiting longer could only find more."""
    waited = threading.Event()
    threading.Timer(within_s, waited.set).start()
    while not waited.wait(0.01):
        if condition():
            return True
    return bool(condition())


# --- statistics -----------------------------------------------------------------------------------------------------


def test_an_ensemble_counts_its_requests_and_adds_up_the_times_of_its_steps(repository: Repository) -> None:
    parts(repository, "add", "fail")
    chain(repository, "e", "add", "add")
    chain(repository, "outer", "e", "add")
    chain(repository, "broken", "add", "fail")
    with serving(repository, "outer", "broken") as server:
        assert one(send(server, "outer", x(1))) == [4]
        eventually(lambda: counts(server, "outer") == (1, 1, 1, 0))
        send(server, "broken", x(1)).error()
        eventually(lambda: counts(server, "broken") == (0, 0, 0, 1))
        assert counts(server, "add") == (4, 4, 4, 0)
        for name, steps in {"e": 2, "outer": 3}.items():
            (statistics,) = server.model_statistics(name)
            totals, (batch,) = statistics.inference_stats, statistics.batch_stats
            assert totals.compute_input.ns == batch.compute_input.ns == steps * 1000
            assert totals.compute_infer.ns == steps * 2000 and totals.compute_output.ns == steps * 3000
            assert totals.queue.count == 1 and totals.success.ns > 0
        failures = version_of(server, "broken").statistics.failures
        assert {reason.value: count for reason, count in failures.items() if count} == {"OTHER": 1}


def test_an_ensembles_request_is_in_flight_but_never_pending(repository: Repository) -> None:
    part(repository, "gate", "gate")
    chain(repository, "e", "gate")
    with serving(repository, "e") as server:
        client = send(server, "e", x(1))
        eventually(lambda: executed("gate"))
        model = version_of(server, "e")
        assert model.in_flight.count == 1 and model.statistics.pending_count == 0
        STAGE.open("gate")
        assert one(client) == [2]
        eventually(lambda: model.in_flight.count == 0)
