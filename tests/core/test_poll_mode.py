"""Model control mode poll: files decide what is served (golden 56)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.inference_server import EXPLICIT_ONLY, InferenceServer
from llmbackend.core.repository.model_repository import ModelRepository
from tests.helpers.core_backends import VERSIONED_BACKEND, answer, states, write_version
from tests.helpers.core_host import IDENTITY_IO, STAGE, Repository, serving
from tests.helpers.waiting import eventually

POLL_S = 0.03
TAG = 'parameters { key: "tag" value { string_value: "8" } }'


@pytest.fixture
def versioned(repository: Repository) -> Repository:
    repository.backend("v", VERSIONED_BACKEND)
    return repository


@contextmanager
def polling(repository: Repository, poll_s: float = POLL_S, **options: object) -> Iterator[InferenceServer]:
    with serving(repository, model_control_mode="poll", repository_poll_secs=poll_s, **options) as server:
        yield server


def put(repository: Repository, text: str, name: str = "m", config: str = "") -> None:
    """A model as `write` makes it, but no poll sees half of it."""
    draft = repository.models.parent / "draft"
    (draft / "1").mkdir(parents=True)
    (draft / "1" / "text").write_text(text)
    (draft / "config.pbtxt").write_text(f'backend: "v"\n{IDENTITY_IO}\n{config}\n')
    shutil.rmtree(repository.models / name, ignore_errors=True)
    draft.rename(repository.models / name)


def config_file(repository: Repository, name: str = "m") -> Path:
    return repository.models / name / "config.pbtxt"


def test_models_are_loaded_at_start_and_new_ones_when_they_appear(versioned: Repository) -> None:
    write_version(versioned, "one")
    with polling(versioned) as server:
        assert answer(server) == "one"
        put(versioned, "two", name="n")
        eventually(lambda: server.model_is_ready("n"))
        assert answer(server, "n") == "two" and [row.name for row in server.repository_index()] == ["m", "n"]


def test_a_changed_model_is_reloaded_and_an_unchanged_one_is_not(versioned: Repository) -> None:
    write_version(versioned, "one")
    write_version(versioned, "other", name="n")
    with polling(versioned) as server:
        (versioned.models / "m" / "1" / "text").write_text("two")
        eventually(lambda: answer(server) == "two")
        eventually(lambda: "finalize one" in STAGE.events)
        assert STAGE.events.count("initialize two") == STAGE.events.count("initialize other") == 1


def test_a_changed_configuration_is_taken_over(versioned: Repository) -> None:
    write_version(versioned, "one", config="max_batch_size: 8")
    with polling(versioned) as server:
        config_file(versioned).write_text(config_file(versioned).read_text().replace("8", "3"))
        eventually(lambda: server.model_config("m").max_batch_size == 3)


def test_a_new_version_directory_is_noticed(versioned: Repository) -> None:
    write_version(versioned, "one", config="version_policy { all {} }")
    with polling(versioned) as server:
        draft = versioned.models.parent / "2"
        draft.mkdir()
        (draft / "text").write_text("two")
        draft.rename(versioned.models / "m" / "2")
        eventually(lambda: server.model_metadata("m").versions == ("1", "2"))
        assert STAGE.events.count("initialize one") == 1, "version 1 did not change"


def test_a_removed_model_is_unloaded_and_leaves_the_index(versioned: Repository) -> None:
    write_version(versioned, "one")
    write_version(versioned, "two", name="n")
    with polling(versioned) as server:
        shutil.rmtree(versioned.models / "n")
        eventually(lambda: "finalize two" in STAGE.events)
        assert [row.name for row in server.repository_index()] == ["m"] and server.is_ready()
        with pytest.raises(TritonError) as caught:
            server.model_metadata("n")
        assert caught.value.message == "Request for unknown model: 'n' has no available versions"


@pytest.mark.parametrize("broken", ["garbage", 'name: "other"'])
def test_a_broken_configuration_keeps_the_old_one_serving_until_it_is_repaired(
    versioned: Repository, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_version(versioned, "one", config=TAG)
    good = config_file(versioned).read_text()
    with polling(versioned) as server:
        config_file(versioned).write_text(f"{good}\n{broken}")
        eventually(lambda: caplog.text.count("Poll failed for model directory 'm'") > 1)  # tried again, as in Triton
        assert answer(server) == "one" and server.is_ready() and states(server) == [("1", "READY", "")]
        config_file(versioned).write_text(good.replace("8", "3"))
        eventually(lambda: server.model_config("m").parameters["tag"].string_value == "3")


def test_a_load_that_fails_keeps_the_old_version_serving_and_is_tried_again(versioned: Repository) -> None:
    write_version(versioned, "one")
    with polling(versioned) as server:
        (versioned.models / "m" / "1" / "text").write_text("bad two")
        eventually(lambda: STAGE.events.count("initialize bad two") > 1)
        assert answer(server) == "one" and server.is_ready()
        (versioned.models / "m" / "1" / "text").write_text("three")
        eventually(lambda: answer(server) == "three")


def test_a_model_that_could_not_be_loaded_at_start_is_when_it_can_be(versioned: Repository) -> None:
    write_version(versioned, "bad")
    with polling(versioned, exit_on_error=False) as server:
        assert not server.is_ready()
        (versioned.models / "m" / "1" / "text").write_text("one")
        eventually(server.is_ready)
        assert answer(server) == "one"


def test_explicit_control_is_refused(versioned: Repository) -> None:
    write_version(versioned, "one")
    with polling(versioned) as server:
        for action in (server.load_model, server.unload_model):
            with pytest.raises(TritonError) as caught:
                action("m")
            assert (caught.value.code, caught.value.message) == (ErrorCode.UNAVAILABLE, EXPLICIT_ONLY)


def test_a_name_in_two_repositories_is_unloaded_until_it_is_unique(
    versioned: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    write_version(versioned, "one")
    second = versioned.models.parent / "second"
    second.mkdir()
    with polling(versioned, model_repositories=[versioned.models, second]) as server:
        shutil.copytree(versioned.models / "m", versioned.models.parent / "copy")
        (versioned.models.parent / "copy").rename(second / "m")
        eventually(lambda: "finalize one" in STAGE.events)
        assert "failed to poll model 'm': not unique across all model repositories" in caplog.text
        expected = [("", "UNAVAILABLE", "model appears in two or more repositories")]
        assert states(server) == expected
        shutil.rmtree(second / "m")
        eventually(lambda: server.model_is_ready("m"))


def test_a_repository_that_can_not_be_read_unloads_nothing(
    versioned: Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: ModelRepository) -> None:
        raise OSError(5, "Input/output error", str(versioned.models))

    write_version(versioned, "one")
    with polling(versioned) as server:
        with monkeypatch.context() as broken:
            broken.setattr(ModelRepository, "listing", fail)
            eventually(lambda: f"failed to poll model repository '{versioned.models}': Input/output" in caplog.text)
        assert answer(server) == "one"


def test_stopping_waits_for_a_poll_that_loads(versioned: Repository) -> None:
    write_version(versioned, "one")
    with polling(versioned):
        put(versioned, "gate", name="n")
        STAGE.wait("loading gate")
        STAGE.open("gate")
    assert not [row for row in STAGE.events if row.startswith("initialize")][2:]
    assert {"finalize one", "finalize gate"} <= set(STAGE.events)


def test_an_interval_of_zero_polls_never(versioned: Repository) -> None:
    write_version(versioned, "one")
    with polling(versioned, poll_s=0.0) as server:
        put(versioned, "two", name="n")
        assert server._poller._thread is None and not server.model_is_ready("n")
