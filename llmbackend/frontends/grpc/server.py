"""The gRPC server: channel arguments, port, message parsing, and the health service.

Independent of what RPCs do. Invariants: handlers of unary RPCs get only well-formed messages; all watchers of the
health service together cost one readiness check per second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from llmbackend.core.inference_server import InferenceServer

from ..context import FrontendContext
from ..http.request_body import MAX_CONTROL_BYTES, too_large
from ..inference_gate import InferenceGate
from ..limits import GrpcLimits
from .messages import UNPARSABLE, Malformed, parse_or_keep
from .rpc import Context
from .service import InferenceRpcs, InferenceServicer

_POLLER_THREAD: Final = "_poll_wrapper"
"""Part of the name of grpc.aio's thread: the function that it runs."""


def yield_to_event_loop() -> None:
    """Gives grpc.aio's polling thread the policy SCHED_BATCH. To be called after a grpc.aio server, which starts the
    thread, was created.

    Each finished write wakes this thread. With the default policy it preempts the event loop after each message; with
    SCHED_BATCH it handles all messages of a step together (64 streams: 33 µs of CPU per message instead of 44).
    """
    for thread in threading.enumerate():
        if _POLLER_THREAD in thread.name and thread.native_id is not None:
            with contextlib.suppress(AttributeError, OSError):
                os.sched_setscheduler(thread.native_id, os.SCHED_BATCH, os.sched_param(0))


INT32_MAX: Final = (1 << 31) - 1
_LARGE_MESSAGES: Final = {
    "ModelInfer": parse_or_keep,
    "ModelStreamInfer": parse_or_keep,
    "RepositoryModelLoad": pb.RepositoryModelLoadRequest.FromString,
}
_SERIALISED: Final = frozenset({"ModelInfer", "ModelStreamInfer"})
"""Methods whose handlers return serialised messages."""
SERVICES: Final = frozenset({"", "inference.GRPCInferenceService"})
_CHECK_INTERVAL_S: Final = 1.0
Status = health_pb2.HealthCheckResponse
_CORE_THREADS: Final = min(max(os.cpu_count() or 1, 4), 16)
"""Threads of gRPC's pool: one per core, within these bounds."""
_OTHER_THREADS: Final = 6
"""gRPC's other threads (watcher, timers, poller), and the first ones of requests."""


def check_threads() -> None:
    """Raises RuntimeError if gRPC's threads cannot be started: its core would retry for ten seconds, and then abort the
    process. The C library keeps the stacks and heaps of the test threads for the next threads."""
    wanted, may_end, threads = _CORE_THREADS + _OTHER_THREADS, threading.Event(), list[threading.Thread]()
    try:
        for _ in range(wanted):
            thread = threading.Thread(target=may_end.wait, name="grpc-threads", daemon=True)
            thread.start()
            threads.append(thread)
    except (RuntimeError, MemoryError):
        raise RuntimeError(
            f"gRPC needs {wanted} threads, but only {len(threads)} can be started: allow more processes (ulimit -u, "
            "pids.max) or address space (ulimit -v), or start without gRPC (--allow-grpc=false)"
        ) from None
    finally:
        may_end.set()
        for thread in threads:
            thread.join()


async def create_grpc_server(
    context: FrontendContext,
    *,
    address: str,
    limits: GrpcLimits | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> tuple[grpc.aio.Server, int]:
    """A bound server, not started, and its port. For a host in another process it has only the RPCs of inference,
    metadata and readiness. Must be awaited on the event loop that will run the server.

    address: "host:port", port 0: any
    limits: instead of the context's

    Raises RuntimeError if the address cannot be bound.
    """
    limits = limits or context.limits.grpc
    arguments = [
        ("grpc.max_send_message_length", INT32_MAX),
        ("grpc.so_reuseport", int(context.options.grpc_reuse_port)),
        *limits.channel_arguments(),
    ]
    grpc_server = grpc.aio.server(interceptors=list(interceptors), options=arguments)
    yield_to_event_loop()
    rpcs = InferenceServicer if isinstance(context.server, InferenceServer) else InferenceRpcs
    services = TolerantServices(grpc_server, _LARGE_MESSAGES)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(rpcs(context, limits.write_timeout_s), services)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(context.gate), services)
    credentials = context.access.grpc_credentials()
    try:
        if credentials is not None:
            return grpc_server, grpc_server.add_secure_port(address, credentials)
        return grpc_server, grpc_server.add_insecure_port(address)
    except RuntimeError:
        await grpc_server.start()  # gRPC frees a server's descriptors and threads only if it was started
        await grpc_server.stop(None)
        raise


class _Oversized:
    """Placeholder for a request that is too large."""


class TolerantServices:
    """Passed to a generated `add_…Servicer_to_server`: adds its handlers to a server, with parsers that do not raise.

    Malformed messages end as INTERNAL "Unable to parse request", as in Triton; grpc.aio would answer UNKNOWN and log a
    traceback. An interceptor would wrap the handlers for each call. The generated function adds the handlers twice;
    here they are added once, as generic handlers: for registered methods, grpc.aio has a task each, and checks all of
    them for every call (with 24 methods, a seventh of a small RPC's time).
    """

    def __init__(self, server: grpc.aio.Server, parsers: Mapping[str, Callable[[bytes], Any]]) -> None:
        """parsers: for methods whose messages may be large; they raise DecodeError"""
        self._server = server
        self._parsers = parsers

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Ignored: `add_registered_method_handlers` gets the same handlers."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        tolerant = {
            name: _tolerant(handler, self._parsers.get(name), name in _SERIALISED) for name, handler in handlers.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, tolerant),))


def _tolerant(handler: Any, parse: Callable[[bytes], Any] | None, writes_bytes: bool) -> Any:
    changes: dict[str, Any] = {"request_deserializer": _marking(parse or _parsing_small(handler.request_deserializer))}
    if handler.unary_unary is not None:
        changes["unary_unary"] = _refusing(handler.unary_unary)
    if writes_bytes:
        changes["response_serializer"] = None
    return handler._replace(**changes)


def _parsing_small(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    return lambda data: parse(data) if len(data) <= MAX_CONTROL_BYTES else _Oversized()


def _marking(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse_or_mark(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return Malformed()

    return parse_or_mark


def _refusing(handler: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def refuse_malformed(request: Any, context: Any) -> Any:
        if isinstance(request, Malformed):
            await context.abort(grpc.StatusCode.INTERNAL, UNPARSABLE)
        if isinstance(request, _Oversized):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, too_large().message)
        return await handler(request, context)

    return refuse_malformed


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1. Watchers get each change within two seconds.

    Sources: Triton's Check answers every service name alike (golden 30); Watch, which Triton lacks, follows
    grpc/doc/health-checking.md: SERVICE_UNKNOWN for an unknown service, and the call stays open.
    """

    def __init__(self, gate: InferenceGate) -> None:
        self._gate = gate
        self._answer: asyncio.Task[Any] | None = None
        self._checked_at_s = 0.0

    async def Check(self, request: Any, context: Context) -> Any:
        return Status(status=await self._ask())

    async def Watch(self, request: Any, context: Context) -> None:
        """Sends the status and its changes until the client cancels or the server stops."""
        if request.service not in SERVICES:
            await context.write(Status(status=Status.SERVICE_UNKNOWN))
            await asyncio.get_running_loop().create_future()  # until the call ends: services never change
        sent = None
        while True:
            status = await self._shared_answer()
            if status != sent:
                await context.write(Status(status=status))
                sent = status
            await asyncio.sleep(_CHECK_INTERVAL_S)

    async def _shared_answer(self) -> Any:
        """The status, at most a second old, shared by all watchers."""
        now_s = asyncio.get_running_loop().time()
        if self._answer is None or now_s - self._checked_at_s >= _CHECK_INTERVAL_S:
            self._answer, self._checked_at_s = asyncio.create_task(self._ask()), now_s
        return await asyncio.shield(self._answer)

    async def _ask(self) -> Any:
        ready = not self._gate.server.is_exiting and await self._gate.readiness.server_is_ready()
        return Status.SERVING if ready else Status.NOT_SERVING
