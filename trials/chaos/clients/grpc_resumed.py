"""gRPC streams that a client resumes with `resume_from`, over another channel.

Invariant: see the package. Each response arrives once, whatever happens to the connections: numbers that are not
consecutive end the stream with an error. If the connection is lost before the first response, the stream is started
again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import tritonclient.grpc.aio as aio_client

from ..outcome import Piece, StreamFailed
from ..specs import StreamSpec
from .grpc_stream import outputs_of_result, request_of, results
from .patience import NO_PATIENCE, Patience
from .tensors import piece_of


class ResumedGrpcClient:
    """address: asked before each call. patience: of a client whose server is gone."""

    def __init__(self, address: Callable[[], str], patience: Patience = NO_PATIENCE) -> None:
        self._address, self._patience = address, patience

    async def close(self) -> None:
        pass

    async def pieces(self, spec: StreamSpec) -> AsyncIterator[Piece]:
        reading, waiting = _Reading(spec), self._patience.begin(spec)
        while not reading.is_over:
            try:
                async for piece in self._one_call(reading):
                    waiting.served()
                    yield piece
            except StreamFailed as error:
                await waiting.again(error)

    async def _one_call(self, reading: _Reading) -> AsyncIterator[Piece]:
        client = aio_client.InferenceServerClient(self._address())
        try:
            async with aclosing(results(client, reading.request())) as answers:  # type: ignore[type-var]
                async for result in answers:
                    if (piece := reading.piece(result)) is not None:
                        yield piece
        finally:
            await client.close()
        reading.ended()


class _Reading:
    """One stream as far as it was read. Owner: its reader."""

    def __init__(self, spec: StreamSpec) -> None:
        self.is_over = False
        self._spec = spec
        self._stream = ""
        self._next_number = self._tokens = 0
        self._has_final = False

    def request(self) -> dict[str, Any]:
        whole = request_of(self._spec)
        if not self._next_number:
            return whole | {"parameters": {"resumable": True}}
        return whole | {"inputs": [], "parameters": {"resume_from": f"{self._stream}:{self._next_number - 1}"}}

    def piece(self, result: Any) -> Piece | None:
        """None for the empty final response."""
        parameters = result.get_response().parameters
        stream, number = parameters["stream_id"].string_param, parameters["event_number"].int64_param
        if number != self._next_number or (number and stream != self._stream):
            raise StreamFailed(f"response {stream}:{number} came in place of {self._next_number}", "identity")
        self._stream, self._next_number = stream, number + 1
        self._has_final = parameters["triton_final_response"].bool_param
        outputs = outputs_of_result(result)
        if "text_output" not in outputs:
            return None
        piece = piece_of(outputs, self._tokens)
        assert piece.usage is not None
        self._tokens = piece.usage[1]
        return piece

    def ended(self) -> None:
        if not self._has_final:
            raise StreamFailed("the call ended before the final response", "connection")
        self.is_over = True
