"""A backend file is found, loaded and served through InferenceServer."""

from __future__ import annotations

import pytest

from llmbackend.core.models.served_config import ServedConfig
from llmbackend.frontends.operations.probes import render
from tests.helpers.core_host import ECHO_BACKEND, Repository, send, serving, x


def test_a_request_is_answered_by_the_backend(repository: Repository) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo")
    with serving(repository, "m") as server:
        assert server.is_live() and server.is_ready() and server.model_is_ready("m")
        (response,) = send(server, "m", x(1, 2, 3), id="r1").responses()
        assert (response.model_name, response.model_version, response.request_id) == ("m", 1, "r1")
        assert response.outputs[0].data.tolist() == [1, 2, 3]
        assert [(row.name, row.version, row.state) for row in server.repository_index()] == [("m", "1", "READY")]
        assert server.model_statistics("m")[0].inference_count == 1
        assert b'nv_inference_request_success{model="m",version="1"} 1\n' in render(server.metrics_registry)
    assert not server.is_ready()


def test_no_request_copies_the_configuration(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo", 'parameters { key: "k" value { string_value: "v" } }')
    with serving(repository, "m") as server:
        monkeypatch.setattr(ServedConfig, "copy", lambda self: pytest.fail("the configuration was copied"))
        assert server.model_metadata("m").inputs is server.model_metadata("m").inputs
        assert server.model_metadata("m").versions == ("1",)
        assert server.model_parameters("m") == {"k": "v"}
        assert not server.is_decoupled("m")
        monkeypatch.undo()
