"""Decoupled KServe v2 gRPC streams with tritonclient, one ModelStreamInfer call per request.

Invariant: see the package. `triton_grpc_error` is set, so that errors have Triton's status codes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as aio_client
from tritonclient.grpc import InferInput, InferResult
from tritonclient.utils import InferenceServerException

from ..outcome import Piece, StreamFailed
from ..specs import StreamSpec
from .tensors import input_values, piece_of

_NO_STATUS = "Internal error from Core"
"""What gRPC's client says, as INTERNAL, where a call ended without any status of the server's."""


class GrpcClient:
    def __init__(self, address: str) -> None:
        self._client = aio_client.InferenceServerClient(address)

    async def close(self) -> None:
        await self._client.close()

    async def pieces(self, spec: StreamSpec) -> AsyncIterator[Piece]:
        tokens = 0
        async with aclosing(results(self._client, request_of(spec))) as answers:  # type: ignore[type-var]
            async for result in answers:
                outputs = outputs_of_result(result)
                if "text_output" not in outputs:
                    continue  # the empty final response
                piece = piece_of(outputs, tokens)
                assert piece.usage is not None
                tokens = piece.usage[1]
                yield piece


def request_of(spec: StreamSpec) -> dict[str, Any]:
    inputs = [_tensor(name, value) for name, value in input_values(spec).items()]
    return {"model_name": spec.model, "inputs": inputs, "enable_empty_final_response": True}


async def results(client: aio_client.InferenceServerClient, request: dict[str, Any]) -> AsyncIterator[InferResult]:
    """Of one call of ModelStreamInfer. Raises StreamFailed."""
    answers: Any = client.stream_infer(_once(request), headers={"triton_grpc_error": "true"})
    try:
        async for result, error in answers:
            if error is not None:
                raise StreamFailed(error.message() or "", error.status() or "")
            yield result
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        raise StreamFailed(details, "connection" if details == _NO_STATUS else error.code().name) from error
    except InferenceServerException as error:
        raise StreamFailed(error.message() or "", error.status() or "") from error
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise StreamFailed("the call was cancelled by the server's end", "CANCELLED") from None
    finally:
        answers.cancel()


async def _once(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


def _tensor(name: str, value: str | bool) -> InferInput:
    array = np.array([value]) if isinstance(value, bool) else np.array([value.encode()], dtype=object)
    made = InferInput(name, [1], "BOOL" if isinstance(value, bool) else "BYTES")
    made.set_data_from_numpy(array)
    return made


def outputs_of_result(result: InferResult) -> dict[str, Any]:
    arrays = {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}
    values: dict[str, Any] = {}
    for name, array in arrays.items():
        if name == "output_ids":
            values[name] = array.tolist()
        else:
            value = array.ravel()[0]
            values[name] = value.decode() if isinstance(value, bytes) else value
    return values
