"""Several repositories, --model-namespacing, --model-config-name."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from llmbackend.core.backend_api import RequestFlag
from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.inference_server import InferenceServer
from tests.helpers.core_backends import STREAMING_BACKEND, VERSIONED_BACKEND, answer, refused, states
from tests.helpers.core_host import ECHO_BACKEND, IDENTITY_IO, STAGE, WAIT_S, Repository, send, serving, x
from tests.helpers.ensemble_host import chain, part
from tests.helpers.waiting import eventually

AMBIGUOUS = "There are 2 identifiers of model 'm' in global map, model namespace must be provided to resolve ambiguity."


@pytest.fixture
def repository(repository: Repository) -> Repository:
    repository.backend("v", VERSIONED_BACKEND)
    return repository


def roots(repository: Repository) -> list[Path]:
    return [repository.models.parent / "first", repository.models.parent / "second"]


def add(root: Path, text: str, name: str = "m", config: str = "") -> None:
    (root / name / "1").mkdir(parents=True, exist_ok=True)
    (root / name / "1" / "text").write_text(text)
    (root / name / "config.pbtxt").write_text(f'backend: "v"\n{IDENTITY_IO}\n{config}\n')


def options(repository: Repository, **more: Any) -> dict[str, Any]:
    return {"model_repositories": roots(repository), "model_control_mode": "none", **more}


def codes(server: InferenceServer, name: str = "m") -> tuple[ErrorCode, str]:
    error = refused(server, name)
    return error.code, error.message


def test_models_of_several_repositories_are_served_side_by_side(repository: Repository) -> None:
    first, second = roots(repository)
    add(first, "one")
    add(second, "two", name="n")
    with serving(repository, **options(repository)) as server:
        assert (answer(server), answer(server, "n")) == ("one", "two")
        assert [row.name for row in server.repository_index()] == ["m", "n"]


def test_without_namespacing_a_name_in_two_repositories_can_not_be_served(repository: Repository) -> None:
    for root in roots(repository):
        add(root, root.name)
    settings = options(repository, model_control_mode="explicit")
    with serving(repository, **settings) as server:
        assert states(server) == [("", "UNAVAILABLE", "model appears in two or more repositories")]
        with pytest.raises(TritonError, match="failed to load 'm', failed to poll from model repository"):
            server.load_model("m")
    with pytest.raises(TritonError, match="failed to load all models"), serving(repository, **options(repository)):
        pass


def test_with_namespacing_both_are_loaded_and_only_what_is_unique_can_be_asked(repository: Repository) -> None:
    first, second = roots(repository)
    add(first, "one")
    add(second, "two")
    add(second, "three", name="n")
    with serving(repository, **options(repository, model_namespacing=True)) as server:
        assert [(row.name, row.state) for row in server.repository_index()] == [
            ("m", "READY"),
            ("m", "READY"),
            ("n", "READY"),
        ]
        assert server.is_ready() and answer(server, "n") == "three"
        assert server.model_metadata("n").name == server.model_statistics("n")[0].name == "n"
        assert codes(server) == (ErrorCode.INVALID_ARG, AMBIGUOUS)
        assert not server.model_is_ready("m") and server.model_is_ready("n")
        for ask in (server.model_metadata, server.model_config):
            with pytest.raises(TritonError, match="model namespace must be provided"):
                ask("m")
        with pytest.raises(TritonError, match="requested model 'm' is not available"):
            server.model_statistics("m")
        assert refused(server, "n", version=9).message == (
            f"Request for unknown model: '{second}::n' version 9 is not found"
        )
        assert [row.name for row in server.model_statistics()] == ["m", "m", "n"]
        assert codes(server, "x") == (ErrorCode.INVALID_ARG, "Request for unknown model: 'x' is not found")


def test_every_door_resolves_a_name_in_the_same_way(repository: Repository) -> None:
    repository.backend("v", STREAMING_BACKEND)
    for root in roots(repository):
        add(root, root.name)
    add(roots(repository)[0], "alone", name="n", config="model_transaction_policy { decoupled: true }")
    with serving(repository, **options(repository, model_namespacing=True)) as server:
        assert server.is_decoupled("n") and server.cancel_requests("n", -1, "a") == 0
        keys = [f"{root}::m" for root in roots(repository)]
        clients = [send(server, key, id="a") for key in keys]
        for key in keys:
            STAGE.wait("executed a")
            assert not server.is_decoupled(key)
        for ask in (server.is_decoupled, lambda name: server.cancel_requests(name, -1, "a")):
            with pytest.raises(TritonError, match="model namespace must be provided"):
                ask("m")
        eventually(lambda: len(STAGE.kept) == 2)
        for key, client in zip(keys, clients, strict=True):
            assert server.cancel_requests(key, -1, "a") == 1
            assert client.error().code is ErrorCode.CANCELLED


def test_a_sequence_goes_on_while_a_server_with_namespaces_stops(repository: Repository) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo", "sequence_batching { max_sequence_idle_microseconds: 60000000 }")
    server = InferenceServer(repository.options(model_namespacing=True, startup_models=["m"]))
    server.start()
    send(server, "m", correlation_id=7, flags=RequestFlag.SEQUENCE_START).responses()
    stopping = threading.Thread(target=server.stop, args=(WAIT_S,))
    stopping.start()
    eventually(lambda: server.is_exiting)
    assert send(server, "m", correlation_id=7, flags=RequestFlag.SEQUENCE_END).responses()[0].error is None
    stopping.join()


def test_metrics_name_the_namespace(repository: Repository) -> None:
    for root in roots(repository):
        add(root, root.name)
    with serving(repository, **options(repository, model_namespacing=True)) as server:
        text = generate_latest(server.metrics_registry).decode()
        for root in roots(repository):
            assert f'nv_inference_request_success{{model="m",namespace="{root}",version="1"}} 0.0' in text


def test_a_load_and_an_unload_concern_every_model_of_the_name(repository: Repository) -> None:
    first, second = roots(repository)
    add(first, "one")
    add(second, "two")
    settings = options(repository, model_namespacing=True, model_control_mode="explicit")
    with serving(repository, **settings) as server:
        server.load_model("m")
        assert sorted(STAGE.events) == ["initialize one", "initialize two"]
        add(second, "three")
        server.load_model("m")
        assert sorted(STAGE.events)[-3:] == ["initialize one", "initialize three", "initialize two"]
        server.unload_model("m")
        eventually(lambda: {"finalize one", "finalize three"} <= set(STAGE.events))
        assert codes(server) == (ErrorCode.NOT_FOUND, "Identifier of model 'm' is not found in global map")


def test_one_of_two_that_fails_is_named_with_its_namespace(repository: Repository) -> None:
    first, second = roots(repository)
    add(first, "one")
    add(second, "bad")
    settings = options(repository, model_namespacing=True, model_control_mode="explicit")
    with serving(repository, **settings) as server:
        with pytest.raises(TritonError) as caught:
            server.load_model("m")
        assert caught.value.message == (
            f"load failed for model '{second}::m': version 1 is at UNAVAILABLE state: Internal: weights missing;\n"
        )


def test_a_load_by_key_that_fails_is_an_error(repository: Repository) -> None:
    first, second = roots(repository)
    add(first, "one")
    add(second, "bad")
    settings = options(repository, model_namespacing=True, model_control_mode="explicit")
    with serving(repository, **settings) as server:
        with pytest.raises(TritonError, match="Internal: weights missing"):
            server.load_model(f"{second}::m")
        server.load_model(f"{first}::m")
        assert answer(server, f"{first}::m") == "one"


def test_a_name_becomes_unique_when_the_other_model_goes(repository: Repository) -> None:
    first, second = roots(repository)
    add(first, "one")
    add(second, "two")
    settings = options(repository, model_namespacing=True, model_control_mode="poll", repository_poll_secs=0.03)
    with serving(repository, **settings) as server:
        assert codes(server)[1] == AMBIGUOUS
        (second / "m").rename(repository.models.parent / "aside")
        eventually(lambda: server.model_is_ready("m"))
        assert answer(server) == "one"
        (repository.models.parent / "aside").rename(second / "m")
        eventually(lambda: not server.model_is_ready("m"))
        assert codes(server)[1] == AMBIGUOUS


def test_an_ensemble_means_the_model_of_its_own_namespace(tmp_path: Path) -> None:
    first, second = (Repository(make_directory(tmp_path / name)) for name in ("first", "second"))
    for repository, does in ((first, "add"), (second, "tell")):  # add: Y = X + 1, tell: Y = X
        part(repository, "c", does)
        chain(repository, f"e {repository.models.parent.name}", "c")
    part(second, "d", "add")
    chain(first, "e other", "d", "c")
    settings = {"model_repositories": [first.models, second.models], "model_control_mode": "explicit"}
    with serving(first, **settings, model_namespacing=True) as server:
        for name in ("e first", "e second", "e other"):
            server.load_model(name)
        assert [value_of(server, name) for name in ("e first", "e second", "e other")] == [2, 1, 3]
        assert codes(server, "c") == (ErrorCode.INVALID_ARG, AMBIGUOUS.replace("'m'", "'c'"))
        assert value_of(server, f"{second.models}::c") == 1  # a key tells them apart
        server.unload_model("c")
        eventually(lambda: not any(server.model_is_ready(name) for name in ("e first", "e second", "e other")))
        assert server.model_is_ready("d")


def test_an_ensemble_goes_to_another_namespace_and_back_without_a_gap(tmp_path: Path) -> None:
    """When the model of its own namespace leaves, and returns (qa/L0_model_namespacing, test_dynamic_resolution)."""
    first, second = (Repository(make_directory(tmp_path / name)) for name in ("first", "second"))
    for repository, does in ((first, "add"), (second, "tell")):
        part(repository, "c", does)
        chain(repository, f"e {repository.models.parent.name}", "c")
    settings = {"model_repositories": [first.models, second.models], "model_control_mode": "poll"}
    with serving(first, **settings, model_namespacing=True, repository_poll_secs=0.03) as server:
        assert [value_of(server, name) for name in ("e first", "e second")] == [2, 1]
        moves = [(first.models / "c", tmp_path / "aside", 1), (tmp_path / "aside", first.models / "c", 2)]
        for path, aim, value in moves:
            path.rename(aim)
            eventually(partial(is_value, server, "e first", value))  # each answer is one, never an error
            assert value_of(server, "e second") == 1
        eventually(lambda: codes(server, "c")[1] == AMBIGUOUS.replace("'m'", "'c'"))


def test_a_load_links_an_ensemble_to_a_model_that_was_loaded_meanwhile(tmp_path: Path) -> None:
    first, second = (Repository(make_directory(tmp_path / name)) for name in ("first", "second"))
    for repository, does in ((first, "add"), (second, "tell")):
        part(repository, "c", does)
    chain(first, "e", "c")
    settings = {"model_repositories": [first.models, second.models], "model_control_mode": "explicit"}
    with serving(first, **settings, model_namespacing=True) as server:
        (first.models / "c").rename(tmp_path / "aside")
        server.load_model("e")
        assert value_of(server, "e") == 1
        (tmp_path / "aside").rename(first.models / "c")
        server.load_model("c")
        server.load_model("e")
        assert value_of(server, "e") == 2


def is_value(server: InferenceServer, name: str, value: float) -> bool:
    return value_of(server, name) == value


def make_directory(path: Path) -> Path:
    path.mkdir()
    return path


def value_of(server: InferenceServer, name: str) -> float:
    """Y of X = 1."""
    (response,) = send(server, name, x(1)).responses()
    assert response.error is None, response.error
    return float(response.outputs[0].data[0])


def test_a_custom_configuration_is_used_where_there_is_one(repository: Repository) -> None:
    add(repository.models, "one", config="max_batch_size: 8")
    add(repository.models, "two", name="n", config="max_batch_size: 8")
    (repository.models / "m" / "configs").mkdir()
    (repository.models / "m" / "configs" / "small.pbtxt").write_text('backend: "v"\nmax_batch_size: 2\n')
    with serving(repository, "m", "n", model_config_name="small") as server:
        assert (server.model_config("m").max_batch_size, server.model_config("n").max_batch_size) == (2, 8)
        (repository.models / "m" / "configs" / "small.pbtxt").write_text('backend: "v"\nmax_batch_size: 4\n')
        server.load_model("m")
        assert server.model_config("m").max_batch_size == 4
    with serving(repository, "m") as server:
        assert server.model_config("m").max_batch_size == 8


def test_a_custom_configuration_may_stand_alone(repository: Repository) -> None:
    add(repository.models, "one")
    (repository.models / "m" / "configs").mkdir()
    (repository.models / "m" / "config.pbtxt").rename(repository.models / "m" / "configs" / "small.pbtxt")
    with serving(repository, "m", model_config_name="small", auto_complete_config=False) as server:
        assert answer(server) == "one"
    with serving(repository, auto_complete_config=False) as server, pytest.raises(TritonError, match="failed to poll"):
        server.load_model("m")
