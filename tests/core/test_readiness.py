"""Ready questions: reasons, the index, the log, and answers that nothing can hold up."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmbackend.core import served_models
from llmbackend.core.models import model
from llmbackend.frontends.operations.probes import render
from tests.helpers.core_host import STAGE, Repository, serving
from tests.helpers.waiting import eventually

STATEFUL_BACKEND = """
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import unavailable

def TRITONBACKEND_ModelInitialize(model):
    if model.name == "gate":
        STAGE.open("loading")
        STAGE.wait("go")

def TRITONBACKEND_ModelInstanceReady(instance):
    STAGE.note("asked")
    if "hang" in STAGE.kept:
        STAGE.wait("answer")
    if STAGE.kept:
        raise unavailable(STAGE.kept[-1])

def TRITONBACKEND_ModelInstanceExecute(instance, requests): pass
def TRITONBACKEND_ModelFinalize(model): STAGE.note("ModelFinalize")
"""
GAVE_UP = "the engine died 5 times without progress"


@pytest.fixture
def stateful(repository: Repository) -> Repository:
    repository.backend("b", STATEFUL_BACKEND)
    repository.model("m", "b")
    return repository


def test_the_reason_is_in_the_index_and_logged_on_change(
    stateful: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), serving(stateful, "m") as server:
        assert server.is_ready() and server.model_is_ready("m")
        STAGE.kept.append(GAVE_UP)
        for _ in range(3):
            assert not server.is_ready() and not server.model_is_ready("m", 1) and server.is_live()
            (row,) = server.repository_index()
            assert (row.version, row.state, row.reason) == ("1", "UNAVAILABLE", GAVE_UP)
            assert server.repository_index(ready_only=True) == []
        assert caplog.text.count(f"model 'm' version 1 is not ready: {GAVE_UP}") == 1
        STAGE.kept.clear()
        assert server.is_ready() and server.model_is_ready("m") and server.repository_index()[0].state == "READY"
        assert caplog.text.count("model 'm' version 1 is ready again") == 1


def test_without_strict_readiness_only_the_model_is_not_ready(stateful: Repository) -> None:
    with serving(stateful, "m", strict_readiness=False) as server:
        STAGE.kept.append(GAVE_UP)
        assert server.is_live() and server.is_ready() and not server.model_is_ready("m")


def test_a_backend_that_hangs_is_not_ready_and_delays_no_other(
    stateful: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "ANSWER_TIMEOUT_S", 0.1)
    with serving(stateful, "m") as server:
        STAGE.kept.append("hang")
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(server.model_is_ready, "m") for _ in range(8)]
            assert not any(answer.result(timeout=20) for answer in answers)
        assert not server.is_ready()
        assert server.repository_index()[0].reason == "its backend did not report within 0.1 s whether it is ready"
        assert STAGE.events == ["asked"]  # one thread waits, for any number of askers
        STAGE.kept.clear()
        STAGE.open("answer")
        eventually(server.is_ready)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ready-")]


def test_a_scrape_does_not_wait_for_a_backend_that_hangs(
    stateful: Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model, "ANSWER_TIMEOUT_S", 1000.0)
    monkeypatch.setattr(served_models, "SCRAPE_ANSWER_S", 0.05)
    with serving(stateful, "m") as server:
        STAGE.kept.append("hang")
        assert b'llmbackend:model_ready{model="m",version="1"} 0\n' in render(server.metrics_registry)
        assert "is not ready" not in caplog.text
        STAGE.kept.clear()
        STAGE.open("answer")
        eventually(lambda: b'llmbackend:model_ready{model="m",version="1"} 1\n' in render(server.metrics_registry))


def test_a_hanging_question_does_not_hold_up_an_unload(stateful: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "ANSWER_TIMEOUT_S", 0.1)
    with serving(stateful, "m") as server:
        STAGE.kept.append("hang")
        assert not server.model_is_ready("m")
        server.unload_model("m")
        eventually(lambda: "ModelFinalize" in STAGE.events)
        STAGE.kept.clear()
        STAGE.open("answer")
        eventually(lambda: server.repository_index()[0].reason == "unloaded")


def test_a_load_under_way_holds_up_no_question(stateful: Repository) -> None:
    stateful.model("gate", "b")
    with serving(stateful, "m") as server, ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(server.load_model, "gate") for _ in range(2)]  # the second waits for the first
        STAGE.wait("loading")
        assert server.model_is_ready("m") and not server.model_is_ready("gate") and not server.is_ready()
        assert {row.name: row.state for row in server.repository_index()} == {"gate": "LOADING", "m": "READY"}
        assert server.is_live() and server.model_statistics("m") and server.model_config("m")
        STAGE.open("go")
        for load in loads:
            load.result(timeout=20)
        assert server.is_ready()
