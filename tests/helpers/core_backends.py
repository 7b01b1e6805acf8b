"""Backends that several of the core's tests load from files, their models, and those models' answers."""

from __future__ import annotations

import pytest

from llmbackend.core.errors import TritonError
from llmbackend.core.inference_server import InferenceServer
from tests.helpers.core_host import Repository, send

VERSIONED_BACKEND = """
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import ResponseFlag, Tensor, internal

def TRITONBACKEND_ModelInitialize(model):
    text = (model.version_directory / "text").read_text()
    STAGE.note("initialize " + text)
    if text.startswith("gate"):
        STAGE.open("loading " + text)
        STAGE.wait(text)
    if text.startswith("bad"):
        raise internal("weights missing")
    model.state = text

def TRITONBACKEND_ModelFinalize(model):
    STAGE.note("finalize " + str(model.state))

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    for request in requests:
        response = request.new_response()
        response.add_output(Tensor.text("Y", instance.model.state))
        response.send(ResponseFlag.FINAL)
        request.release()
"""


def write_version(repository: Repository, text: str, name: str = "m", version: int = 1, config: str = "") -> None:
    directory = repository.model(name, "v", config, versions=(version,))
    (directory / str(version) / "text").write_text(text)


def answer(server: InferenceServer, name: str = "m", version: int = -1) -> str:
    (response,) = send(server, name, model_version=version).responses()
    assert response.error is None
    return bytes(response.outputs[0].data[0]).decode()


def states(server: InferenceServer, name: str = "m") -> list[tuple[str, str, str]]:
    return [(row.version, row.state, row.reason) for row in server.repository_index() if row.name == name]


def refused(server: InferenceServer, name: str = "m", version: int = -1) -> TritonError:
    with pytest.raises(TritonError) as caught:
        send(server, name, model_version=version)
    return caught.value


# Answers a cancelled request at once, as an engine does; others when the test releases them.
STREAMING_BACKEND = """
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import ResponseFlag, cancelled

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    for request in requests:
        STAGE.kept.append(request)
        request.on_cancel(lambda request=request: end(request))
        STAGE.open("executed " + request.id)

def end(request):
    request.new_response().send(ResponseFlag.FINAL, cancelled("Request was cancelled"))
    request.release()
"""


# Notes every entry point; an instance whose name is in STAGE.kept fails, the others echo their name.
INSTANCE_BACKEND = """
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import ResponseFlag, Tensor, internal

def TRITONBACKEND_ModelInitialize(model): STAGE.note("model")
def TRITONBACKEND_ModelFinalize(model): STAGE.note("no model")
def TRITONBACKEND_ModelInstanceInitialize(instance):
    STAGE.note("+" + instance.name)
    if instance.name in STAGE.kept:
        raise internal("no room for " + instance.name)
def TRITONBACKEND_ModelInstanceFinalize(instance): STAGE.note("-" + instance.name)
def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    for request in requests:
        response = request.new_response()
        response.add_output(Tensor.text("Y", instance.name))
        response.send(ResponseFlag.FINAL)
        request.release()
"""


def load_error(server: InferenceServer, name: str) -> str:
    with pytest.raises(TritonError) as caught:
        server.load_model(name)
    return caught.value.message
