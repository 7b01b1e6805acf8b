"""A ModelInferRequest as it comes from gRPC: parsed, or large and not parsed yet.

For: the deserialiser of gRPC's methods and their handlers. Does not know: models, the host. Invariants: nothing that
takes more than milliseconds is parsed on the event loop (gRPC calls deserialisers there): of a large message the raw
tensors are only found, and what is large beside them is parsed in a worker process; what comes back is small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pickle import PickleBuffer
from typing import Any, Final

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.errors import invalid_argument
from llmbackend.core.requests.request_bounds import (
    MOST_PARAMETERS,
    MOST_TENSORS,
    check_count,
    check_dimensions,
    check_id,
)

from .grpc_contents import raw_contents
from .grpc_malformed import UNABLE, MalformedError, check
from .grpc_wire import split_raw_contents
from .inference import LARGE_BODY_BYTES, InferenceGate

MOST_UNPARSED_BYTES: Final = 16 << 20
"""Beside raw tensors. Typed contents take a worker process a second and a GiB for so much; raw tensors take nothing."""


@dataclass(frozen=True, slots=True)
class LargeRequest:
    """A serialised ModelInferRequest that nobody has parsed."""

    data: bytes


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """`raws` are the message's raw_input_contents. `contents`: of inputs by position whose typed contents were taken
    out of the message, their elements as raw bytes."""

    message: Any
    raws: Sequence[bytes | memoryview]
    contents: Mapping[int, bytes] = field(default_factory=dict)


def parse_or_keep(data: bytes) -> Any:
    """A ModelInferRequest, or a LargeRequest. Raises DecodeError."""
    if len(data) > LARGE_BODY_BYTES:
        return LargeRequest(data)
    return pb.ModelInferRequest.FromString(data)


async def opened(request: Any, gate: InferenceGate) -> OpenRequest:
    """Of what `parse_or_keep` gave.

    Raises MalformedError when it is no message, TritonError INVALID_ARG when it holds too much of something, or typed
    contents that are not its datatype's.
    """
    check(request)
    if not isinstance(request, LargeRequest):
        _check_bounds(request)
        return OpenRequest(request, request.raw_input_contents)
    try:
        rest, raws = split_raw_contents(request.data)
        if len(rest) <= LARGE_BODY_BYTES:
            message = pb.ModelInferRequest.FromString(rest)
            _check_bounds(message)
            return OpenRequest(message, raws)
    except DecodeError:
        raise MalformedError(UNABLE) from None
    if len(rest) > MOST_UNPARSED_BYTES:
        raise invalid_argument(
            f"the request has {len(rest)} bytes beside raw_input_contents, at most {MOST_UNPARSED_BYTES} are accepted; "
            f"send large tensors as raw_input_contents"
        )
    parsed: Any = await gate.parsed(len(rest), parse_contents, rest, bool(raws))  # PickleBuffers arrive as bytes
    if parsed is None:
        raise MalformedError(UNABLE)
    small, contents = parsed
    if len(small) > LARGE_BODY_BYTES:
        raise invalid_argument(
            f"the names and parameters of the request take {len(small)} bytes, at most {LARGE_BODY_BYTES} are accepted"
        )
    return OpenRequest(pb.ModelInferRequest.FromString(small), raws, contents)


def parse_contents(data: bytes, has_raws: bool) -> tuple[bytes, dict[int, PickleBuffer]] | None:
    """For a worker process: the message without typed contents, and those as raw bytes; None for what is no message.

    With `has_raws` contents are left where they are: such a request is refused with its small parts alone.
    """
    try:
        message = pb.ModelInferRequest.FromString(data)
    except DecodeError:
        return None
    _check_bounds(message)
    contents: dict[int, PickleBuffer] = {}
    for index, tensor in enumerate(message.inputs):
        if not tensor.HasField("contents"):
            continue
        if not has_raws:
            contents[index] = PickleBuffer(raw_contents(tensor, message.model_name))
        tensor.contents.Clear()  # the field stays, without elements
        tensor.contents.SetInParent()
    return message.SerializeToString(), contents


def _check_bounds(message: Any) -> None:
    check_id(message.id)
    check_count("inputs", message.inputs, MOST_TENSORS)
    check_count("requested outputs", message.outputs, MOST_TENSORS)
    check_count("parameters", message.parameters, MOST_PARAMETERS)
    for tensor in message.inputs:
        check_dimensions(tensor.name, tensor.shape)
