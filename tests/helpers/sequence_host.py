"""Models with sequences for the core's tests: backends that reveal their inputs, and requests for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from llmbackend.core.backend_api import RequestFlag
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.tensors import Tensor
from tests.helpers.core_host import Client, Repository, send, serving
from tests.helpers.waiting import eventually

# Notes each Execute as "<instance>:<ids>", a null request as "-", and keeps (id, control inputs); waits for gate "go".
SHOWING_BACKEND = """
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import ExecutionPolicy, ResponseFlag, Tensor

POLICY = ExecutionPolicy.BLOCKING

def TRITONBACKEND_Initialize(backend):
    backend.execution_policy = POLICY

def shown(request):
    return {name: tensor.data.ravel().tolist()[0] for name, tensor in request.inputs.items() if name != "X"}

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    STAGE.kept.append([(request.id, shown(request)) for request in requests])
    STAGE.note(instance.name + ":" + ",".join(request.id or "-" for request in requests))
    STAGE.wait("go")
    instance.report_batch_statistics(len(requests), 1, 2, 3, 4)
    for request in requests:
        instance.report_statistics(request, True, 1, 2, 3, 4)
        response = request.new_response()
        x = request.inputs["X"]
        response.add_output(Tensor("Y", x.datatype, x.shape, x.data))
        response.send(ResponseFlag.FINAL)
        request.release()
"""
CONTROLS = """
control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ -1, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
]
"""
NO_IDLENESS = "max_sequence_idle_microseconds: 3600000000 "


def sequences(batching: str, max_batch_size: int = 0, more: str = "") -> str:
    return f"max_batch_size: {max_batch_size}\nsequence_batching {{ {batching} }}\n{more}"


def flags(start: bool, end: bool) -> RequestFlag:
    return (RequestFlag.SEQUENCE_START if start else RequestFlag(0)) | (
        RequestFlag.SEQUENCE_END if end else RequestFlag(0)
    )


def step(
    server: InferenceServer,
    sequence: int | str,
    id: str,
    *,
    start: bool = False,
    end: bool = False,
    batched: bool = False,
    width: int = 2,
    **fields: Any,
) -> Client:
    """One request of a sequence to model m; its inputs are 1, 2, 3 … up to `width`."""
    shape = (1, width) if batched else (width,)
    x = Tensor.of("X", np.arange(1, width + 1, dtype=np.float32).reshape(shape))
    return send(server, "m", x, id=id, correlation_id=sequence, flags=flags(start, end), **fields)


def in_thread(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@contextmanager
def serving_sequences(repository: Repository) -> Iterator[InferenceServer]:
    """Model m is unloaded before the server stops, which would wait for sequences that a test left open."""
    with serving(repository, "m") as server:
        try:
            yield server
        finally:
            server.unload_model("m")
        eventually(lambda: server.repository_index()[0].state != "UNLOADING")
