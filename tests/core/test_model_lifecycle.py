"""Load, reload, unload and stop: states, reasons, draining (golden 05 to 08, 50, 51, 57)."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmbackend.core import inference_server
from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.lifecycle import model_lifecycle
from llmbackend.core.lifecycle.model_lifecycle import ModelLifecycle
from llmbackend.core.repository.model_files import ModelIdentifier, ModelNames
from llmbackend.core.repository.model_repository import ModelSpec
from tests.helpers.core_backends import VERSIONED_BACKEND, answer, refused, states, write_version
from tests.helpers.core_host import (
    ECHO_BACKEND,
    KEEPING_BACKEND,
    STAGE,
    WAIT_S,
    Repository,
    noting_backend,
    send,
    serving,
    version_of,
)
from tests.helpers.thread_shortage import no_new_threads
from tests.helpers.waiting import eventually


@pytest.fixture
def versioned(repository: Repository) -> Repository:
    repository.backend("v", VERSIONED_BACKEND)
    return repository


def load_in_background(server: InferenceServer, name: str = "m") -> threading.Thread:
    def load() -> None:
        try:
            server.load_model(name)
        except TritonError as error:
            STAGE.note(error.message)

    thread = threading.Thread(target=load)
    thread.start()
    return thread


def test_look_up_errors_have_the_texts_of_triton(versioned: Repository) -> None:
    write_version(versioned, "one")
    with serving(versioned) as server:
        error = refused(server)
        assert (error.code, error.message) == (ErrorCode.NOT_FOUND, "Request for unknown model: 'm' is not found")
        server.load_model("m")
        assert refused(server, version=9).message == "Request for unknown model: 'm' version 9 is not found"
        server.unload_model("m")
        assert refused(server).message == "Request for unknown model: 'm' has no available versions"
        error = refused(server, version=1)
        assert error.status == "Unavailable: Request for unknown model: 'm' version 1 is not at ready state"


def test_a_model_without_a_version_takes_readiness_and_is_left_out_of_the_index(versioned: Repository) -> None:
    """As Triton's test_parse_error_modelfail: a probe must not send traffic to a server that lacks the model."""
    write_version(versioned, "one")
    (versioned.model("empty", "v") / "1").rmdir()
    with serving(versioned, "m", "empty", exit_on_error=False) as server:
        assert server.is_live() and not server.is_ready() and server.model_is_ready("m")
        assert [row.name for row in server.repository_index()] == ["m"]
        assert refused(server, "empty").message == "Request for unknown model: 'empty' has no available versions"
        server.unload_model("empty")
        assert server.is_ready() and [row.name for row in server.repository_index()] == ["empty", "m"]
    with serving(versioned, "m", "empty", exit_on_error=False, strict_readiness=False) as server:
        assert server.is_ready()


def test_a_repository_that_does_not_exist_takes_liveness_and_the_other_one_is_served(
    versioned: Repository, tmp_path: Path
) -> None:
    write_version(versioned, "one")
    lost = tmp_path / "lost"
    with pytest.raises(TritonError, match=r"lost: a model repository must be a directory"):
        InferenceServer(versioned.options(model_repositories=[lost, versioned.models])).start()
    with serving(versioned, "m", model_repositories=[lost, versioned.models], exit_on_error=False) as server:
        assert not server.is_live() and not server.is_ready()
        assert states(server) == [("1", "READY", "")] and answer(server) == "one"


def test_states_from_never_loaded_to_unloaded(versioned: Repository) -> None:
    write_version(versioned, "one")
    with serving(versioned) as server:
        assert states(server) == [("", "", "")] and server.is_ready()
        server.load_model("m")
        assert states(server) == [("1", "READY", "")]
        assert [row.name for row in server.repository_index(ready_only=True)] == ["m"]
        server.unload_model("m")
        eventually(lambda: states(server) == [("1", "UNAVAILABLE", "unloaded")])
        assert server.is_ready() and not server.model_is_ready("m")
        assert server.repository_index(ready_only=True) == []
    assert STAGE.events == ["initialize one", "finalize one"]


def test_a_failed_load_keeps_its_reason_and_takes_readiness(versioned: Repository) -> None:
    write_version(versioned, "bad")
    with serving(versioned) as server:
        with pytest.raises(TritonError) as caught:
            server.load_model("m")
        assert caught.value.code is ErrorCode.INVALID_ARG
        assert caught.value.message == (
            "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: weights missing;\n"
        )
        expected = [("1", "UNAVAILABLE", "Internal: weights missing")]
        assert states(server) == expected and not server.is_ready()
        server.unload_model("m")
        assert states(server) == expected and not server.is_ready()
        assert refused(server).message == "Request for unknown model: 'm' has no available versions"


@pytest.mark.parametrize("name", ["nosuch", "badcfg", "wrongname"])
def test_a_model_that_can_not_be_polled(versioned: Repository, name: str, caplog: pytest.LogCaptureFixture) -> None:
    (versioned.model("badcfg", "v") / "config.pbtxt").write_text('backend: "v" nonsense: 1')
    (versioned.model("wrongname", "v") / "config.pbtxt").write_text('name: "other" backend: "v"')
    with serving(versioned) as server, pytest.raises(TritonError) as caught:
        server.load_model(name)
    assert caught.value.status == f"Internal: failed to load '{name}', failed to poll from model repository"
    cause = {"nosuch": "is in no model repository", "badcfg": "nonsense", "wrongname": "must equal model name"}
    assert cause[name] in caplog.text


@pytest.mark.parametrize("name", ["", "..", "a/b", "."])
def test_model_names_can_not_leave_the_repository(versioned: Repository, name: str) -> None:
    with serving(versioned) as server:
        for action in (server.load_model, server.unload_model):
            with pytest.raises(TritonError) as caught:
                action(name)
            assert caught.value.code is ErrorCode.INVALID_ARG


def test_loading_an_unchanged_model_does_nothing(versioned: Repository) -> None:
    write_version(versioned, "one")
    with serving(versioned, "m") as server:
        (versioned.models / "m" / "1" / "__pycache__").mkdir()
        (versioned.models / "m" / "1" / "__pycache__" / "model.pyc").write_text("x")
        server.load_model("m")
        assert STAGE.events == ["initialize one"]


def test_a_reload_has_no_gap_and_drains_the_old_version(versioned: Repository) -> None:
    write_version(versioned, "one")
    with serving(versioned, "m") as server:
        write_version(versioned, "gate two")
        thread = load_in_background(server)
        STAGE.wait("loading gate two")
        assert answer(server) == "one" and states(server) == [("1", "READY", "")] and server.is_ready()
        STAGE.open("gate two")
        thread.join(WAIT_S)
        assert answer(server) == "gate two" and states(server) == [("1", "READY", "")]
        eventually(lambda: "finalize one" in STAGE.events)


def test_a_failed_reload_leaves_the_old_version_serving(versioned: Repository) -> None:
    write_version(versioned, "one")
    with serving(versioned, "m") as server:
        write_version(versioned, "bad two")
        with pytest.raises(TritonError, match="weights missing"):
            server.load_model("m")
        assert answer(server) == "one" and server.is_ready() and states(server) == [("1", "READY", "")]


def served_as(name: str) -> str:
    return f'parameters {{ key: "served_model_name" value {{ string_value: "{name}" }} }}'


def test_a_failed_reload_leaves_the_names_of_the_old_version(versioned: Repository) -> None:
    write_version(versioned, "one", config=served_as("org/m:1"))
    with serving(versioned, "m") as server:
        write_version(versioned, "bad", config=served_as("org/m:2"))
        with pytest.raises(TritonError, match="weights missing"):
            server.load_model("m")
        assert answer(server, "org/m:1") == "one"
        write_version(versioned, "two", config=served_as("org/m:2"))
        server.load_model("m")
        assert answer(server, "org/m:2") == "two"
        assert refused(server, "org/m:1").message == "Request for unknown model: 'org/m:1' is not found"


def test_a_version_may_be_a_link_to_another_directory(versioned: Repository, tmp_path: Path) -> None:
    for release in ("one", "two"):
        (tmp_path / release).mkdir()
        (tmp_path / release / "text").write_text(release)
        (tmp_path / release / "loop").symlink_to(tmp_path / release)
    link = versioned.models / "m" / "1"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "one")
    versioned.model("m", "v", versions=())
    with serving(versioned, "m") as server:
        assert answer(server) == "one"
        link.unlink()
        link.symlink_to(tmp_path / "two")
        server.load_model("m")
        assert answer(server) == "two"
        (tmp_path / "two" / "text").write_text("three")
        server.load_model("m")
        assert answer(server) == "three"
        server.load_model("m")
        assert STAGE.events.count("initialize three") == 1


def test_a_first_load_shows_loading(versioned: Repository) -> None:
    write_version(versioned, "gate", config=served_as("org/m"))
    with serving(versioned) as server:
        thread = load_in_background(server)
        STAGE.wait("loading gate")
        assert states(server) == [("1", "LOADING", "")] and not server.is_ready() and not server.model_is_ready("m")
        for name in ("m", "org/m"):
            assert refused(server, name).message.endswith("has no available versions")
        STAGE.open("gate")
        thread.join(WAIT_S)
        assert server.is_ready()


def test_a_load_overtaken_by_an_unload_undoes_itself(versioned: Repository) -> None:
    write_version(versioned, "gate")
    with serving(versioned) as server:
        thread = load_in_background(server)
        STAGE.wait("loading gate")
        server.unload_model("m")
        STAGE.open("gate")
        thread.join(WAIT_S)
        assert "Newer operation has been applied to the model lifecycle" in STAGE.events[-1] or (
            "Newer operation has been applied to the model lifecycle" in STAGE.events[-2]
        )
        eventually(lambda: "finalize gate" in STAGE.events)
        assert states(server) == [("1", "UNAVAILABLE", "unloaded")]


def test_a_load_that_overtakes_an_unload_keeps_its_names(
    versioned: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_version(versioned, "one", config=served_as("org/m"))
    with serving(versioned) as server:
        load = ModelLifecycle.load

        def unload_first(lifecycle: ModelLifecycle, spec: ModelSpec) -> None:
            server.unload_model("m")  # another operator's, which has forgotten the names when the versions load
            load(lifecycle, spec)

        monkeypatch.setattr(ModelLifecycle, "load", unload_first)
        server.load_model("m")
        assert answer(server, "m") == answer(server, "org/m") == "one"


def test_an_unload_that_overtakes_the_end_of_a_load_leaves_no_names(
    versioned: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_version(versioned, "one", config=served_as("org/m"))
    with serving(versioned) as server:
        add, calls = ModelNames.add, 0

        def unload_first(names: ModelNames, name: str, key: ModelIdentifier) -> bool:
            nonlocal calls
            calls += 1
            if calls == 2:  # when the versions have loaded
                server.unload_model("m")
            return add(names, name, key)

        monkeypatch.setattr(ModelNames, "add", unload_first)
        server.load_model("m")
        monkeypatch.undo()
        assert calls == 2
        assert not server.model_is_ready("m") and not server.model_is_ready("org/m")
        write_version(versioned, "two", name="other", config=served_as("org/m"))
        server.load_model("other")
        assert answer(server, "org/m") == "two"


def test_versions_are_all_loaded_or_none(versioned: Repository) -> None:
    config = "version_policy { all {} }"
    write_version(versioned, "one", config=config)
    write_version(versioned, "bad", version=2, config=config)
    with serving(versioned) as server:
        with pytest.raises(TritonError, match="version 2 is at UNAVAILABLE state: Internal: weights missing;"):
            server.load_model("m")
        eventually(lambda: "finalize one" in STAGE.events)
        assert states(server) == [("1", "UNAVAILABLE", "unloaded"), ("2", "UNAVAILABLE", "Internal: weights missing")]
        write_version(versioned, "two", version=2, config=config)
        server.load_model("m")
        assert (answer(server), answer(server, version=1)) == ("two", "one")
        assert server.model_metadata("m").versions == ("1", "2")
        assert server.model_metadata("m", 1).versions == ("1",)


def test_a_reload_with_another_policy_retires_the_other_versions(versioned: Repository) -> None:
    for version in (1, 2, 3):
        write_version(
            versioned, str(version), version=version, config="version_policy { specific { versions: [1, 3] } }"
        )
    with serving(versioned, "m") as server:
        assert server.model_metadata("m").versions == ("1", "3")
        versioned.model("m", "v", "version_policy { latest { num_versions: 2 } }", versions=())
        server.load_model("m")
        assert server.model_metadata("m").versions == ("2", "3")
        eventually(lambda: ("1", "UNAVAILABLE", "unloaded") in states(server))


def test_version_directories_with_odd_names_are_ignored(
    versioned: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    write_version(versioned, "one", config="version_policy { all {} }")
    for odd in ("02", "x3", "-4"):
        (versioned.models / "m" / odd).mkdir()
    with serving(versioned, "m") as server:
        assert server.model_metadata("m").versions == ("1",)
    assert "'02' which contains leading zeros" in caplog.text and "'x3'" in caplog.text


def test_a_model_without_a_version_fails_to_load(versioned: Repository) -> None:
    (versioned.models / "m").mkdir()
    (versioned.models / "m" / "config.pbtxt").write_text('backend: "v"')
    with serving(versioned) as server, pytest.raises(TritonError) as caught:
        server.load_model("m")
    assert "at least one version must be available under the version policy of model 'm'" in caught.value.message


def test_unload_waits_for_an_open_factory(repository: Repository) -> None:
    repository.backend("keep", KEEPING_BACKEND)
    repository.model("m", "keep")
    with serving(repository, "m") as server:
        client = send(server, "m", id="r")
        STAGE.wait("executed r")
        _, request = STAGE.kept.pop()
        factory = request.response_factory()
        request.release()
        server.unload_model("m")
        server.unload_model("m")
        assert states(server) == [("1", "UNLOADING", "")] and not server.is_ready()
        assert refused(server, version=1).code is ErrorCode.UNAVAILABLE
        factory.new_response().send(ResponseFlag.FINAL)
        assert len(client.responses()) == 1
        assert states(server) == [("1", "UNLOADING", "")] and STAGE.events == []  # the factory is still open
        factory.close()
        eventually(lambda: states(server) == [("1", "UNAVAILABLE", "unloaded")])
        assert STAGE.events == ["ModelFinalize"]


def test_a_model_can_be_loaded_again_while_it_drains(repository: Repository) -> None:
    repository.backend("keep", KEEPING_BACKEND)
    repository.model("m", "keep")
    with serving(repository, "m") as server:
        client = send(server, "m", id="r")
        STAGE.wait("executed r")
        server.unload_model("m")
        server.load_model("m")
        assert server.model_is_ready("m")
        _, request = STAGE.kept.pop()
        request.new_response().send(ResponseFlag.FINAL)
        request.release()
        client.responses()
        eventually(lambda: STAGE.events == ["ModelFinalize"])
        assert states(server) == [("1", "READY", "")]


def test_stop_cuts_off_what_runs_too_long_and_finalises_the_rest(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(inference_server, "UNLOAD_GRACE_S", 0.05)
    repository.backend("keep", KEEPING_BACKEND)
    repository.model("m", "keep")
    server = InferenceServer(repository.options(startup_models=["m"]))
    server.start()
    client = send(server, "m", id="r")
    STAGE.wait("executed r")
    assert server.stop(0.0) is False and server.is_exiting and server.is_live() and not server.is_ready()
    assert client.error().status == (
        "Unavailable: [request id: r] Server is stopping: the exit timeout expired before the request was finished"
    )
    assert "Model 'm' (version 1): cut off 1 requests: 'r'" in caplog.text
    assert refused(server).code is ErrorCode.UNAVAILABLE
    with pytest.raises(TritonError, match="Server is stopping"):
        server.load_model("m")
    assert server.check()
    _, request = STAGE.kept.pop()
    assert request.is_cancelled
    caplog.clear()
    request.new_response().send(ResponseFlag.FINAL)
    request.release()
    assert "after its final one" not in caplog.text  # the backend did nothing wrong
    before = threading.active_count()
    assert server.stop(WAIT_S) and STAGE.events == ["ModelFinalize"]
    assert client.events.empty() and server.check() == []
    assert threading.active_count() < before


def test_a_model_that_does_not_drain_is_named_in_the_log(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_lifecycle, "FIRST_DRAIN_LOG_S", 0.01)
    repository.backend("keep", KEEPING_BACKEND)
    repository.model("m", "keep")
    with serving(repository, "m") as server:
        send(server, "m", id="r")
        STAGE.wait("executed r")
        server.unload_model("m")
        eventually(lambda: "Model 'm' (version 1) is draining: 1 in-flight inferences" in caplog.text)
        _, request = STAGE.kept.pop()
        request.release()
        eventually(lambda: states(server) == [("1", "UNAVAILABLE", "unloaded")])


def test_a_request_that_its_backend_loses_does_not_keep_its_model(repository: Repository) -> None:
    repository.backend("lose", "def TRITONBACKEND_ModelInstanceExecute(instance, requests): pass")
    repository.model("m", "lose")
    with serving(repository, "m") as server:
        clients = [send(server, "m") for _ in range(3)]
        server.unload_model("m")
        eventually(lambda: states(server) == [("1", "UNAVAILABLE", "unloaded")])
        assert {client.error().code for client in clients} == {ErrorCode.INTERNAL}


def test_stop_while_models_load(versioned: Repository) -> None:
    write_version(versioned, "gate")
    server = InferenceServer(versioned.options(startup_models=["m"], model_load_retry_count=3))
    with ThreadPoolExecutor(2) as pool:
        start = pool.submit(server.start)
        STAGE.wait("loading gate")
        stop = pool.submit(server.stop, WAIT_S)
        eventually(lambda: server.is_exiting)
        assert not server.is_ready() and not stop.done()
        STAGE.open("gate")
        assert stop.result(WAIT_S) is True
        with pytest.raises(TritonError, match="Server is stopping"):
            start.result(WAIT_S)
    assert STAGE.events == ["initialize gate", "finalize gate"] and not server.is_ready()


def test_stop_does_not_wait_for_a_load_that_hangs(versioned: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_server, "UNLOAD_GRACE_S", 0.05)
    write_version(versioned, "gate")
    server = InferenceServer(versioned.options())
    server.start()
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(server.load_model, "m")
        STAGE.wait("loading gate")
        assert server.stop(0.0) is False
        STAGE.open("gate")
        with pytest.raises(TritonError):
            load.result(WAIT_S)
    assert server.stop(WAIT_S) is True and STAGE.events == ["initialize gate", "finalize gate"]


def test_config_override_replaces_the_file_until_unload(versioned: Repository) -> None:
    write_version(versioned, "one", config="max_batch_size: 8\ninstance_group { count: 1 }")
    override = '{"backend":"v","max_batch_size":2,"input":[{"name":"X","data_type":"TYPE_FP32","dims":[4]}]}'
    with serving(versioned, "m") as server:
        server.load_model("m", {"config": override})
        config = server.model_config("m")
        assert (config.max_batch_size, config.instance_group[0].name) == (2, "m")
        server.load_model("m")
        assert server.model_config("m").max_batch_size == 2
        server.unload_model("m")
        server.load_model("m")
        config = server.model_config("m")
        assert (config.max_batch_size, config.instance_group[0].name) == (8, "m_0")
        for bad in ("notjson", '{"max_batch_size":"x"}', '{"nonsense":1}', "[]"):
            with pytest.raises(TritonError, match="failed to poll from model repository"):
                server.load_model("m", {"config": bad})
        assert server.model_is_ready("m")


@pytest.mark.parametrize("path", ["1/text", "/1/text"])
def test_file_override_makes_a_model_from_memory(versioned: Repository, path: str) -> None:
    parameters: dict[str, str | bytes] = {"config": '{"backend":"v"}', f"file:{path}": b"from memory"}
    with serving(versioned) as server:
        server.load_model("mem", parameters)
        assert answer_of_no_input(server) == "from memory"
        directory = version_of(server, "mem").directory
        assert directory.is_dir() and server.repository_index() == []
        with pytest.raises(TritonError, match="failed to poll"):
            server.load_model("mem", {"file:1/text": b"no config"})
        for path in ("../evil", "/../evil", ""):
            with pytest.raises(TritonError, match="must stay inside the model directory"):
                server.load_model("mem", {"config": '{"backend":"v"}', f"file:{path}": b"x"})
        server.unload_model("mem")
        eventually(lambda: not directory.exists())
    assert not (versioned.models.parent / "evil").exists()


def answer_of_no_input(server: InferenceServer) -> str:
    from llmbackend.core.messages import InferenceRequest
    from tests.helpers.core_host import Client

    client = Client()
    server.infer_async(InferenceRequest("mem"), client)
    return bytes(client.responses()[0].outputs[0].data[0]).decode()


def test_mode_none_loads_everything_and_refuses_control(versioned: Repository) -> None:
    write_version(versioned, "a", name="a")
    write_version(versioned, "b", name="b")
    with serving(versioned, model_control_mode="none") as server:
        assert [row.state for row in server.repository_index()] == ["READY", "READY"]
        for action in (server.load_model, server.unload_model):
            with pytest.raises(TritonError) as caught:
                action("a")
            assert caught.value.status == (
                "Unavailable: explicit model load / unload is not allowed if polling is enabled"
            )


def test_a_failed_startup_model_stops_the_server_unless_told_otherwise(versioned: Repository) -> None:
    write_version(versioned, "bad", name="bad")
    write_version(versioned, "ok", name="ok")
    server = InferenceServer(versioned.options(startup_models=["bad", "ok"]))
    with pytest.raises(TritonError) as caught:
        server.start()
    assert caught.value.status == "Internal: failed to load all models"
    assert not server.is_live() and "finalize ok" in STAGE.events
    with serving(versioned, "bad", "ok", exit_on_error=False) as server:
        assert server.is_live() and not server.is_ready() and server.model_is_ready("ok")
    with serving(versioned, "bad", "ok", exit_on_error=False, strict_readiness=False) as server:
        assert server.is_ready()


def test_a_wildcard_startup_model_must_be_alone(versioned: Repository) -> None:
    write_version(versioned, "one")
    with serving(versioned, "*") as server:
        assert server.model_is_ready("m")
    with pytest.raises(TritonError, match="must be the ONLY startup model"):
        InferenceServer(versioned.options(startup_models=["*", "m"])).start()


def test_a_missing_repository_is_refused(versioned: Repository) -> None:
    versioned.models = Path("/nonexistent/models")
    with pytest.raises(TritonError, match="/nonexistent/models"):
        InferenceServer(versioned.options()).start()


def test_a_model_in_two_repositories_is_unavailable(versioned: Repository, tmp_path: Path) -> None:
    write_version(versioned, "one")
    second = tmp_path / "second"
    (second / "m" / "1").mkdir(parents=True)
    from llmbackend.core.server_options import ServerOptions

    server = InferenceServer(
        ServerOptions([versioned.models, second], model_control_mode="explicit", backend_directory=versioned.backends)
    )
    server.start()
    assert states(server) == [("", "UNAVAILABLE", "model appears in two or more repositories")]
    with pytest.raises(TritonError, match="failed to poll"):
        server.load_model("m")
    assert server.stop(WAIT_S)


def test_readiness_asks_every_instance(repository: Repository) -> None:
    path = repository.backend("b", noting_backend())
    repository.model("m", "b", "instance_group { count: 2 }")
    with serving(repository, "m") as server:
        assert server.is_ready() and STAGE.events.count("Ready") == 2
    path.write_text(noting_backend("Ready"))
    with serving(repository, "m") as server:
        assert not server.is_ready() and not server.model_is_ready("m") and server.is_live()
        assert states(server) == [("1", "UNAVAILABLE", "no Ready")]


def test_loads_are_retried(repository: Repository) -> None:
    repository.backend(
        "flaky",
        ECHO_BACKEND
        + """
def TRITONBACKEND_ModelInitialize(model):
    from tests.helpers.core_host import STAGE
    STAGE.note("try")
    assert len(STAGE.events) == 3, "not yet"
""",
    )
    repository.model("m", "flaky")
    with serving(repository, "m", model_load_retry_count=2) as server:
        assert server.model_is_ready("m") and STAGE.events == ["try"] * 3


def test_a_load_for_which_no_thread_can_be_started_fails(versioned: Repository) -> None:
    write_version(versioned, "one")
    with serving(versioned) as server:
        for prefix in ("unload", "model-load"):
            with no_new_threads(prefix), pytest.raises(TritonError, match="can't start new thread"):
                server.load_model("m")
            assert [state for _, state, _ in states(server)] == ["UNAVAILABLE"]
        with no_new_threads("control"), pytest.raises(TritonError, match="the load cannot begin now") as caught:
            server.start_load("m")
        assert caught.value.code is ErrorCode.UNAVAILABLE
        server.start_load("m").result(WAIT_S)
        assert answer(server) == "one"
        assert STAGE.events == ["initialize one"]


@pytest.mark.parametrize("prefix", ["reaper", "timer", "load"])
def test_a_server_that_lacks_threads_does_not_start(versioned: Repository, prefix: str) -> None:
    for name in ("m", "n"):
        (versioned.model(name, "v") / "1" / "text").write_text("one")
    server = InferenceServer(versioned.options(startup_models=("m", "n")))
    with no_new_threads(prefix), pytest.raises(TritonError, match="the server cannot start: can't start new thread"):
        server.start()
    assert not server.is_live()


def test_a_model_is_unloaded_although_no_thread_can_be_started(versioned: Repository) -> None:
    write_version(versioned, "one")
    with serving(versioned, "m") as server:
        with no_new_threads():
            server.unload_model("m")
            eventually(lambda: states(server) == [("1", "UNAVAILABLE", "unloaded")])
        server.load_model("m")
        assert answer(server) == "one"


def test_any_sequence_of_operations_keeps_what_holds(versioned: Repository) -> None:
    """Random loads (good, bad), unloads and requests from three threads: no request is lost, and at the end as many
    models were finalised as initialised."""
    write_version(versioned, "good 0")

    def operate(server: InferenceServer, seed: int) -> None:
        chance = random.Random(seed)
        for step in range(25):
            action = chance.choice(["load", "bad", "unload", "infer", "infer"])
            try:
                if action == "infer":
                    assert answer(server).startswith("good")
                elif action == "unload":
                    server.unload_model("m")
                else:
                    text = "bad" if action == "bad" else "good"
                    fresh = versioned.models.parent / f"text-{seed}"
                    fresh.write_text(f"{text} {seed}.{step}")
                    fresh.replace(versioned.models / "m" / "1" / "text")
                    server.load_model("m")
            except TritonError as error:
                expected = {ErrorCode.NOT_FOUND, ErrorCode.INVALID_ARG}
                if action == "unload":  # a load at the same time may leave a version that serves
                    expected.add(ErrorCode.INTERNAL)
                assert error.code in expected, error

    with serving(versioned) as server, ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(operate, server, seed) for seed in range(3)]:
            future.result(WAIT_S * 3)
    begun = sum(event.startswith("initialize") for event in STAGE.events)
    assert begun == sum(event.startswith("finalize") for event in STAGE.events) > 3


@pytest.mark.parametrize("name", ["...", "a..b"])
def test_dots_in_a_name_are_no_way_out(versioned: Repository, name: str) -> None:
    path = versioned.model(name, "v") / "1" / "text"
    path.write_text("dots")
    with serving(versioned, name) as server:
        assert server.model_is_ready(name)
