"""How many tensors, parameters, dimensions and strings a request may have, independent of its size in bytes.

For: RequestValidator, and the decoders of frontends, which check before they loop. Does not know: models, protocols.
Invariant: checking, copying or encoding a request within these bounds takes at most milliseconds of Python, so that it
never delays others.
Triton has no such bounds (it walks over a request in C++); these lie far above what models declare.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Final

from llmbackend.core.errors import invalid_argument, request_tag
from llmbackend.core.messages import InferenceRequest
from llmbackend.core.tensors import RawTensor, Tensor, element_count

MAX_ID_CHARACTERS: Final = 4096
"""Every response repeats the id of its request."""
MAX_TENSORS: Final = 4096
MAX_PARAMETERS: Final = 4096
MAX_DIMENSIONS: Final = 1024
"""numpy's own limit is 64; a shape up to this one gets Triton's text for a shape that does not match."""
MAX_STRINGS: Final = 1 << 20
"""Elements of all BYTES inputs together. Each becomes a Python object: a million of them take 50 MiB and 0.2 s."""


def check_request(request: InferenceRequest) -> None:
    """Raises TritonError INVALID_ARG for a request beyond one of the bounds."""
    check_id(request.id)
    tag = request_tag(request.id)
    check_count("inputs", request.inputs, MAX_TENSORS, tag)
    check_count("requested outputs", request.requested_outputs, MAX_TENSORS, tag)
    check_count("parameters", request.parameters, MAX_PARAMETERS, tag)
    for tensor in request.inputs:
        check_dimensions(tensor.name, tensor.shape, tag)
    check_strings(string_count_bound(request.inputs), f"{tag}the inputs with datatype BYTES have")


def check_id(request_id: str) -> None:
    """Raises TritonError INVALID_ARG, without the id in its text."""
    if len(request_id) > MAX_ID_CHARACTERS:
        raise invalid_argument(
            f"the request's id has {len(request_id)} characters, at most {MAX_ID_CHARACTERS} are accepted"
        )


def check_count(what: str, items: Sized, limit: int, tag: str = "") -> None:
    """Raises TritonError INVALID_ARG for more than `limit` items."""
    if len(items) > limit:
        raise invalid_argument(f"{tag}the request has {len(items)} {what}, at most {limit} are accepted")


def check_dimensions(name: str, shape: Sized, tag: str = "") -> None:
    """Raises TritonError INVALID_ARG for a shape of too many dimensions."""
    if len(shape) > MAX_DIMENSIONS:
        raise invalid_argument(
            f"{tag}the shape of input '{name[:MAX_ID_CHARACTERS]}' has {len(shape)} dimensions, at most "
            f"{MAX_DIMENSIONS} are accepted"
        )


def check_strings(count: int, subject: str) -> None:
    """Raises TritonError INVALID_ARG for more than MAX_STRINGS. subject: begins the error's text."""
    if count > MAX_STRINGS:
        raise invalid_argument(f"{subject} {count} elements, at most {MAX_STRINGS} are accepted in a request")


def string_count_bound(inputs: Iterable[Tensor | RawTensor]) -> int:
    """An upper bound of the elements of all BYTES inputs, by shape and size (each takes 4 bytes on the wire). The data
    is not read."""
    return sum(_elements(tensor) for tensor in inputs if tensor.datatype == "BYTES")


def _elements(tensor: Tensor | RawTensor) -> int:
    if isinstance(tensor, Tensor):
        return tensor.data.size
    return min(max(element_count(tensor.shape), 0), len(tensor.raw) // 4)
