"""Inference over gRPC: ModelInfer and ModelStreamInfer.

For: the gRPC server. Does not know: backends, in which process the host is. Invariant: a cancelled RPC, or one past its
deadline, cancels its request.
Source: grpc_service.proto (from tritonclient) and Triton's grpc_server, as recorded from Triton 2.51.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.errors import unsupported
from llmbackend.core.host_protocol import Host

from ..inference_gate import LARGE_BODY_BYTES, InferenceGate
from ..journals.resumable_streams import ResumableStreams
from ..kserve.infer_codec import single_response
from ..kserve.request_parameters import options_from_proto
from ..protocol_options import ProtocolOptions
from .codec import decode_request, model_version
from .description_rpcs import DescriptionRpcs
from .messages import opened
from .response_messages import response_parts
from .rpc import Context, close_when_sent, name_trace, rpc, sampled
from .stream import StreamSession

_COMPRESSION: Final = {
    "none": None,
    "low": grpc.Compression.Gzip,
    "medium": grpc.Compression.Deflate,
    "high": grpc.Compression.Deflate,
}
"""As gRPC's core chooses by level for a client that accepts both algorithms; Python's API has no levels."""


class InferenceRpcs(DescriptionRpcs):
    def __init__(
        self,
        server: Host,
        gate: InferenceGate,
        write_timeout_s: float,
        protocol: ProtocolOptions,
        streams: ResumableStreams | None,
    ) -> None:
        """streams: of requests that a client can come back to; None: they are another process's."""
        super().__init__(server)
        self._streams = streams
        self._gate = gate
        self._write_timeout_s = write_timeout_s
        self._forward = protocol.grpc_forward
        self._compression = _COMPRESSION[protocol.grpc_response_compression]

    @rpc
    async def ModelInfer(self, request: Any, context: Context) -> Any:
        open_request = await opened(request, self._gate)
        request = open_request.message
        if self._server.is_decoupled(request.model_name, model_version(request.model_version)):
            raise unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
        self._set_compression(context)
        trace = sampled(self._server, request.model_name, context)
        if trace is not None:
            close_when_sent(trace, context)
        options = options_from_proto(request.parameters)
        if self._forward:
            options = self._forward.into(options, context.invocation_metadata())
        given = await self._gate.with_shared_inputs(decode_request(open_request, options))
        inference = await self._gate.send(given, trace=trace)
        try:
            if trace is not None:
                await name_trace(trace, context)  # a host in another process has named it by now
            response = single_response(await inference.collect(at_most=2))
        finally:
            inference.close()
        message = await _joined(response_parts(response, given.shared_outputs))
        if trace is not None:
            trace.mark("GRPC_SEND_START")
        return message

    async def ModelStreamInfer(self, requests: AsyncIterator[pb.ModelInferRequest], context: Context) -> None:
        self._set_compression(context)
        await StreamSession(self._gate, context, self._write_timeout_s, self._forward, self._streams).run(requests)

    def _set_compression(self, context: Context) -> None:
        if self._compression is not None:
            context.set_compression(self._compression)


async def _joined(parts: Sequence[bytes | memoryview]) -> bytes:
    """A large message is joined in a thread, where Python holds no lock while it copies."""
    if sum(map(len, parts)) <= LARGE_BODY_BYTES:
        return b"".join(parts)
    return await asyncio.to_thread(b"".join, parts)
