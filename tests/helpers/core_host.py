"""Helpers of the core's tests: model repositories in temporary directories, backends as real files, a server."""

from __future__ import annotations

import queue
import textwrap
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.errors import TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceHandle, InferenceRequest, InferenceResponse
from llmbackend.core.models.model import LoadedModel
from llmbackend.core.repository.model_files import ModelIdentifier
from llmbackend.core.server_options import ServerOptions
from llmbackend.core.tensors import RawTensor, Tensor
from tests.helpers.waiting import eventually

WAIT_S = 20.0
"""How long a test waits for something that must happen; never a measure of speed."""

IDENTITY_IO = """
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""

ECHO_BACKEND = """
import time
from llmbackend.core.backend_api import ResponseFlag, Tensor

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    start = time.monotonic_ns()
    for request in requests:
        response = request.new_response()
        x = request.inputs["X"]
        response.add_output(Tensor("Y", x.datatype, x.shape, x.data))
        response.set_parameter("batch", len(requests))
        response.set_parameter("instance", instance.name)
        response.send(ResponseFlag.FINAL)
        end = time.monotonic_ns()
        instance.report_statistics(request, True, start, start, end, end)
        request.release()
    end = time.monotonic_ns()
    instance.report_batch_statistics(len(requests), start, start, end, end)
"""


class Stage:
    """What backend files of a test write to and wait on: `from tests.helpers.core_host import STAGE`."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.events: list[str] = []
        self.kept: list[Any] = []
        self.gates: defaultdict[str, threading.Event] = defaultdict(threading.Event)

    def note(self, event: str) -> None:
        self.events.append(event)

    def wait(self, gate: str) -> None:
        """Blocks until the test opens the gate."""
        assert self.gates[gate].wait(WAIT_S), f"gate {gate} stayed closed"

    def open(self, gate: str) -> None:
        self.gates[gate].set()


STAGE = Stage()

# Notes every entry point; FAIL_IN names those that raise, "instance:<name>" a single instance.
NOTING_BACKEND = """
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import ResponseFlag, TritonError, internal

FAIL_IN = {fail_in!r}

def note(event, *keys):
    STAGE.note(event)
    if any(key in FAIL_IN for key in (event, *keys)):
        raise internal("no " + event)

def TRITONBACKEND_Initialize(backend): note("Initialize")
def TRITONBACKEND_Finalize(backend): note("Finalize")
def TRITONBACKEND_ModelInitialize(model): note("ModelInitialize")
def TRITONBACKEND_ModelFinalize(model): note("ModelFinalize")
def TRITONBACKEND_ModelInstanceInitialize(instance): note("InstanceInitialize " + instance.name)
def TRITONBACKEND_ModelInstanceFinalize(instance): note("InstanceFinalize " + instance.name)
def TRITONBACKEND_ModelInstanceReady(instance): note("Ready")
def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    for request in requests:
        request.new_response().send(ResponseFlag.FINAL)
        request.release()
"""

# Keeps every request for the test to complete: STAGE.kept holds (instance, request).
KEEPING_BACKEND = """
from tests.helpers.core_host import STAGE

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    for request in requests:
        STAGE.kept.append((instance, request))
        STAGE.open("executed " + request.id)

def TRITONBACKEND_ModelFinalize(model):
    STAGE.note("ModelFinalize")
"""


def noting_backend(*fail_in: str) -> str:
    return NOTING_BACKEND.replace("{fail_in!r}", repr(fail_in))


class Repository:
    """A model repository and a backend directory under `root`, written file by file."""

    def __init__(self, root: Path) -> None:
        self.models = root / "models"
        self.backends = root / "backends"
        self.models.mkdir(exist_ok=True)
        self.backends.mkdir(exist_ok=True)
        self.defaults: dict[str, Any] = {"model_control_mode": "explicit"}
        """Of `options`."""

    def backend(self, name: str, source: str, file: str = "backend.py") -> Path:
        path = self.backends / name / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    def model(
        self, name: str, backend: str, config: str = "", versions: tuple[int | str, ...] = (1,), io: str = IDENTITY_IO
    ) -> Path:
        directory = self.models / name
        for version in versions:
            (directory / str(version)).mkdir(parents=True, exist_ok=True)
        (directory / "config.pbtxt").write_text(f'backend: "{backend}"\n{io}\n{config}\n')
        return directory

    def options(self, **options: Any) -> ServerOptions:
        given = {"model_repositories": [self.models], **self.defaults, **options}
        return ServerOptions(backend_directory=self.backends, **given)


@contextmanager
def serving(repository: Repository, *startup_models: str, **options: Any) -> Iterator[InferenceServer]:
    """A started server; at the end nothing is left behind by its requests, and it is stopped, everything finalised."""
    server = InferenceServer(repository.options(startup_models=startup_models, **options))
    server.start()
    try:
        yield server
        eventually(lambda: server.check() == [])
    finally:
        assert server.stop(WAIT_S)


def version_of(server: InferenceServer, model: str, version: int = -1) -> LoadedModel:
    """The served model version itself (-1: the newest), for what the server's public calls do not tell."""
    return server._versions.get(ModelIdentifier(model), version)


class Client:
    """Collects the callbacks of one request."""

    def __init__(self) -> None:
        self.events: queue.Queue[tuple[InferenceResponse | None, ResponseFlag]] = queue.Queue()
        self.handle: InferenceHandle | None = None

    def __call__(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        self.events.put((response, flags))

    def cancel(self) -> None:
        assert self.handle is not None
        self.handle.cancel()

    def next(self) -> tuple[InferenceResponse | None, ResponseFlag]:
        return self.events.get(timeout=WAIT_S)

    def responses(self) -> list[InferenceResponse]:
        """Every response up to FINAL."""
        found = []
        while True:
            response, flags = self.next()
            if response is not None:
                found.append(response)
            if ResponseFlag.FINAL in flags:
                return found

    def error(self) -> TritonError:
        (response,) = self.responses()
        assert response.error is not None
        return response.error


def x(*values: float) -> Tensor:
    return Tensor.of("X", np.array(values, dtype=np.float32))


def send(server: InferenceServer, model: str, *inputs: Tensor | RawTensor, **fields: Any) -> Client:
    client = Client()
    client.handle = server.infer_async(InferenceRequest(model, inputs=inputs or (x(1, 2),), **fields), client)
    return client
