"""Bytes of gRPC responses: the same that protocol buffers make, whatever the outputs are."""

from __future__ import annotations

import os
import random
import string
import threading
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.messages import InferenceResponse
from llmbackend.core.outputs import JSON, Outputs, layout_of
from llmbackend.core.tensors import Tensor, to_wire
from llmbackend.frontends.grpc.codec import outcome_message, refusal_message, response_parts, stream_message
from llmbackend.frontends.grpc.server import yield_to_event_loop

DATATYPES = ("BYTES", "INT32", "UINT32", "FP32", "BOOL", JSON)


def message_of(response: InferenceResponse, shared: tuple[str, ...] = ()) -> Any:
    """As protocol buffers have it, without the response's parameters."""
    message: Any = pb.ModelInferResponse(
        model_name=response.model_name, model_version=str(response.model_version), id=response.request_id
    )
    for tensor in response.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_output_contents.append(b"" if tensor.name in shared else to_wire(tensor))
    return message


def serialised(response: InferenceResponse, final: bool, shared: tuple[str, ...] = ()) -> bytes:
    message: Any = pb.ModelStreamInferResponse(infer_response=message_of(response, shared))
    message.infer_response.parameters["triton_final_response"].bool_param = final
    return bytes(message.SerializeToString())


def words(draw: random.Random, most: int) -> str:
    return "".join(draw.choices(string.ascii_letters + "éß漢🎉\n\0", k=draw.randint(0, most)))


def value(draw: random.Random, datatype: str) -> Any:
    if datatype == "BYTES":
        return words(draw, draw.choice((3, 200, 20_000)))
    if datatype == JSON:
        return {"token": words(draw, 5), "logprob": -draw.random()}
    if datatype == "BOOL":
        return [draw.random() < 0.5]
    return [draw.randint(0, 99) for _ in range(draw.randint(0, 300))]


@pytest.mark.parametrize("seed", range(60))
def test_bytes_are_those_of_protocol_buffers(seed: int) -> None:
    draw = random.Random(seed)
    datatypes = tuple(draw.choices(DATATYPES if seed % 2 else ("BYTES",), k=draw.randint(0, 4)))
    names = tuple(f"{words(draw, 9)}{index}" for index in range(len(datatypes)))
    outputs = Outputs(layout_of(names, datatypes), tuple(value(draw, datatype) for datatype in datatypes))
    shared = names[:1] if draw.random() < 0.2 else ()
    for of_kind in (outputs, tuple(outputs)):
        response = InferenceResponse(words(draw, 200), draw.choice((-1, 0, 1, 7000)), words(draw, 200), of_kind)
        for final in (False, True):
            assert stream_message(response, final, shared) == serialised(response, final, shared)
        assert b"".join(response_parts(response, shared)) == message_of(response, shared).SerializeToString()


def test_tensors_of_any_shape_and_bytes_that_are_no_text() -> None:
    tensors = (
        Tensor.of("A", np.arange(6, dtype=np.float32).reshape(1, 2, 3)),
        Tensor.of("B", np.zeros((0, 4), np.int64)),
        Tensor("C", "BYTES", (2, 1), np.array([[b"\xff\x00"], [b""]], object)),
        Tensor.of("D", np.array(5, np.uint8)),
    )
    for response in (InferenceResponse("m", 1, "", tensors), InferenceResponse("m", 1, "id", ())):
        assert stream_message(response, True) == serialised(response, True)
        assert b"".join(response_parts(response)) == message_of(response).SerializeToString()


def test_parameters_of_a_response() -> None:
    response = InferenceResponse("m", 1, "i", (Tensor.text("T", "x"),), {"s": "v", "i": 3, "b": True, "f": 0.5})
    expected: Any = pb.ModelStreamInferResponse.FromString(serialised(response, False))
    parameters = expected.infer_response.parameters
    parameters["s"].string_param, parameters["i"].int64_param = "v", 3
    parameters["b"].bool_param, parameters["f"].double_param = True, 0.5
    assert pb.ModelStreamInferResponse.FromString(stream_message(response, False)) == expected
    del parameters["triton_final_response"]
    assert pb.ModelInferResponse.FromString(b"".join(response_parts(response))) == expected.infer_response


def test_messages_without_outputs() -> None:
    found: Any = pb.ModelStreamInferResponse.FromString(outcome_message("m", "i", True, "it failed"))
    assert (found.error_message, found.infer_response.model_name, found.infer_response.id) == ("it failed", "m", "i")
    assert found.infer_response.parameters["triton_final_response"].bool_param
    found = pb.ModelStreamInferResponse.FromString(refusal_message("i", "no"))
    assert (found.error_message, found.infer_response) == ("no", pb.ModelInferResponse(id="i"))


def test_only_the_polling_thread_of_grpc_yields() -> None:
    end = threading.Event()
    poller, other = (
        threading.Thread(target=end.wait, name=f"Thread-1 ({target})") for target in ("_poll_wrapper", "work")
    )
    poller.start()
    other.start()
    try:
        yield_to_event_loop()
        assert poller.native_id is not None and other.native_id is not None
        assert os.sched_getscheduler(poller.native_id) == os.SCHED_BATCH
        assert os.sched_getscheduler(other.native_id) == os.SCHED_OTHER == os.sched_getscheduler(0)
    finally:
        end.set()
        poller.join()
        other.join()
