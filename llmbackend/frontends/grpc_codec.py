"""ModelInferRequest and ModelInferResponse to and from the host's messages.

For: the gRPC servicer. Does not know: the event loop, streams. Invariant: tensors cross as raw bytes; the host, which
knows the model, checks them. Source: grpc_service.proto and Triton's infer_handler; texts as recorded from Triton
2.51.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.backend_api import ParameterValue
from llmbackend.core.errors import invalid_argument
from llmbackend.core.messages import InferenceRequest, InferenceResponse, RawTensor, ResponseCallback, SharedInput
from llmbackend.core.tensors import NUMPY_DTYPE, to_wire

from .request_parameters import RequestOptions
from .shared_memory_params import classes_from_proto, place_from_proto

UNKNOWN_DATATYPE: Final = "<invalid>"
"""Triton's name for a datatype that it does not know."""

_CONTENTS_FIELD: Final[Mapping[str, str]] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_DATATYPE_OF_FIELD: Final[Mapping[str, str]] = {
    "bool_contents": "BOOL",
    "int_contents": "INT32",
    "int64_contents": "INT64",
    "uint_contents": "UINT32",
    "uint64_contents": "UINT64",
    "fp32_contents": "FP32",
    "fp64_contents": "FP64",
    "bytes_contents": "BYTES",
}


def model_version(text: str) -> int:
    """The number in a request's version string, -1 for "". Raises TritonError INVALID_ARG for anything else."""
    if not text:
        return -1
    try:
        return int(text)
    except ValueError:
        raise invalid_argument(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        ) from None


def decode_request(message: Any, options: RequestOptions, callback: ResponseCallback) -> InferenceRequest:
    """The request in a ModelInferRequest whose parameters were read into `options`.

    Raises TritonError for an input without data or with two kinds of it.
    """
    inputs, shared = _inputs(message)
    outputs = message.outputs
    special = [output for output in outputs if output.parameters]
    places = {output.name: place for output in special if (place := place_from_proto(output)) is not None}
    classes = {output.name: count for output in special if (count := classes_from_proto(output))}
    return InferenceRequest(
        model_name=message.model_name,
        response_callback=callback,
        model_version=model_version(message.model_version),
        id=message.id,
        inputs=tuple(inputs),
        requested_outputs=tuple([output.name for output in outputs]),
        parameters=options.parameters,
        correlation_id=options.correlation_id,
        flags=options.flags,
        priority=options.priority,
        timeout_us=options.timeout_us,
        shared_inputs=tuple(shared),
        output_places=places,
        classes=classes,
    )


def _inputs(message: Any) -> tuple[list[RawTensor], list[SharedInput]]:
    """Those with data, and those in shared memory. `raw_input_contents` has an entry for each of the former."""
    inputs: list[RawTensor] = []
    shared: list[SharedInput] = []
    raws = message.raw_input_contents
    for tensor in message.inputs:
        place = place_from_proto(tensor) if tensor.parameters else None
        if place is None:
            inputs.append(_input(message, tensor, raws, len(inputs)))
        elif tensor.HasField("contents"):
            raise invalid_argument(
                f"unexpected 'content' provided when using shared memory for input tensor '{tensor.name}' for model "
                f"'{message.model_name}'"
            )
        else:
            shared.append(SharedInput(tensor.name, _datatype(tensor), tuple(tensor.shape), place))
    return inputs, shared


def _datatype(tensor: Any) -> str:
    datatype: str = tensor.datatype
    return datatype if datatype in NUMPY_DTYPE else UNKNOWN_DATATYPE


def _input(message: Any, tensor: Any, raws: Sequence[bytes], index: int) -> RawTensor:
    if raws and tensor.HasField("contents"):
        raise invalid_argument(
            f"contents field must not be specified when using raw_input_contents for {_where(message, tensor)}"
        )
    if index < len(raws):
        raw = raws[index]
    elif not raws and tensor.HasField("contents"):
        raw = _contents(tensor, _where(message, tensor))
    else:
        raise invalid_argument(f"unable to find data for input tensor {_where(message, tensor)} in request.")
    return RawTensor(tensor.name, _datatype(tensor), tuple(tensor.shape), raw)


def _where(message: Any, tensor: Any) -> str:
    return f"'{tensor.name}' for model '{message.model_name}'"


def _contents(tensor: Any, where: str) -> bytes:
    """The typed contents as raw bytes. Raises TritonError INVALID_ARG for a field that is not the datatype's."""
    expected = _CONTENTS_FIELD.get(tensor.datatype)
    for field, _ in tensor.contents.ListFields():
        if field.name != expected:
            raise invalid_argument(
                f"unexpected explicit tensor data for input tensor {where} of type "
                f"'{_DATATYPE_OF_FIELD[field.name]}', expected datatype '{tensor.datatype}'"
            )
    if expected is None:
        return b""
    values = getattr(tensor.contents, expected)
    if tensor.datatype == "BYTES":
        return b"".join(struct.pack("<I", len(value)) + value for value in values)
    wide = NUMPY_DTYPE[_DATATYPE_OF_FIELD[expected]]
    return np.array(values, dtype=wide).astype(NUMPY_DTYPE[tensor.datatype]).tobytes()


def fill_response(message: Any, response: InferenceResponse, in_shared_memory: Collection[str] = ()) -> None:
    """Writes `response` (one without an error) into an empty ModelInferResponse. The data of outputs that are in shared
    memory is left out."""
    message.model_name = response.model_name
    message.model_version = str(response.model_version)
    message.id = response.request_id
    for name, value in response.parameters.items():
        _set_parameter(message.parameters[name], value)
    for tensor in response.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_output_contents.append(b"" if tensor.name in in_shared_memory else to_wire(tensor))


def _set_parameter(parameter: pb.InferParameter, value: ParameterValue) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value
