"""Model warmup: what an instance executes before its model is READY, and loads that fail because of it."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmbackend.core.errors import TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.lifecycle.model_versions import ModelReadyState
from llmbackend.core.models.warmup import HANDLES_GRACE_S
from llmbackend.core.tensors import Tensor, to_wire
from tests.helpers.core_host import STAGE, Repository, send, serving
from tests.helpers.waiting import eventually

# Notes what it executes; the parameter of a model says what else it does.
WARM_BACKEND = """
import threading
import time
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import ResponseFlag, invalid_argument

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    inputs = [{name: (tensor.shape, tensor.datatype, tensor.data.copy()) for name, tensor in request.inputs.items()}
              for request in requests]
    STAGE.kept.append((instance.name, threading.current_thread().name, inputs))
    behaviour = instance.model.config.parameters["behaviour"].string_value
    if behaviour in ("raise", "raise " + instance.name):
        raise invalid_argument("no weights")
    if behaviour == "wait":
        STAGE.note("waiting")
        STAGE.wait("go " + instance.name)
    for request in requests:
        now = time.monotonic_ns()
        instance.report_statistics(request, True, now, now, now, now)
        error = invalid_argument("bad sample") if behaviour == "error" else None
        request.new_response().send(ResponseFlag.FINAL, error)
        request.release()
"""
IO = """
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: -1 }
input { name: "S" data_type: TYPE_STRING dims: 2 optional: true }
output { name: "Y" data_type: TYPE_FP32 dims: -1 }
"""


def warmup(inputs: str = 'key: "X" value { data_type: TYPE_FP32 dims: 3 zero_data: true }', rest: str = "") -> str:
    return f'model_warmup {{ name: "sample" batch_size: 1 {rest} inputs {{ {inputs} }} }}'


@pytest.fixture
def warm(repository: Repository) -> Repository:
    repository.backend("warm", WARM_BACKEND)
    return repository


def load_error(repository: Repository, config: str) -> str:
    repository.model("m", "warm", config, io=IO)
    with serving(repository) as server:
        with pytest.raises(TritonError) as caught:
            server.load_model("m")
        assert not server.model_is_ready("m")
    return caught.value.message


def executed() -> list[tuple[str, str, Any]]:
    return STAGE.kept


def test_the_log_names_each_sample_as_triton_does(warm: Repository, caplog: pytest.LogCaptureFixture) -> None:
    warm.model("m", "warm", warmup(rest="count: 2"), io=IO)
    with caplog.at_level(logging.DEBUG), serving(warm, "m"):
        pass
    for iteration in (1, 2):
        assert f"model 'm' instance m_0 is running warmup sample 'sample' for iteration {iteration}" in caplog.text


def test_each_instance_executes_the_samples_on_its_own_thread_before_requests(warm: Repository) -> None:
    config = "instance_group { count: 2 }" + warmup(rest="count: 2") + warmup().replace("sample", "other")
    warm.model("m", "warm", config, io=IO)
    with serving(warm, "m"):
        by_instance = {name: [run for run in executed() if run[0] == name] for name in ("m_0_0", "m_0_1")}
        for name, runs in by_instance.items():
            assert len(runs) == 3 and {thread for _, thread, _ in runs} == {name}


def test_batch_size_is_the_number_of_requests_of_one_execute(warm: Repository) -> None:
    config = warmup().replace("batch_size: 1", "batch_size: 4") + warmup().replace("batch_size: 1", "batch_size: 0")
    warm.model("m", "warm", config, io=IO)
    with serving(warm, "m") as server:
        ((_, _, inputs),) = executed()
        assert [each["X"][0] for each in inputs] == [(1, 3)] * 4
        (statistics,) = server.model_statistics("m")
        assert statistics.inference_stats.success.count == 4  # as in Triton, they count
        assert server.check() == []


def test_zero_random_and_file_data(warm: Repository) -> None:
    values = np.array([1, 2, 3], np.float32)
    config = "".join(
        warmup(f'key: "X" value {{ data_type: TYPE_FP32 dims: 3 {data} }}')
        for data in ("zero_data: true", "random_data: true", 'input_data_file: "x.bin"')
    )
    directory = warm.model("m", "warm", config, io=IO)
    (directory / "warmup").mkdir()
    (directory / "warmup" / "x.bin").write_bytes(values.tobytes() + b"more than needed")
    with serving(warm, "m"):
        zero, random, file = (inputs[0]["X"][2] for _, _, inputs in executed())
        assert not zero.any() and random.tobytes() != bytes(12) and file.tolist() == [values.tolist()]


def test_strings_are_empty_or_come_from_a_file(warm: Repository) -> None:
    strings = b"\x02\0\0\0ab\x01\0\0\0c"
    x = 'key: "X" value { data_type: TYPE_FP32 dims: 1 zero_data: true } } inputs { '
    config = "".join(
        warmup(f'{x} key: "S" value {{ data_type: TYPE_STRING dims: 2 {data} }}')
        for data in ("zero_data: true", "random_data: true", 'input_data_file: "s.bin"')
    )
    directory = warm.model("m", "warm", config, io=IO)
    (directory / "warmup").mkdir()
    (directory / "warmup" / "s.bin").write_bytes(strings)
    with serving(warm, "m"):
        found = [inputs[0]["S"][2].ravel().tolist() for _, _, inputs in executed()]
        assert found == [[b"", b""], [b"", b""], [b"ab", b"c"]]


def test_inputs_that_the_configuration_does_not_name_reach_the_model(warm: Repository) -> None:
    start = 'key: "START" value { data_type: TYPE_INT32 dims: 1 zero_data: true }'
    config = warmup(f'key: "X" value {{ data_type: TYPE_FP32 dims: 3 zero_data: true }} }} inputs {{ {start}')
    warm.model("m", "warm", config, io=IO)
    with serving(warm, "m"):
        ((_, _, inputs),) = executed()
        assert inputs[0]["START"][:2] == ((1, 1), "INT32")


def test_random_booleans_are_booleans_and_loads_repeat_them(warm: Repository) -> None:
    io = 'input { name: "B" data_type: TYPE_BOOL dims: 64 } output { name: "Y" data_type: TYPE_FP32 dims: 1 }'
    warm.model("m", "warm", warmup('key: "B" value { data_type: TYPE_BOOL dims: 64 random_data: true }'), io=io)
    for _ in range(2):
        with serving(warm, "m"):
            pass
    first, second = (inputs[0]["B"][2] for _, _, inputs in executed())
    assert set(first.view(np.uint8).tolist()) == {0, 1} and np.array_equal(first, second)


def test_the_model_is_not_ready_before_its_warmup_has_ended(warm: Repository) -> None:
    config = warmup() + 'parameters { key: "behaviour" value { string_value: "wait" } }'
    warm.model("m", "warm", config, io=IO)
    with serving(warm) as server:
        loading = threading.Thread(target=server.load_model, args=("m",))
        loading.start()
        eventually(lambda: STAGE.events == ["waiting"])
        assert state(server) == ModelReadyState.LOADING.value and not server.model_is_ready("m")
        STAGE.open("go m_0")
        loading.join(20)
        assert server.model_is_ready("m")


def state(server: InferenceServer) -> str:
    (row,) = server.repository_index()
    return row.state


@pytest.mark.parametrize(("behaviour", "text"), [("raise", "no weights"), ("error", "bad sample")])
def test_a_sample_that_fails_fails_the_load(warm: Repository, behaviour: str, text: str) -> None:
    parameters = f'parameters {{ key: "behaviour" value {{ string_value: "{behaviour}" }} }}'
    message = load_error(warm, parameters + warmup().replace("batch_size: 1", "batch_size: 2"))
    assert f"failed to run warmup sample 'sample': {text}; {text}; " in message
    assert len(executed()) == 1


@pytest.mark.parametrize("scheduling", ["", "sequence_batching { direct {} }", "sequence_batching { oldest {} }"])
def test_a_sample_that_fails_on_one_of_two_instances_fails_the_load(warm: Repository, scheduling: str) -> None:
    parameters = 'parameters { key: "behaviour" value { string_value: "raise m_0_1" } }'
    config = f"{parameters} {scheduling} instance_group {{ count: 2 kind: KIND_CPU }} {warmup()}"
    assert "failed to run warmup sample 'sample': no weights; " in load_error(warm, config)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            "data_type: TYPE_FP32 dims: -1 zero_data: true",
            "warmup setting expects all variable-size dimensions are specified for input 'X'",
        ),
        (
            "data_type: TYPE_FP32 dims: 3",
            "[request id: <id_unknown>] warmup setting expects input 'X' to have input_data_type set",
        ),
        ("dims: 3 zero_data: true", "data-type is '<invalid>', but model 'm' expects 'FP32'"),
        ("data_type: TYPE_INT32 dims: 3 zero_data: true", "data-type is 'INT32', but model 'm' expects 'FP32'"),
        (
            'data_type: TYPE_FP32 dims: 3 input_data_file: "short"',
            "warmup setting expects 12 bytes, but the data provided from shortonly has 8 bytes",
        ),
        (
            'data_type: TYPE_FP32 dims: 3 input_data_file: "nosuch"',
            "failed to open text file for read warmup/nosuch: No such file or directory",
        ),
        ('data_type: TYPE_FP32 dims: 3 input_data_file: "../config.pbtxt"', "is outside of the model's 'warmup'"),
        ('data_type: TYPE_FP32 dims: 3 input_data_file: "/etc/passwd"', "is outside of the model's 'warmup'"),
    ],
)
def test_a_sample_that_can_not_be_made_fails_the_load(warm: Repository, value: str, text: str) -> None:
    folder: Path = warm.models / "m" / "warmup"
    folder.mkdir(parents=True)
    (folder / "short").write_bytes(bytes(8))
    assert text in load_error(warm, warmup(f'key: "X" value {{ {value} }}'))
    assert executed() == []


def test_requests_are_served_after_the_warmup(warm: Repository) -> None:
    warm.model("m", "warm", warmup(), io=IO)
    with serving(warm, "m") as server:
        given = Tensor.of("X", np.ones((1, 2), np.float32))
        assert send(server, "m", given).responses()[0].error is None
        assert to_wire(Tensor.of("X", executed()[-1][2][0]["X"][2])) == to_wire(given)


def test_an_instance_that_is_added_while_requests_run_is_warmed_up_beside_them(warm: Repository) -> None:
    behaviour = 'parameters { key: "behaviour" value { string_value: "wait" } }'
    warm.model("m", "warm", "instance_group { count: 1 }" + warmup() + behaviour, io=IO)
    STAGE.open("go m_0_0")
    STAGE.open("go m_0_1")
    with serving(warm, "m") as server:
        del STAGE.gates["go m_0_0"]
        busy = send(server, "m", Tensor.of("X", np.ones((1, 2), np.float32)))
        eventually(lambda: len(executed()) == 2)
        warm.model("m", "warm", "instance_group { count: 2 }" + warmup() + behaviour, io=IO)
        began_s = time.monotonic()
        server.load_model("m")
        assert time.monotonic() - began_s < HANDLES_GRACE_S  # it did not wait for the request
        STAGE.open("go m_0_0")
        assert busy.responses()[0].error is None
        assert [name for name, _, _ in executed()] == ["m_0_0", "m_0_0", "m_0_1"]
