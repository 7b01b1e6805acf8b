"""Converts requests, responses, tensors and errors to plain values for a stub process, and back; with Triton's error
texts.

Invariant: a tensor from a stub has its stated shape and size, or reading it raises, which ends only that stub.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmbackend.core.backend_api import (
    DATATYPE_OF_DTYPE,
    NO_TENANT,
    NUMPY_DTYPE,
    ErrorCode,
    InferenceResponse,
    ParameterValue,
    Request,
    Tenant,
    Tensor,
    TritonError,
    internal,
)

from .stub.errors import PackedError
from .stub.pb_request import PackedRequest, PackedTenant
from .stub.pb_response import PackedResponse
from .stub.pb_tensor import PackedTensor, pack_tensor, unpack_data

_CODES = tuple(ErrorCode)
_PARAMETER_TYPES: tuple[type[ParameterValue], ...] = (bool, int, float, str)
Response = tuple[list[Tensor], Mapping[str, ParameterValue], TritonError | None]


def not_healthy(name: str, cause: str) -> TritonError:
    """Triton's text, followed by the cause."""
    return internal(f"Stub process '{name}' is not healthy. {cause}".rstrip())


def execute_error(instance_name: str, text: str) -> TritonError:
    """The error of the requests of an execute call that raised."""
    return internal(f"Failed to process the request(s) for model '{instance_name}', message: {text}")


def pack_request(request: Request, number: int, parts: list[Any]) -> PackedRequest:
    trace = request.trace
    fields = (
        request.id,
        request.correlation_id,
        int(request.flags),
        request.timeout_us,
        _plain(request.parameters),
        [pack_tensor(tensor.name, tensor.datatype, tensor.data, parts) for tensor in request.inputs.values()],
        None if trace is None else trace.context or None,
        pack_tenant(request.tenant),
    )
    return number, request.requested_outputs, fields


def pack_tenant(tenant: Tenant) -> PackedTenant:
    return None if tenant is NO_TENANT else (tenant.key_name, tenant.is_operator, tenant.cache_name)


def unpack_tenant(packed: PackedTenant) -> Tenant:
    return NO_TENANT if packed is None else Tenant(*packed)


def pack_response(response: InferenceResponse, parts: list[Any]) -> PackedResponse:
    if response.error is not None:
        return [], _plain(response.parameters), pack_error(response.error)
    outputs = [pack_tensor(tensor.name, tensor.datatype, tensor.data, parts) for tensor in response.outputs]
    return outputs, _plain(response.parameters), None


def unpack_response(packed: PackedResponse, parts: Sequence[Any]) -> Response:
    outputs, parameters, error = packed
    return [unpack_tensor(tensor, parts) for tensor in outputs], parameters, unpack_error(error)


def unpack_tensor(packed: PackedTensor, parts: Sequence[Any]) -> Tensor:
    data = unpack_data(packed, parts, NUMPY_DTYPE)
    return Tensor(packed[0], DATATYPE_OF_DTYPE[data.dtype], data.shape, data)


def pack_error(error: TritonError) -> PackedError:
    return _CODES.index(error.code), error.message


def unpack_error(packed: PackedError | None) -> TritonError | None:
    return None if packed is None else TritonError(packed[1], _CODES[packed[0]])


def _plain(parameters: Mapping[str, ParameterValue]) -> dict[str, ParameterValue]:
    """The parameters, with subclasses of plain types (such as numpy's floats) replaced by those types."""
    return {str(name): _plain_value(value) for name, value in parameters.items()} if parameters else {}


def _plain_value(value: ParameterValue) -> ParameterValue:
    kind = next((kind for kind in _PARAMETER_TYPES if isinstance(value, kind)), str)
    return kind(value)
