"""Dynamic batching of a compiled backend: one Execute for several requests, their shapes, outputs and statistics."""

from __future__ import annotations

import logging

import numpy as np
import orjson
import pytest

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceRequest
from llmbackend.core.tensors import Tensor
from tests.helpers.compiled_backends import CompiledRepository
from tests.helpers.core_host import Client, serving
from tests.helpers.waiting import eventually

IO = """
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] %s } ]
output [ { name: "OUTPUT0" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "OUTPUT1" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
FOUR = """
max_batch_size: 8
dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 3600000000 }
"""
"""A batch starts when four rows have come."""


def ask(server: InferenceServer, rows: int, width: int, **fields: object) -> Client:
    client = Client()
    data = np.zeros((rows, width), np.float32)
    request = InferenceRequest("m", inputs=(Tensor.of("INPUT0", data),), **fields)  # type: ignore[arg-type]
    client.handle = server.infer_async(request, client)
    return client


def outputs_of(client: Client) -> dict[str, list[str]]:
    (response,) = client.responses()
    assert response.error is None, response.error
    return {output.name: [row.decode() for row in output.data.ravel()] for output in response.outputs}


@pytest.mark.parametrize("rows", [(1, 1, 1, 1), (2, 2), (1, 3)])
def test_requests_share_an_execute(backends: CompiledRepository, rows: tuple[int, ...]) -> None:
    backends.model("m", "batching", FOUR, io=IO % "")
    with serving(backends, "m") as server:
        clients = [ask(server, count, 3) for count in rows]
        batch = f"{len(rows)}:" + "".join(f"{count}x3x," for count in rows)
        for count, client in zip(rows, clients, strict=True):
            assert outputs_of(client) == {name: [f"{batch} {name}"] * count for name in ("OUTPUT0", "OUTPUT1")}
        eventually(lambda: server.model_statistics("m")[0].execution_count == 1)
        statistics = server.model_statistics("m")[0]
        assert statistics.inference_count == 4
        assert statistics.inference_stats.success.count == len(rows)
        assert [(batch.batch_size, batch.compute_infer.count) for batch in statistics.batch_stats] == [(4, 1)]


def test_ragged_inputs_share_an_execute(backends: CompiledRepository, caplog: pytest.LogCaptureFixture) -> None:
    """What `batch_input` asks for is computed by the backend, in Triton as here; it reads the configuration."""
    ragged = 'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "N" data_type: TYPE_INT32 source_input: "INPUT0" }'
    backends.model("m", "batching", FOUR + ragged, io=IO % "allow_ragged_batch: true")
    with caplog.at_level(logging.INFO, "llmbackend"), serving(backends, "m") as server:
        clients = [ask(server, 1, width) for width in (1, 2, 3, 5)]
        assert {outputs_of(client)["OUTPUT0"][0] for client in clients} == {"4:1x1x,1x2x,1x3x,1x5x, OUTPUT0"}
    config = next(record.getMessage() for record in caplog.records if record.filename == "batching.cpp")
    assert orjson.loads(config)["batch_input"] == [
        {"kind": "BATCH_ELEMENT_COUNT", "target_name": ["N"], "data_type": "TYPE_INT32", "source_input": ["INPUT0"]}
    ]


def test_other_shapes_do_not_share_an_execute(backends: CompiledRepository) -> None:
    backends.model("m", "batching", FOUR, io=IO % "")
    with serving(backends, "m") as server:
        clients = [ask(server, rows, width) for rows, width in ((2, 3), (2, 3), (4, 5))]
        assert [outputs_of(client)["OUTPUT0"][0] for client in clients] == [
            "2:2x3x,2x3x, OUTPUT0",
            "2:2x3x,2x3x, OUTPUT0",
            "1:4x5x, OUTPUT0",
        ]


def test_a_client_gets_the_outputs_that_it_asks_for(backends: CompiledRepository) -> None:
    backends.model("m", "batching", "max_batch_size: 8", io=IO % "")
    with serving(backends, "m") as server:
        assert outputs_of(ask(server, 1, 1, requested_outputs=("OUTPUT1",))) == {"OUTPUT1": ["1:1x1x, OUTPUT1"]}
        sent = outputs_of(ask(server, 1, 1, requested_outputs=("OUTPUT1",), parameters={"waste": True}))
        assert sorted(sent) == ["OUTPUT0", "OUTPUT1"]  # to leave one out is the backend's part, as in Triton
