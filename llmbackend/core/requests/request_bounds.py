"""What a request may hold at most, whatever its size in bytes.

For: RequestValidator, and the frontends' decoders, which ask before they loop. Does not know: models, protocols.
Invariant: what is accepted here costs at most milliseconds of Python per step of its way; so checking, copying or
printing a request never holds up others.
The bounds are ours: Triton has none, and walks over such a request in C++. They lie far above what models declare.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Final

from llmbackend.core.errors import invalid_argument, request_tag
from llmbackend.core.messages import InferenceRequest
from llmbackend.core.tensors import RawTensor, Tensor, element_count

MOST_ID_CHARACTERS: Final = 4096
"""Every response of a request repeats its id."""
MOST_TENSORS: Final = 4096
MOST_PARAMETERS: Final = 4096
MOST_DIMENSIONS: Final = 1024
"""numpy takes 64; shapes up to here get Triton's text for a shape that does not match."""
MOST_STRINGS: Final = 1 << 20
"""Elements of all BYTES inputs together. Each becomes a Python object: a million take 50 MiB and about 0.2 s."""


def check_request(request: InferenceRequest) -> None:
    """Raises TritonError INVALID_ARG for a request beyond one of the bounds."""
    check_id(request.id)
    tag = request_tag(request.id)
    check_count("inputs", request.inputs, MOST_TENSORS, tag)
    check_count("requested outputs", request.requested_outputs, MOST_TENSORS, tag)
    check_count("parameters", request.parameters, MOST_PARAMETERS, tag)
    for tensor in request.inputs:
        check_dimensions(tensor.name, tensor.shape, tag)
    check_strings(most_strings(request.inputs), f"{tag}the inputs with datatype BYTES have")


def check_id(request_id: str) -> None:
    """Raises TritonError INVALID_ARG, without the id in its text."""
    if len(request_id) > MOST_ID_CHARACTERS:
        raise invalid_argument(
            f"the request's id has {len(request_id)} characters, at most {MOST_ID_CHARACTERS} are accepted"
        )


def check_count(what: str, items: Sized, most: int, tag: str = "") -> None:
    """Raises TritonError INVALID_ARG for more than `most` items."""
    if len(items) > most:
        raise invalid_argument(f"{tag}the request has {len(items)} {what}, at most {most} are accepted")


def check_dimensions(name: str, shape: Sized, tag: str = "") -> None:
    """Raises TritonError INVALID_ARG for a shape of too many dimensions."""
    if len(shape) > MOST_DIMENSIONS:
        raise invalid_argument(
            f"{tag}the shape of input '{name[:MOST_ID_CHARACTERS]}' has {len(shape)} dimensions, at most "
            f"{MOST_DIMENSIONS} are accepted"
        )


def check_strings(count: int, subject: str) -> None:
    """Raises TritonError INVALID_ARG for more than a request may have."""
    if count > MOST_STRINGS:
        raise invalid_argument(f"{subject} {count} elements, at most {MOST_STRINGS} are accepted in a request")


def most_strings(inputs: Iterable[Tensor | RawTensor]) -> int:
    """How many elements the BYTES inputs have at most, as their shapes and sizes say: each takes 4 bytes on the wire.
    The data is not looked at."""
    return sum(_elements(tensor) for tensor in inputs if tensor.datatype == "BYTES")


def _elements(tensor: Tensor | RawTensor) -> int:
    if isinstance(tensor, Tensor):
        return tensor.data.size
    return min(max(element_count(tensor.shape), 0), len(tensor.raw) // 4)
