"""In-place updates: other instances without an unload."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from llmbackend.core.backend_api import InstanceGroupKind, ResponseFlag
from llmbackend.core.errors import TritonError
from llmbackend.core.inference_server import InferenceServer
from tests.helpers.core_backends import INSTANCE_BACKEND, states
from tests.helpers.core_host import (
    ECHO_BACKEND,
    KEEPING_BACKEND,
    STAGE,
    WAIT_S,
    Client,
    Repository,
    send,
    serving,
    version_of,
)
from tests.helpers.sequence_host import NO_IDLENESS, SHOWING_BACKEND, sequences, step
from tests.helpers.thread_shortage import no_new_threads
from tests.helpers.waiting import eventually


@pytest.fixture
def repository(repository: Repository) -> Repository:
    repository.backend("b", INSTANCE_BACKEND)
    return repository


def groups(*counts: int, more: str = "") -> str:
    return "".join(f"instance_group {{ count: {count} kind: KIND_CPU {more} }}\n" for count in counts)


def instances(server: InferenceServer) -> list[str]:
    return sorted(instance.name for instance in version_of(server, "m").instances)


def answered_by(server: InferenceServer) -> str:
    (response,) = send(server, "m").responses()
    assert response.error is None
    return bytes(response.outputs[0].data[0]).decode()


def all_answer(server: InferenceServer) -> Callable[[], bool]:
    seen: set[str] = set()

    def condition() -> bool:
        seen.add(answered_by(server))
        return seen == set(instances(server))

    return condition


@contextmanager
def adding_an_instance(repository: Repository) -> Iterator[tuple[InferenceServer, Future[None]]]:
    """A server with m_0_0, and the load that adds m_0_1, which stands at the gate "add" in its initialisation."""
    gated = INSTANCE_BACKEND.replace(
        "    if instance.name in STAGE.kept:", '    if instance.name == "m_0_1": STAGE.wait("add")\n    if False:'
    )
    repository.backend("b", gated)
    repository.model("m", "b", groups(1))
    with serving(repository, "m") as server:
        repository.model("m", "b", groups(2))
        load = server.start_load("m")
        eventually(lambda: "+m_0_1" in STAGE.events)
        yield server, load


def test_more_instances_are_added_live(repository: Repository) -> None:
    repository.model("m", "b", groups(1))
    with serving(repository, "m") as server:
        model = version_of(server, "m")
        repository.model("m", "b", groups(3))
        server.load_model("m")
        assert version_of(server, "m") is model and STAGE.events == ["model", "+m_0_0", "+m_0_1", "+m_0_2"]
        assert instances(server) == ["m_0_0", "m_0_1", "m_0_2"]
        assert server.model_config("m").instance_group[0].count == 3
        eventually(all_answer(server))
    assert STAGE.events.count("no model") == 1 and STAGE.events.count("-m_0_1") == 1


def test_an_instance_is_removed_although_no_thread_can_be_started(repository: Repository) -> None:
    repository.model("m", "b", groups(2))
    with serving(repository, "m") as server:
        repository.model("m", "b", groups(1))
        with no_new_threads("remove-instance"):
            server.load_model("m")
        assert len(instances(server)) == 1
        assert sum(event.startswith("-m_0_") for event in STAGE.events) == 1
        server.unload_model("m")
        eventually(lambda: sum(event.startswith("-m_0_") for event in STAGE.events) == 2)


def test_instances_are_removed_live(repository: Repository) -> None:
    repository.model("m", "b", groups(3))
    with serving(repository, "m") as server:
        threads = threading.active_count()
        repository.model("m", "b", groups(1))
        server.load_model("m")
        assert {"-m_0_1", "-m_0_2"} <= set(STAGE.events)  # they were idle, so the load has waited for them
        assert "no model" not in STAGE.events and instances(server) == ["m_0_0"]
        assert {answered_by(server) for _ in range(20)} == {"m_0_0"}
        eventually(lambda: threading.active_count() <= threads - 2)


def test_the_model_serves_while_an_instance_is_added(repository: Repository) -> None:
    with adding_an_instance(repository) as (server, load):
        assert answered_by(server) == "m_0_0" and states(server) == [("1", "READY", "")] and server.is_ready()
        STAGE.open("add")
        load.result(WAIT_S)
        assert instances(server) == ["m_0_0", "m_0_1"]


def test_a_failed_update_keeps_the_old_instances_and_says_why(repository: Repository) -> None:
    repository.model("m", "b", groups(1))
    with serving(repository, "m") as server:
        STAGE.kept.append("m_0_1")
        repository.model("m", "b", groups(3))
        with pytest.raises(TritonError) as caught:
            server.load_model("m")
        assert caught.value.message == (
            "load failed for model 'm': version 1 is at READY state: Internal: no room for m_0_1;\n"
        )
        assert STAGE.events[-2:] == ["-m_0_1", "-m_0_2"] and instances(server) == ["m_0_0"]
        assert server.model_config("m").instance_group[0].count == 1 and server.is_ready()
        assert answered_by(server) == "m_0_0"
        STAGE.kept.clear()
        server.load_model("m")  # the files are still newer than what serves
        assert instances(server) == ["m_0_0", "m_0_1", "m_0_2"] and "no model" not in STAGE.events


def test_instances_of_groups_with_the_same_name_are_kept_apart(repository: Repository) -> None:
    repository.model("m", "b", groups(1, 1, more='name: "g"'))
    with serving(repository, "m") as server:
        repository.model("m", "b", groups(1, more='name: "g"'))
        server.load_model("m")
        assert instances(server) == ["g_0"] and STAGE.events.count("-g_0") == 1
    assert STAGE.events.count("+g_0") == STAGE.events.count("-g_0") == 2


def test_instances_of_other_settings_are_other_instances(repository: Repository) -> None:
    repository.model("m", "b", groups(2))
    with serving(repository, "m") as server:
        repository.model("m", "b", groups(1) + 'instance_group { count: 1 kind: KIND_MODEL name: "big" }')
        server.load_model("m")
        kinds = {instance.name: instance.kind for instance in version_of(server, "m").instances}
        assert kinds == {"m_0_0": InstanceGroupKind.CPU, "big_0": InstanceGroupKind.MODEL}
        eventually(lambda: "-m_0_1" in STAGE.events)
        repository.model("m", "b", groups(1, more='profile: ["p"]'))
        server.load_model("m")
        eventually(lambda: {"-m_0_0", "-big_0"} <= set(STAGE.events))
        assert "no model" not in STAGE.events and STAGE.events.count("+m_0_0") == 2


def test_a_renamed_group_keeps_its_instances(repository: Repository) -> None:
    repository.model("m", "b", groups(2))
    with serving(repository, "m") as server:
        repository.model("m", "b", groups(2, more='name: "other"'))
        server.load_model("m")
        assert STAGE.events == ["model", "+m_0_0", "+m_0_1"] and instances(server) == ["m_0_0", "m_0_1"]


def test_a_policy_for_more_versions_leaves_those_that_serve_alone(repository: Repository) -> None:
    repository.model("m", "b", "version_policy { specific { versions: [1, 2] } }", versions=(1, 2, 3))
    with serving(repository, "m") as server:
        kept = version_of(server, "m", 2)
        repository.model("m", "b", "version_policy { latest { num_versions: 2 } }", versions=())
        server.load_model("m")
        assert server.model_metadata("m").versions == ("2", "3") and version_of(server, "m", 2) is kept
        eventually(lambda: STAGE.events.count("no model") == 1)


@pytest.mark.parametrize("change", ["configuration", "version", "beside"])
def test_any_other_change_is_a_reload(repository: Repository, change: str) -> None:
    directory = repository.model("m", "b", groups(1))
    with serving(repository, "m") as server:
        repository.model("m", "b", groups(2) + ("max_batch_size: 4" if change == "configuration" else ""))
        if change == "version":
            (directory / "1" / "weights").write_text("x")
        if change == "beside":
            (directory / "labels.txt").write_text("x")
        server.load_model("m")
        assert STAGE.events.count("model") == 2
        eventually(lambda: "no model" in STAGE.events)
        assert instances(server) == ["m_0_0", "m_0_1"]


def test_an_override_may_change_the_instances_in_place(repository: Repository) -> None:
    repository.model("m", "b", groups(1), io="")
    with serving(repository, "m") as server:
        server.load_model("m", {"config": '{"backend":"b","instance_group":[{"count":2,"kind":"KIND_CPU"}]}'})
        assert STAGE.events.count("model") == 1 and instances(server) == ["m_0_0", "m_0_1"]


def test_requests_that_run_on_a_removed_instance_are_finished_first(repository: Repository) -> None:
    repository.backend(
        "keep",
        KEEPING_BACKEND + ('def TRITONBACKEND_ModelInstanceFinalize(instance): STAGE.note("-" + instance.name)\n'),
    )
    repository.model("m", "keep", groups(2))
    with serving(repository, "m") as server:
        clients = {name: send(server, "m", id=name) for name in ("r1", "r2")}
        for name in clients:
            STAGE.wait(f"executed {name}")
        idle = {f"-{name}" for name in instances(server)} - {f"-{instance.name}" for instance, _ in STAGE.kept}
        repository.model("m", "keep", "instance_group { count: 1 kind: KIND_MODEL }")
        server.load_model("m")  # it waits for idle instances alone
        late = send(server, "m", id="late")
        STAGE.wait("executed late")
        assert set(STAGE.events) == idle and server.check()  # the others still have their requests
        for _, request in [kept for kept in STAGE.kept if kept[1].id != "late"]:
            request.new_response().send(ResponseFlag.FINAL)
            request.release()
        eventually(lambda: len(STAGE.events) == 2)  # a request that came later does not keep them
        finish(late)
        for client in clients.values():
            client.responses()
        STAGE.kept.clear()


def finish(late: Client) -> None:
    ((_, request),) = [kept for kept in STAGE.kept if kept[1].id == "late"]
    request.new_response().send(ResponseFlag.FINAL)
    request.release()
    late.responses()


SEQUENCE_BACKEND = (
    SHOWING_BACKEND
    + """
def TRITONBACKEND_ModelInitialize(model): STAGE.note("model")
def TRITONBACKEND_ModelInstanceInitialize(instance): STAGE.note("+" + instance.name)
def TRITONBACKEND_ModelInstanceFinalize(instance): STAGE.note("-" + instance.name)
"""
)


@pytest.mark.parametrize("strategy", ["direct {}", "oldest { max_candidate_sequences: 1 }"])
@pytest.mark.parametrize("rate_limit", ["off", "execution_count"])
def test_a_sequence_goes_on_with_its_instance_when_that_is_removed(
    repository: Repository, strategy: str, rate_limit: str
) -> None:
    repository.backend("s", SEQUENCE_BACKEND)
    STAGE.open("go")
    batching = sequences(NO_IDLENESS + strategy)
    repository.model("m", "s", batching + groups(2))
    with serving(repository, "m", rate_limit=rate_limit) as server:
        for number in (1, 2):
            step(server, number, f"{number}a", start=True).responses()
        executed = [event for event in STAGE.events if ":" in event]
        assert sorted(event[:5] for event in executed) == ["m_0_0", "m_0_1"]
        moved = next(int(event[6]) for event in executed if event.startswith("m_0_1"))
        repository.model("m", "s", batching + groups(1))
        server.load_model("m")
        assert STAGE.events.count("model") == 1 and "-m_0_1" not in STAGE.events
        waiting = step(server, 3, "3a", start=True, end=True)  # its slot is on the instance that stays
        step(server, moved, "b").responses()
        step(server, moved, "c", end=True).responses()
        eventually(lambda: "-m_0_1" in STAGE.events)
        step(server, 3 - moved, "d", end=True).responses()
        waiting.responses()
        assert STAGE.events[-5:] == ["m_0_1:b", "m_0_1:c", "-m_0_1", "m_0_0:d", "m_0_0:3a"]


@pytest.mark.parametrize("strategy", ["direct {}", "oldest { max_candidate_sequences: 1 }"])
def test_an_instance_that_is_added_takes_sequences_that_wait(repository: Repository, strategy: str) -> None:
    repository.backend("s", SEQUENCE_BACKEND)
    STAGE.open("go")
    batching = sequences(NO_IDLENESS + strategy)
    repository.model("m", "s", batching + groups(1))
    with serving(repository, "m") as server:
        step(server, 1, "1a", start=True).responses()
        waiting = step(server, 2, "2a", start=True, end=True)
        repository.model("m", "s", batching + groups(2))
        server.load_model("m")
        waiting.responses()
        assert "m_0_1:2a" in STAGE.events and STAGE.events.count("model") == 1
        step(server, 1, "1b", end=True).responses()


def test_no_sequence_is_given_to_an_instance_that_fails_to_warm_up(repository: Repository) -> None:
    cold = 'if instance.name == "m_0_1": raise RuntimeError("cold")\n    '
    repository.backend("s", SEQUENCE_BACKEND.replace("STAGE.kept.append", f"{cold}STAGE.kept.append"))
    STAGE.open("go")
    zeros = 'inputs { key: "X" value { data_type: TYPE_FP32 dims: 2 zero_data: true } }'
    batching = sequences(NO_IDLENESS, more=f'model_warmup {{ name: "w" batch_size: 1 {zeros} }}\n')
    repository.model("m", "s", batching + groups(1))
    with serving(repository, "m") as server:
        step(server, 1, "1a", start=True).responses()
        waiting = step(server, 2, "2a", start=True, end=True)
        repository.model("m", "s", batching + groups(2))
        with pytest.raises(TritonError, match="cold"):
            server.load_model("m")
        step(server, 1, "1b", end=True).responses()
        waiting.responses()
        assert STAGE.events[-1] == "m_0_0:2a"


def test_no_request_is_lost_while_instances_come_and_go(repository: Repository) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo", groups(1))
    with serving(repository, "m") as server:
        stop, failures = threading.Event(), []

        def ask() -> None:
            while not stop.is_set():
                (response,) = send(server, "m").responses()
                if response.error is not None:
                    failures.append(response.error)

        askers = [threading.Thread(target=ask) for _ in range(4)]
        for asker in askers:
            asker.start()
        for count in (3, 1, 4, 2, 1):
            repository.model("m", "echo", groups(count))
            server.load_model("m")
        stop.set()
        for asker in askers:
            asker.join(WAIT_S)
        assert failures == [] and server.model_statistics("m")[0].inference_count > 0


def test_an_unload_during_an_update_waits_for_it(repository: Repository) -> None:
    with adding_an_instance(repository) as (server, load):
        server.unload_model("m")
        assert states(server) == [("1", "UNLOADING", "")] and "no model" not in STAGE.events
        STAGE.open("add")
        with pytest.raises(TritonError, match="Newer operation has been applied"):
            load.result(WAIT_S)
        eventually(lambda: states(server) == [("1", "UNAVAILABLE", "unloaded")])
        assert sorted(STAGE.events[-3:]) == ["-m_0_0", "-m_0_1", "no model"]
