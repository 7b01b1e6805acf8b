"""A model's own batching strategy (TRITONBACKEND_ModelBatch*)."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from llmbackend.core.errors import TritonError
from llmbackend.core.tensors import Tensor
from tests.helpers.core_host import STAGE, Repository, send, serving
from tests.helpers.waiting import eventually

STEPPED_BACKEND = """
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import ResponseFlag

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    STAGE.note(",".join(request.id for request in requests))
    STAGE.wait("go")
    for request in requests:
        request.new_response().send(ResponseFlag.FINAL)
        request.release()
"""
# At most MAX_BATCH_VOLUME_BYTES of inputs in one batch.
VOLUME_STRATEGY = """
from tests.helpers.core_host import STAGE

def TRITONBACKEND_ModelBatcherInitialize(model):
    STAGE.kept.append("batcher of " + model.name)
    return int(model.config.parameters["MAX_BATCH_VOLUME_BYTES"].string_value)

def TRITONBACKEND_ModelBatcherFinalize(batcher):
    STAGE.kept.append(f"end of batcher {batcher}")

def TRITONBACKEND_ModelBatchInitialize(batcher):
    STAGE.open("a batch began")
    return [batcher]

def TRITONBACKEND_ModelBatchIncludeRequest(request, batch):
    volume = sum(tensor.data.nbytes for tensor in request.inputs.values())
    if volume > batch[0]:
        return False
    batch[0] -= volume
    return True

def TRITONBACKEND_ModelBatchFinalize(batch):
    assert isinstance(batch, list)
    STAGE.open("a batch ended")
"""
CONFIG = """
max_batch_size: 8
dynamic_batching {}
parameters { key: "MAX_BATCH_VOLUME_BYTES" value { string_value: "24" } }
"""
PATH_PARAMETER = 'parameters { key: "TRITON_BATCH_STRATEGY_PATH" value { string_value: "%s" } }'


def row(count: int = 1) -> Tensor:
    return Tensor.of("X", np.zeros((count, 2), np.float32))


@pytest.fixture
def stepped(repository: Repository) -> Repository:
    repository.backend("stepped", STEPPED_BACKEND)
    repository.model("m", "stepped", CONFIG)
    return repository


def batches(stepped: Repository, requests: dict[str, int]) -> list[str]:
    """The batches that requests of so many rows become while the only instance is busy with "0"."""
    with serving(stepped, "m") as server:
        clients = [send(server, "m", row(), id="0")]
        eventually(lambda: STAGE.events)
        clients += [send(server, "m", row(count), id=name) for name, count in requests.items()]
        STAGE.open("go")
        for client in clients:
            assert client.responses()[0].error is None
        return STAGE.events[1:]


@pytest.mark.parametrize("place", ["models/m/1", "models/m", "backends/stepped"])
def test_a_strategy_in_the_version_model_or_backend_directory_bounds_batches(stepped: Repository, place: str) -> None:
    (stepped.models.parent / place / "batchstrategy.py").write_text(VOLUME_STRATEGY)
    assert batches(stepped, {"1": 1, "2": 1, "3": 1, "4": 1, "5": 2}) == ["1,2,3", "4,5"]  # 8 bytes a row, 24 a batch
    assert STAGE.kept == ["batcher of m", "end of batcher 24"]
    assert STAGE.gates["a batch began"].is_set() and STAGE.gates["a batch ended"].is_set()
    assert not any(str(getattr(module, "__file__", "")).endswith("batchstrategy.py") for module in sys.modules.values())


def test_the_version_directory_comes_first(stepped: Repository) -> None:
    (stepped.models / "m" / "batchstrategy.py").write_text("raise RuntimeError('not this one')")
    (stepped.models / "m" / "1" / "batchstrategy.py").write_text(VOLUME_STRATEGY)
    assert batches(stepped, {"1": 3, "2": 1}) == ["1", "2"]


def test_a_strategy_that_a_parameter_names_is_loaded(stepped: Repository) -> None:
    stepped.model("m", "stepped", CONFIG + PATH_PARAMETER % "strategies/volume.py")
    directory = stepped.models / "m" / "strategies"
    directory.mkdir()
    (directory / "volume.py").write_text(VOLUME_STRATEGY)
    assert batches(stepped, {"1": 3, "2": 1}) == ["1", "2"]


def test_without_a_strategy_batches_are_bounded_by_size_alone(stepped: Repository) -> None:
    assert batches(stepped, {"1": 3, "2": 1, "3": 4}) == ["1,2,3"]


def test_a_request_that_the_strategy_wants_in_no_batch_goes_alone(stepped: Repository) -> None:
    (stepped.models / "m" / "batchstrategy.py").write_text(VOLUME_STRATEGY)
    assert batches(stepped, {"large": 8, "1": 1, "2": 1}) == ["large", "1,2"]


def test_a_strategy_that_fails_leaves_requests_out_and_harms_none(
    stepped: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    source = VOLUME_STRATEGY.replace("    volume = sum", "    raise RuntimeError('broken')\n    volume = sum")
    (stepped.models / "m" / "batchstrategy.py").write_text(source)
    assert batches(stepped, {"1": 1, "2": 1}) == ["1", "2"]
    assert "Custom batching include function failed for model m" in caplog.text


@pytest.mark.parametrize(
    ("config", "file", "source", "status"),
    [
        (
            "",
            "batchstrategy.py",
            "def TRITONBACKEND_ModelBatchIncludeRequest(request, batch): return True",
            "Invalid argument: {model}/batchstrategy.py does not define all required custom batching functions for "
            "model m",
        ),
        (
            "",
            "batchstrategy.py",
            VOLUME_STRATEGY.replace("return int", "raise ValueError('no'); return int"),
            "Internal: ValueError: no",
        ),
        (
            "",
            "batchstrategy.so",
            "",
            "Internal: unable to load shared library: {model}/batchstrategy.so: file too short",
        ),
        (
            PATH_PARAMETER % "nowhere.py",
            "",
            "",
            "Not found: Batching library path not found: nowhere.py",
        ),
        (
            PATH_PARAMETER % "../other/batchstrategy.py",
            "",
            "",
            "Invalid argument: batching library path '../other/batchstrategy.py' escapes model directory '{model}', "
            "for model 'm', check model config parameter TRITON_BATCH_STRATEGY_PATH",
        ),
    ],
)
def test_strategies_that_can_not_be_are_refused_by_name(
    stepped: Repository, config: str, file: str, source: str, status: str
) -> None:
    model: Path = stepped.model("m", "stepped", CONFIG + config)
    if file:
        (model / file).write_text(source)
    with serving(stepped) as server:
        with pytest.raises(TritonError) as caught:
            server.load_model("m")
        expected = status.format(model=model)
        assert caught.value.message == f"load failed for model 'm': version 1 is at UNAVAILABLE state: {expected};\n"


def test_a_strategy_without_any_of_the_functions_is_none(stepped: Repository) -> None:
    (stepped.models / "m" / "batchstrategy.py").write_text("x = 1")
    assert batches(stepped, {"1": 3, "2": 1, "3": 4}) == ["1,2,3"]
