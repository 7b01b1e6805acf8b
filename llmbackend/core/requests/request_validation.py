"""Checks a request against its model's configuration, in the order and with the texts of Triton's core.

Invariants: a valid request has only known inputs, with the configured datatypes and shapes, and data of the matching
size; the work is bounded by the shapes rather than by the request's bytes, since no more strings are read than a shape
has elements. Frontends check the bounds before they queue a request.
Source: PrepareForInference in Triton's core; golden transcripts 11 to 13, 30, 31.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Final

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInput

from ..errors import TritonError, invalid_argument, request_tag
from ..messages import InferenceRequest
from ..tensors import (
    DATATYPE_OF_CONFIG_TYPE,
    NUMPY_DTYPE,
    RawTensor,
    Tensor,
    bytes_tensor,
    check_size,
    count_strings,
    element_count,
    from_wire,
    shape_text,
    split_strings,
)

AnyTensor = Tensor | RawTensor
RAW_INPUT_NAME = "raw_input"
"""Triton's name in errors for the only input of a raw binary request."""
_COUNTED_BEYOND = 4096
"""How many surplus elements of a BYTES input are counted for the error text."""
BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


@dataclass(frozen=True, slots=True)
class _InputRule:
    """One input of the configuration. dims: without the batch dimension, -1 = any size."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    is_required: bool

    @classmethod
    def of(cls, config: ModelInput) -> _InputRule:
        datatype = DATATYPE_OF_CONFIG_TYPE[DataType.Name(config.data_type)]
        return cls(config.name, datatype, tuple(config.dims), not config.optional)

    def admits(self, shape: tuple[int, ...]) -> bool:
        """Whether `shape`, without the batch dimension, is allowed."""
        if shape == self.dims:  # most inputs; a configured dimension is -1 or positive
            return VARIABLE not in shape
        return len(shape) == len(self.dims) and all(
            got >= 0 and want in (VARIABLE, got) for want, got in zip(self.dims, shape, strict=True)
        )


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """The validated parts of a request.

    inputs: decoded, by name
    requested_outputs: sorted; all outputs of the model if the request names none
    batch_size: 0 = the model does not batch
    """

    inputs: Mapping[str, Tensor]
    requested_outputs: tuple[str, ...]
    batch_size: int


class RequestValidator:
    """The rules of one model version."""

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._max_batch_size = config.max_batch_size
        self._inputs = {item.name: _InputRule.of(item) for item in config.input}
        self._required_count = sum(rule.is_required for rule in self._inputs.values())
        self._outputs = tuple(sorted(item.name for item in config.output))
        self._reshapes = input_reshapes(config)

    def validate(self, request: InferenceRequest) -> ValidRequest:
        """Raises TritonError INVALID_ARG with Triton's text for the first broken rule."""
        check_request(request)
        tag = request_tag(request.id)
        tensors = self._tensors_by_name(request, tag)
        outputs = self._requested_outputs(request.requested_outputs, tag)
        self._check_input_count(tensors, tag)
        batch_size = self._batch_size(tensors, tag)
        for name, tensor in tensors.items():
            self._check_type_and_shape(self._inputs[name], tensor, tag)
        shown_name = RAW_INPUT_NAME if request.raw_input is not None else None
        inputs: Mapping[str, Tensor] = {
            name: self._decoded(tensor, batch_size, shown_name or name, tag) for name, tensor in tensors.items()
        }
        if reshapes := self._reshapes:
            inputs = {name: reshapes[name].apply(each) if name in reshapes else each for name, each in inputs.items()}
        return ValidRequest(inputs, outputs, batch_size)

    def _tensors_by_name(self, request: InferenceRequest, tag: str) -> dict[str, AnyTensor]:
        """The tensors, sorted by name."""
        if request.raw_input is not None:
            deduced = self._deduce_raw(request, request.raw_input, tag)
            return {deduced.name: deduced}
        tensors: dict[str, AnyTensor] = {}
        for tensor in sorted(request.inputs, key=lambda item: item.name):
            if tensor.name in tensors:
                raise invalid_argument(f"{tag}input '{tensor.name}' already exists in request")
            tensors[tensor.name] = tensor
        return tensors

    def _deduce_raw(self, request: InferenceRequest, raw: bytes, tag: str) -> RawTensor:
        found = len(request.inputs) + 1
        if found != 1 or len(self._inputs) != 1:
            raise invalid_argument(
                f"{tag}Raw request must only have 1 input (found {found}) to be deduced but got {len(self._inputs)} "
                f"inputs in '{self._model}' model configuration"
            )
        (config,) = self._inputs.values()
        datatype = config.datatype
        shape = list(config.dims)
        if shape.count(-1) > 1:
            raise invalid_argument(
                f"{tag}The shape of the raw input '{config.name}' can not be deduced because there are more than one "
                f"variable-sized dimension"
            )
        known = element_count(tuple(dim for dim in shape if dim != -1))
        if datatype == "BYTES":
            if known != 1 or -1 in shape:
                raise invalid_argument(
                    f"{tag}For BYTE datatype raw input '{config.name}', the model must have input shape [1]"
                )
            raw = struct.pack("<I", len(raw)) + raw
        element_bytes = max(known * NUMPY_DTYPE[datatype].itemsize, 1)
        deduced = 1 if datatype == "BYTES" else len(raw) // element_bytes
        dims = [deduced if dim == -1 else dim for dim in shape]
        return RawTensor(config.name, datatype, tuple([1, *dims] if self._max_batch_size else dims), raw)

    def _requested_outputs(self, requested: Sequence[str], tag: str) -> tuple[str, ...]:
        if not requested:
            return self._outputs
        for name in requested:
            if name not in self._outputs:
                raise invalid_argument(f"unexpected inference output '{name}' for model '{self._model}'")
        found = sorted(set(requested))
        if len(found) != len(requested):
            twice = next(name for index, name in enumerate(requested) if name in requested[:index])
            raise invalid_argument(f"{tag}output '{twice}' already exists in request")
        return tuple(found)

    def _check_input_count(self, tensors: Mapping[str, AnyTensor], tag: str) -> None:
        if tensors.keys() == self._inputs.keys():
            return
        missing = [name for name, rule in self._inputs.items() if rule.is_required and name not in tensors]
        unknown = next((name for name in tensors if name not in self._inputs), None)
        total, required, got = len(self._inputs), self._required_count, len(tensors)
        if required <= got <= total and unknown is not None:
            raise invalid_argument(f"unexpected inference input '{unknown}' for model '{self._model}'")
        if required <= got <= total and not missing:
            return
        expected = f"{total}" if total == required else f"number of inputs between {required} and {total}"
        # For missing inputs Triton prints only "]", and clients' tests compare the text.
        missing_text = f"[{_quoted(missing)}]" if missing else "]"
        raise invalid_argument(
            f"{tag}expected {expected}{' inputs' if total == required else ''} but got {got} inputs for model "
            f"'{self._model}'. Got input(s) [{_quoted(tensors)}], but missing required input(s) {missing_text}. "
            f"Please provide all required input(s)."
        )

    def _batch_size(self, tensors: Mapping[str, AnyTensor], tag: str) -> int:
        """The common first dimension; 0 if the model does not batch."""
        batch_size: int | None = None
        if not self._max_batch_size:
            return 0
        for name, tensor in tensors.items():
            if not tensor.shape:
                raise invalid_argument(
                    f"{tag}input '{name}' has no shape but model requires batch dimension for '{self._model}'"
                )
            if batch_size is not None and tensor.shape[0] != batch_size:
                raise invalid_argument(
                    f"{tag}input '{name}' batch size does not match other inputs for '{self._model}'"
                )
            batch_size = tensor.shape[0]
        if batch_size is not None and batch_size > self._max_batch_size:
            raise invalid_argument(
                f"{tag}inference request batch-size must be <= {self._max_batch_size} for '{self._model}'"
            )
        return batch_size or 0

    def _check_type_and_shape(self, rule: _InputRule, tensor: AnyTensor, tag: str) -> None:
        if tensor.datatype != rule.datatype:
            datatype = tensor.datatype if tensor.datatype in NUMPY_DTYPE else "<invalid>"
            raise invalid_argument(
                f"{tag}inference input '{rule.name}' data-type is '{datatype}', but model '{self._model}' "
                f"expects '{rule.datatype}'"
            )
        shape = tensor.shape[1:] if self._max_batch_size else tensor.shape
        if rule.admits(shape):
            check_size(rule.name, rule.datatype, tensor.shape)
            return
        if len(shape) == len(rule.dims) and min(shape, default=0) < 0:
            raise invalid_argument(
                f"{tag}All input dimensions should be specified for input '{rule.name}' for model "
                f"'{self._model}', got {shape_text(tensor.shape)}"
            )
        full = [VARIABLE, *rule.dims] if self._max_batch_size else rule.dims
        raise invalid_argument(
            f"{tag}unexpected shape for input '{rule.name}' for model '{self._model}'. Expected {shape_text(full)}, "
            f"got {shape_text(tensor.shape)}. {BATCH_NOTE if self._max_batch_size else ''}"
        )

    def _decoded(self, tensor: AnyTensor, batch_size: int, shown_name: str, tag: str) -> Tensor:
        """The tensor, decoded after checking its size. shown_name: its name in errors."""
        if tensor.datatype == "BYTES":
            if isinstance(tensor, RawTensor):
                return self._strings(tensor, shown_name, tag)
            if (expected := self._expected_strings(tensor.shape)) != tensor.data.size:
                raise self._wrong_count(shown_name, expected, str(tensor.data.size), tag)
        else:
            got = len(tensor.raw) if isinstance(tensor, RawTensor) else tensor.data.nbytes
            expected = NUMPY_DTYPE[tensor.datatype].itemsize
            if self._max_batch_size:
                # The batch size is an unsigned 32-bit number of at least 1, as in Triton: golden 13, 31.
                expected *= max(batch_size & 0xFFFFFFFF, 1) * element_count(tensor.shape[1:])
            else:
                expected *= element_count(tensor.shape)
            if got != expected:
                raise invalid_argument(
                    f"{tag}input byte size mismatch for input '{shown_name}' for model '{self._model}'. "
                    f"Expected {expected}, got {got}"
                )
        if isinstance(tensor, Tensor):
            return tensor
        return from_wire(tensor.name, tensor.datatype, tensor.shape, tensor.raw)

    def _strings(self, tensor: RawTensor, shown_name: str, tag: str) -> Tensor:
        """The decoded elements, whose number `check_request` has bounded."""
        expected = self._expected_strings(tensor.shape)
        elements, offset = split_strings(tensor.raw, max(expected, 0))
        if offset == len(tensor.raw) and len(elements) == expected:
            if expected == element_count(tensor.shape):
                return bytes_tensor(tensor.name, tensor.shape, elements)
            return from_wire(tensor.name, "BYTES", tensor.shape, tensor.raw)  # raises for the batch size
        beyond, offset = count_strings(tensor.raw, offset, _COUNTED_BEYOND)
        got = len(elements) + beyond
        if beyond == _COUNTED_BEYOND:
            raise self._wrong_count(shown_name, expected, f"at least {got}", tag)
        rest = len(tensor.raw) - offset
        if 0 < rest < 4:
            raise invalid_argument(
                f"{tag}incomplete string length indicator for inference input '{shown_name}' for model "
                f"'{self._model}', expecting 4 bytes but only {rest} bytes available. Please make sure the string "
                f"length indicator is in one buffer."
            )
        if got + (rest > 0) != expected:  # the last one may be incomplete
            raise self._wrong_count(shown_name, expected, str(got + (rest > 0)), tag)
        (length,) = struct.unpack_from("<I", tensor.raw, offset)
        raise invalid_argument(
            f"incomplete string data for inference input '{shown_name}', expecting string of length {length} but "
            f"only {rest - 4} bytes available"
        )

    def _expected_strings(self, shape: tuple[int, ...]) -> int:
        if self._max_batch_size:
            shape = (max(shape[0] & 0xFFFFFFFF, 1), *shape[1:])
        return element_count(shape)

    def _wrong_count(self, shown_name: str, expected: int, got: str, tag: str) -> TritonError:
        return invalid_argument(
            f"{tag}expected {expected} string elements for inference input '{shown_name}' for model "
            f"'{self._model}', got {got}"
        )


def _quoted(names: Sequence[str] | Mapping[str, AnyTensor]) -> str:
    return ",".join(f"'{name}'" for name in names)


MAX_ID_CHARACTERS: Final = 4096
"""Every response repeats the id of its request."""
MAX_TENSORS: Final = 4096
MAX_PARAMETERS: Final = 4096
MAX_DIMENSIONS: Final = 1024
"""numpy's limit is 64; shapes up to this limit get Triton's error text."""
MAX_STRINGS: Final = 1 << 20
"""Elements of all BYTES inputs. Each becomes a Python object: a million take 50 MiB and 0.2 s."""


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
    """Raises TritonError INVALID_ARG for more than MAX_STRINGS. subject: the beginning of the error text."""
    if count > MAX_STRINGS:
        raise invalid_argument(f"{subject} {count} elements, at most {MAX_STRINGS} are accepted in a request")


def string_count_bound(inputs: Iterable[Tensor | RawTensor]) -> int:
    """An upper bound on the number of elements in all BYTES inputs, from shape and size (at least 4 bytes each)."""
    return sum(_elements(tensor) for tensor in inputs if tensor.datatype == "BYTES")


def _elements(tensor: Tensor | RawTensor) -> int:
    if isinstance(tensor, Tensor):
        return tensor.data.size
    return min(max(element_count(tensor.shape), 0), len(tensor.raw) // 4)


VARIABLE = -1


class Reshape:
    """Reshapes tensors from dimensions `before` to `after`, both without the batch dimension."""

    def __init__(self, before: Sequence[int], after: Sequence[int], batches: bool) -> None:
        self._before = tuple(before)
        self._after = tuple(after)
        self._batches = batches

    def apply(self, tensor: Tensor) -> Tensor:
        """Raises ValueError for a tensor whose dimensions are not `before`."""
        batch, shape = (tensor.shape[:1], tensor.shape[1:]) if self._batches else ((), tensor.shape)
        if len(shape) != len(self._before):
            raise ValueError(f"expected {len(self._before)} dimensions, got {len(shape)}")
        variable = [value for dim, value in zip(self._before, shape, strict=True) if dim == VARIABLE]
        values = iter(variable)
        after = (*batch, *(next(values) if dim == VARIABLE else dim for dim in self._after))
        return Tensor(tensor.name, tensor.datatype, after, tensor.data.reshape(after))


def input_reshapes(config: ModelConfig) -> dict[str, Reshape]:
    """For each input with a reshape: from the client's shape to the model's."""
    batches = config.max_batch_size > 0
    return {
        item.name: Reshape(item.dims, item.reshape.shape, batches) for item in config.input if item.HasField("reshape")
    }


def output_reshapes(config: ModelConfig) -> dict[str, Reshape]:
    """For each output with a reshape: from the model's shape to the client's."""
    batches = config.max_batch_size > 0
    return {
        item.name: Reshape(item.reshape.shape, item.dims, batches) for item in config.output if item.HasField("reshape")
    }


def reshape_fault(dims: Sequence[int], shape: Sequence[int], batches: bool) -> str:
    """Why `dims` cannot be reshaped to `shape`; "" = they can."""
    if not shape and not batches:
        return "cannot have empty reshape for non-batching model as scalar tensors are not supported"
    counts = list(shape).count(VARIABLE), list(dims).count(VARIABLE)
    if all(counts) and counts[0] != counts[1]:
        return "has different number of variable-size dimensions for dims and reshape"
    if _sizes(shape) != _sizes(dims):
        return "has different size for dims and reshape"
    return ""


def _sizes(dims: Sequence[int]) -> list[int]:
    """The sizes before, between and after variable dimensions: [8, 6] for [2, 4, -1, 6]."""
    sizes = [1]
    for dim in dims:
        if dim == VARIABLE:
            sizes.append(1)
        else:
            sizes[-1] *= dim
    return sizes
