"""The shared memory extensions over HTTP: status, register, unregister; of one region, or of all.

For: the HTTP app. Does not know: regions. Source: the shared memory extensions of KServe v2; texts of Triton's
http_server, golden transcript 40.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from llmbackend.core.errors import invalid_argument
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.memory.shared_memory import CUDA_HANDLE_BYTES, MemoryKind

from .control_body import read_control
from .http_errors import JSON, plain
from .json_reader import as_object, as_string, as_unsigned, dump, member, parse


class SharedMemoryEndpoints:
    def __init__(self, server: InferenceServer) -> None:
        self._server = server

    def add_to(self, router: APIRouter) -> None:
        for prefix, kind, register in (
            ("/v2/systemsharedmemory", MemoryKind.SYSTEM, self._register_system),
            ("/v2/cudasharedmemory", MemoryKind.CUDA, self._register_cuda),
        ):
            for path in (prefix, f"{prefix}/region/{{region}}"):
                router.add_api_route(f"{path}/status", self._status(kind), methods=["GET"])
                router.add_api_route(f"{path}/register", register, methods=["POST"])
                router.add_api_route(f"{path}/unregister", self._unregister(kind), methods=["POST"])

    def _status(self, kind: MemoryKind) -> Any:
        async def status(request: Request) -> Response:
            regions = self._server.shared_memory.status(kind, _region(request))
            rows = [
                {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}
                for region in regions
            ]
            return plain(dump(rows), content_type=JSON)

        return status

    def _unregister(self, kind: MemoryKind) -> Any:
        async def unregister(request: Request) -> Response:
            self._server.shared_memory.unregister(kind, _region(request))
            return plain(content_type=JSON)

        return unregister

    async def _register_system(self, request: Request) -> Response:
        body = await _body(request)
        key = as_string(_required(body, "key"))
        offset = as_unsigned(body.get("offset", 0))
        byte_size = as_unsigned(_required(body, "byte_size"))
        self._server.shared_memory.register_system(_region(request), key, offset, byte_size)
        return plain(content_type=JSON)

    async def _register_cuda(self, request: Request) -> Response:
        body = await _body(request)
        handle = _decoded(as_string(member(_required(body, "raw_handle"), "b64")))
        byte_size = as_unsigned(member(body, "byte_size"))
        device_id = as_unsigned(member(body, "device_id"))
        self._server.shared_memory.register_cuda(_region(request), handle, byte_size, device_id)
        return plain(content_type=JSON)


def _region(request: Request) -> str:
    """ "" = every region."""
    name: str = request.path_params.get("region", "")
    return name


async def _body(request: Request) -> Mapping[str, Any]:
    return as_object(parse(await read_control(request)))


def _required(body: Mapping[str, Any], field: str) -> Any:
    if field not in body:
        raise invalid_argument(f"Shared memory register request has no '{field}' field")
    return body[field]


def _decoded(text: str) -> bytes:
    try:
        handle = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        handle = b""
    if len(handle) != CUDA_HANDLE_BYTES:
        raise invalid_argument("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    return handle
