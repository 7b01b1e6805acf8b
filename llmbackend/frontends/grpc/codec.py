"""ModelInferRequest and ModelInferResponse to and from the host's messages.

For: the gRPC servicer. Does not know: the event loop, streams. Invariant: tensors cross as raw bytes; the host, which
knows the model, checks them. Source: grpc_service.proto and Triton's infer_handler; texts as recorded from Triton
2.51.
"""

from __future__ import annotations

from typing import Any, Final

from llmbackend.core.errors import invalid_argument
from llmbackend.core.messages import InferenceRequest
from llmbackend.core.tensors import NUMPY_DTYPE, RawTensor, SharedInput

from ..kserve.request_parameters import RequestOptions, classes_from_proto, shared_range_from_proto
from .messages import OpenRequest, raw_contents, where

UNKNOWN_DATATYPE: Final = "<invalid>"
"""Triton's name for a datatype that it does not know."""


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


def decode_request(request: OpenRequest, options: RequestOptions) -> InferenceRequest:
    """`request` as the host takes it; its parameters were read into `options`.

    Raises TritonError for an input without data or with two kinds of it.
    """
    message = request.message
    inputs, shared = _inputs(request)
    outputs = message.outputs
    special = [output for output in outputs if output.parameters]
    shared_outputs = {
        output.name: shared_range for output in special if (shared_range := shared_range_from_proto(output)) is not None
    }
    classes = {output.name: count for output in special if (count := classes_from_proto(output))}
    return InferenceRequest(
        model_name=message.model_name,
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
        shared_outputs=shared_outputs,
        classes=classes,
    )


def _inputs(request: OpenRequest) -> tuple[list[RawTensor], list[SharedInput]]:
    """Inputs with data, and inputs in shared memory. `raw_input_contents` has an entry for each of the former."""
    inputs: list[RawTensor] = []
    shared: list[SharedInput] = []
    message = request.message
    for index, tensor in enumerate(message.inputs):
        shared_range = shared_range_from_proto(tensor) if tensor.parameters else None
        if shared_range is None:
            inputs.append(_input(request, tensor, index, len(inputs)))
        elif tensor.HasField("contents"):
            raise invalid_argument(
                f"unexpected 'content' provided when using shared memory for input tensor '{tensor.name}' for model "
                f"'{message.model_name}'"
            )
        else:
            shared.append(SharedInput(tensor.name, _datatype(tensor), tuple(tensor.shape), shared_range))
    return inputs, shared


def _datatype(tensor: Any) -> str:
    datatype: str = tensor.datatype
    return datatype if datatype in NUMPY_DTYPE else UNKNOWN_DATATYPE


def _input(request: OpenRequest, tensor: Any, index: int, raw_index: int) -> RawTensor:
    """`index` among the inputs, `raw_index` among those that are not in shared memory."""
    message, raws = request.message, request.raws
    if raws and tensor.HasField("contents"):
        raise invalid_argument(
            f"contents field must not be specified when using raw_input_contents for "
            f"{where(tensor, message.model_name)}"
        )
    raw: bytes | memoryview
    if raw_index < len(raws):
        raw = raws[raw_index]
    elif not raws and index in request.contents:
        raw = request.contents[index]
    elif not raws and tensor.HasField("contents"):
        raw = raw_contents(tensor, message.model_name)
    else:
        raise invalid_argument(f"unable to find data for input tensor {where(tensor, message.model_name)} in request.")
    return RawTensor(tensor.name, _datatype(tensor), tuple(tensor.shape), raw)
