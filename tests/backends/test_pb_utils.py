"""Parts of pb_utils that need no host."""

from __future__ import annotations

import json
import re
import socket
import struct
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format

from llmbackend.backends.python.stub import pb_utils
from llmbackend.backends.python.stub.packets import PACKET_BYTES, PacketReader, encode
from llmbackend.backends.python.stub.pb_tensor import _Exporter, _tensor_of
from llmbackend.core.backend_api import ModelConfig, config_to_json

CPU, CUDA = 1, 2
"""DLDeviceType"""


def test_tensor_of_text_holds_bytes_from_any_source() -> None:
    for array in (np.array(["é", "b"]), np.array([b"\xc3\xa9", b"b"]), np.array(["é", b"b"], dtype=object)):
        assert pb_utils.Tensor("t", array).as_numpy().tolist() == [b"\xc3\xa9", b"b"]


def test_tensor_refuses_what_triton_has_no_type_for() -> None:
    with pytest.raises(ValueError, match="tensor 't' has numpy dtype complex128"):
        pb_utils.Tensor("t", np.zeros(1, dtype=np.complex128))
    with pytest.raises(TypeError, match="Tensor 't' needs a numpy array, got list"):
        pb_utils.Tensor("t", [1])  # type: ignore[arg-type]


def test_dlpack_shares_memory_both_ways() -> None:
    array = np.arange(4, dtype=np.float32)
    shared = pb_utils.Tensor.from_dlpack("t", pb_utils.Tensor("s", array).to_dlpack())
    array[0] = 9
    assert shared.as_numpy().tolist() == [9, 1, 2, 3]
    assert np.from_dlpack(pb_utils.Tensor("s", array)).tolist() == [9, 1, 2, 3]
    with pytest.raises(ValueError, match="BYTES"):
        pb_utils.Tensor("s", np.array([b"x"], dtype=object)).to_dlpack()


def on_a_gpu(array: np.ndarray[Any, Any]) -> Any:
    """A capsule that says so."""
    capsule = array.__dlpack__()
    _tensor_of(capsule).device_type = CUDA
    return capsule


def copy_of(capsule: Any) -> np.ndarray[Any, Any]:
    _tensor_of(capsule).device_type = CPU
    return np.from_dlpack(_Exporter(capsule)).copy()


class ArrayOnGpu:
    """Without `cpu`, as those of cupy and jax."""

    def __dlpack__(self) -> Any:
        return on_a_gpu(np.arange(3))

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0


@pytest.mark.parametrize("framework", ["torch", "cupy"])
def test_dlpack_of_device_memory_is_copied_by_a_loaded_framework(
    monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    def from_dlpack(source: Any) -> Any:
        copied = copy_of(source.__dlpack__() if hasattr(source, "__dlpack__") else source)
        return SimpleNamespace(cpu=lambda: copied, get=lambda: copied)

    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match="tensor 't' is in the memory of a device: copy it to the CPU first"):
        pb_utils.Tensor.from_dlpack("t", on_a_gpu(np.arange(3)))
    module = SimpleNamespace(from_dlpack=from_dlpack)
    module.utils = SimpleNamespace(dlpack=module)
    monkeypatch.setitem(sys.modules, framework, module)
    for source in (on_a_gpu(np.arange(3)), ArrayOnGpu()):
        assert pb_utils.Tensor.from_dlpack("t", source).as_numpy().tolist() == [0, 1, 2]


def test_byte_tensors_survive_serialising() -> None:
    array = np.array([b"ab", b"", b"\xff\x00"], dtype=object)
    encoded = pb_utils.serialize_byte_tensor(array)
    assert encoded is not None
    assert pb_utils.deserialize_bytes_tensor(encoded.item()).tolist() == array.tolist()
    for cut in (b"\x01", b"\x05\x00\x00\x00abc"):
        with pytest.raises(ValueError):
            pb_utils.deserialize_bytes_tensor(cut)


def test_datatype_helpers_agree_with_each_other() -> None:
    for config_type, numpy_type in pb_utils.TRITON_STRING_TO_NUMPY.items():
        assert pb_utils.triton_string_to_numpy(config_type) is numpy_type
        number = pb_utils.numpy_to_triton_type(numpy_type)
        assert number is not None
        assert np.dtype(pb_utils.triton_to_numpy_type(number)) == np.dtype(numpy_type)
    assert pb_utils.np_to_triton_dtype(np.dtype("U4")) == "BYTES"
    assert pb_utils.np_to_triton_dtype(np.complex128) is None
    assert pb_utils.triton_to_numpy_type(99) is None
    assert pb_utils.triton_to_numpy_type("TYPE_STRING") is None  # type: ignore[arg-type]
    assert pb_utils.numpy_to_triton_type(np.complex128) is None
    assert pb_utils.numpy_to_triton_type("TYPE_STRING") is None
    with pytest.raises(KeyError):
        pb_utils.triton_string_to_numpy("FP32")


def test_modules_that_tritons_module_imports_are_its_attributes() -> None:
    assert (pb_utils.np, pb_utils.json, pb_utils.struct) == (np, json, struct)
    assert {"np", "json", "struct"} <= set(dir(pb_utils))


def test_error_codes_are_checked() -> None:
    assert pb_utils.TritonError("m").code() == pb_utils.TritonError.INTERNAL
    with pytest.raises(ValueError, match="got 99"):
        pb_utils.TritonError("m", 99)
    with pytest.raises(TypeError, match="error of an InferenceResponse must be a TritonError, got str"):
        pb_utils.InferenceResponse(error="no")  # type: ignore[arg-type]


def test_what_needs_a_models_process_says_so_elsewhere() -> None:
    request = pb_utils.InferenceRequest(model_name="x", requested_output_names=["y"], inputs=[])
    for call in (
        request.exec,
        lambda: pb_utils.is_model_ready("x"),
        lambda: pb_utils.MetricFamily("n", "d", pb_utils.MetricFamily.COUNTER),
        lambda: pb_utils.Logger.log_info("x"),
        pb_utils.get_model_dir,
    ):
        with pytest.raises(RuntimeError, match="works only in the process of a model instance"):
            call()
    assert not hasattr(pb_utils, "nonsense")


def test_inference_request_has_tritons_arguments_and_refusals() -> None:
    tensor = pb_utils.Tensor("X", np.zeros(1, dtype=np.float32))
    request = pb_utils.InferenceRequest(
        request_id="r",
        correlation_id="c",
        inputs=[tensor],
        requested_output_names=["Y"],
        model_name="m",
        model_version=2,
        flags=1,
        timeout=5,
        preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 0),
        trace=pb_utils.InferenceTrace(),
        parameters={"a": 1, "b": True, "c": "x"},
    )
    request.set_flags(3)
    seen = (request.request_id(), request.correlation_id(), request.inputs(), request.requested_output_names())
    assert seen == ("r", "c", [tensor], {"Y"})
    assert (request.model_name(), request.model_version(), request.flags(), request.timeout()) == ("m", 2, 3, 5)
    assert json.loads(request.parameters()) == {"a": 1, "b": True, "c": "x"}
    assert not request.is_cancelled() and request.trace().get_context() is None
    with pytest.raises(pb_utils.TritonModelException, match="get_response_sender applies to requests that this model"):
        request.get_response_sender()
    with pytest.raises(TypeError, match="needs inputs, requested_output_names and model_name"):
        pb_utils.InferenceRequest(model_name="m")
    with pytest.raises(pb_utils.TritonModelException, match="Requested output name for request with id"):
        pb_utils.InferenceRequest(model_name="m", inputs=[], requested_output_names=[""])
    for wrong in (None, 3):
        with pytest.raises(TypeError, match="must be str or bytes"):
            pb_utils.InferenceRequest(model_name="m", inputs=[], requested_output_names=[wrong])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="model_version must be an int, got NoneType"):
        pb_utils.InferenceRequest(model_name="m", inputs=[], requested_output_names=[], model_version=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="flags must be an int from 0 to 4294967295, got -1"):
        pb_utils.InferenceRequest(model_name="m", inputs=[], requested_output_names=[], flags=-1)
    with pytest.raises(TypeError, match="correlation_id must be int or str"):
        pb_utils.InferenceRequest(model_name="m", inputs=[], requested_output_names=[], correlation_id=None)  # type: ignore[arg-type]
    with pytest.raises(pb_utils.TritonModelException, match="Correlation ID must be integer or string"):
        pb_utils.InferenceRequest(model_name="m", inputs=[], requested_output_names=[], correlation_id=b"c")  # type: ignore[arg-type]
    with pytest.raises(pb_utils.TritonModelException, match="Input tensor for request with id '' and model name 'm'"):
        pb_utils.InferenceRequest(model_name="m", inputs=[None], requested_output_names=[])  # type: ignore[list-item]


WRONG_PARAMETERS = [
    ([], "Expect dict, got <class 'list'>"),
    ({1: "x"}, "Expect parameters keys to have type str, found type <class 'int'>"),
    ({"a": 1, "f": 0.5}, "Expect parameters values to have type bool/int/str, found type <class 'float'>"),
    ({"n": None}, "Expect parameters values to have type bool/int/str, found type <class 'NoneType'>"),
    ({"l": ["x"]}, "Expect parameters values to have type bool/int/str, found type <class 'list'>"),
    ({"b": 1 << 63}, "Expect parameter 'b' to fit into 64 bits, got 9223372036854775808"),
]


@pytest.mark.parametrize(("parameters", "told"), WRONG_PARAMETERS)
def test_parameters_are_bool_int_and_str_alone(parameters: Any, told: str) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=re.escape(told)):
        pb_utils.InferenceResponse(parameters=parameters)
    with pytest.raises(pb_utils.TritonModelException, match=re.escape(told)):
        pb_utils.InferenceRequest(model_name="m", inputs=[], requested_output_names=[], parameters=parameters)
    assert json.loads(pb_utils.InferenceResponse(parameters={"a": 1, "b": True}).parameters()) == {"a": 1, "b": True}


def test_text_may_be_bytes_wherever_pb_utils_takes_text() -> None:
    tensor = pb_utils.Tensor(b"X", np.zeros(1, dtype=np.float32))
    request = pb_utils.InferenceRequest(
        request_id=b"r", inputs=[tensor], requested_output_names=[b"Y", np.bytes_(b"Z")], model_name=np.bytes_(b"m")
    )
    assert (request.request_id(), request.model_name(), request.requested_output_names()) == ("r", "m", {"Y", "Z"})
    assert all(type(name) is str for name in (tensor.name(), request.request_id(), request.model_name()))
    assert pb_utils.get_input_tensor_by_name(request, b"X") is tensor
    assert pb_utils.get_output_tensor_by_name(pb_utils.InferenceResponse([tensor]), b"X") is tensor
    assert pb_utils.Tensor.from_dlpack(b"X", np.zeros(1)).name() == "X"
    assert pb_utils.TritonError("ü".encode()).message() == "ü"
    with pytest.raises(ValueError, match="model_name must be UTF-8"):
        pb_utils.InferenceRequest(model_name=b"\xff", inputs=[], requested_output_names=[])


def test_tensors_and_responses_refuse_what_triton_refuses() -> None:
    array = np.zeros(1, dtype=np.float32)
    refused: list[tuple[type[Exception], Callable[[], Any]]] = [
        (TypeError, lambda: pb_utils.Tensor(None, array)),  # type: ignore[arg-type]
        (TypeError, lambda: pb_utils.Tensor("X", None)),  # type: ignore[arg-type]
        (TypeError, lambda: pb_utils.Tensor("", None)),  # type: ignore[arg-type]
        (pb_utils.TritonModelException, lambda: pb_utils.Tensor("", array)),
        (pb_utils.TritonModelException, lambda: pb_utils.Tensor.from_dlpack("X", None)),
        (pb_utils.TritonModelException, lambda: pb_utils.Tensor.from_dlpack("", array)),
        (pb_utils.TritonModelException, lambda: pb_utils.InferenceResponse([None])),  # type: ignore[list-item]
        (TypeError, lambda: pb_utils.InferenceResponse(None)),  # type: ignore[arg-type]
        (TypeError, lambda: pb_utils.TritonError(None)),  # type: ignore[arg-type]
        (TypeError, lambda: pb_utils.Logger.log("m", 1)),  # type: ignore[arg-type]
        (TypeError, lambda: pb_utils.Logger.log("m", None)),  # type: ignore[arg-type]
        (TypeError, lambda: pb_utils.Logger.log_info(None)),  # type: ignore[arg-type]
    ]
    for kind, call in refused:
        with pytest.raises(kind):
            call()


@pytest.mark.parametrize("sizes", [(), (3,), (0, 5000), (PACKET_BYTES,), (1, 3 * PACKET_BYTES, 0, 7)])
def test_message_of_any_size_survives_its_packet(sizes: tuple[int, ...]) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parts = [np.full(size, index + 1, dtype=np.uint8) for index, size in enumerate(sizes)]
    with here, there:
        encode(("verb", {"a": [1.5, None, b"x"]}), parts).send(here)
        received = PacketReader(there).receive()
        assert received is not None
        message, came = received
        assert message == ("verb", {"a": [1.5, None, b"x"]})
        assert [bytes(part) for part in came] == [part.tobytes() for part in parts]
        assert not any(memoryview(part).readonly for part in came)
        here.close()
        assert PacketReader(there).receive() is None


def test_long_text_is_a_message_too() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        encode("x" * 3 * PACKET_BYTES).send(here)
        assert PacketReader(there).receive() == ("x" * 3 * PACKET_BYTES, [])


@pytest.mark.parametrize(
    "packet", [b"nonsense", b"\x80", b"\x80\x05cos\nsystem\n.", b"\x01" + bytes(20), b"\x02" + bytes(15), b"\x01" * 16]
)
def test_what_is_no_message_runs_nothing_and_is_refused(packet: bytes) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        here.send(packet)
        with pytest.raises(ValueError):
            PacketReader(there).receive()


@pytest.mark.slow  # imports torch
def test_bfloat16_goes_through_numpy_and_dlpack() -> None:
    import ml_dtypes
    import torch

    values = np.array([1.5, -2.0], dtype=ml_dtypes.bfloat16)
    tensor = pb_utils.Tensor("b", values)
    assert tensor.triton_dtype() == 14
    shared = torch.utils.dlpack.from_dlpack(tensor.to_dlpack())
    assert shared.dtype is torch.bfloat16 and shared.tolist() == [1.5, -2.0]
    shared[0] = 3.0
    assert values.tolist() == [3.0, -2.0]
    back = pb_utils.Tensor.from_dlpack("b", torch.tensor([0.5], dtype=torch.bfloat16))
    assert back.triton_dtype() == 14 and torch.utils.dlpack.from_dlpack(back.to_dlpack()).tolist() == [0.5]
    for tensor_of_either in (tensor, back):
        with pytest.raises(pb_utils.TritonModelException, match="'b' has type BF16, which numpy does not have"):
            tensor_of_either.as_numpy()


def test_config_json_has_numbers_and_defaults_and_comes_back() -> None:
    config = ModelConfig(name="m", max_batch_size=4)
    config.input.add(name="X", data_type="TYPE_FP32", dims=[-1, 4])
    config.version_policy.specific.versions.extend([1, 3])
    config.dynamic_batching.max_queue_delay_microseconds = 5
    config.dynamic_batching.priority_queue_policy[1].max_queue_size = 2
    config.parameters["k"].string_value = "v"
    fields = config_to_json(config)
    assert json.loads(json.dumps(fields)) == fields
    assert fields["input"][0]["dims"] == [-1, 4] and fields["output"] == []
    assert fields["version_policy"] == {"specific": {"versions": [1, 3]}}
    assert fields["dynamic_batching"]["max_queue_delay_microseconds"] == 5
    assert json_format.ParseDict(fields, ModelConfig()) == config
    assert pb_utils.get_input_config_by_name(fields, "X") == fields["input"][0]
    assert pb_utils.get_output_config_by_name(fields, "X") is None
    assert not pb_utils.using_decoupled_model_transaction_policy(fields)
