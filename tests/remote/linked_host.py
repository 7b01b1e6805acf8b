"""A host with its endpoint, and what frontends make of it from another event loop: as two processes would, in one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceRequest, InferenceResponse
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.remote.host_endpoint import HostEndpoint
from llmbackend.remote.remote_server import RemoteServer

WAIT_S = 30.0


@contextlib.asynccontextmanager
async def served(host: InferenceServer, folder: Path, **options: Any) -> AsyncIterator[HostEndpoint]:
    """An endpoint of `host` on a socket in `folder`; with `keys` on the loopback, as over a network."""
    where = f"ipc://{folder}/host" if options.get("keys") is None else "tcp://127.0.0.1:0"
    endpoint = HostEndpoint(host, where, **options)
    endpoint.start()
    try:
        yield endpoint
    finally:
        await asyncio.to_thread(endpoint.close)


@contextlib.asynccontextmanager
async def attached(*endpoints: str, **options: Any) -> AsyncIterator[RemoteServer]:
    """A RemoteServer that has found a host."""
    server = RemoteServer(endpoints, **options)
    try:
        await server.start(WAIT_S)
        yield server
    finally:
        server.close()


async def answers(server: Any, request: InferenceRequest) -> list[InferenceResponse]:
    """All responses, as a frontend gets them."""
    gate = InferenceGate(server)
    try:
        inference = await gate.send(request)
        try:
            return await inference.collect(1 << 20)
        finally:
            inference.close()
    finally:
        gate.close()


def shown(responses: Sequence[InferenceResponse]) -> list[Any]:
    """What a client could see of responses."""
    return [
        (
            one.model_name,
            one.model_version,
            one.request_id,
            dict(one.parameters),
            None if one.error is None else (one.error.code, one.error.message, one.error.param),
            [(each.name, each.datatype, each.shape, each.data.tolist()) for each in one.outputs],
        )
        for one in responses
    ]


def threads_named(prefix: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]
