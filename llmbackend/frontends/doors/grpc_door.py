"""The door of the gRPC port: who may call, what for, and how often.

For: the gRPC server, as its outermost interceptor. Does not know: what an RPC does. Invariants: a call that may not
enter is ended before its message is read; each request of a stream is admitted on its own, in the stream
(keyed_server.py), and the call itself costs nothing.
Source: UNAVAILABLE and its text for restricted protocols are Triton's; UNAUTHENTICATED, PERMISSION_DENIED and
RESOURCE_EXHAUSTED are what gRPC's status codes say of themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from . import refusals
from .api_keys import KeyRing
from .rate_limit import Account
from .restrictions import Category, Restrictions
from .roles import OPERATORS_CATEGORIES, Role, role_needed
from .visit import VISIT, DoorMetrics, Visit

log = logging.getLogger(__name__)
Handler = Any  # grpc.RpcMethodHandler, which the type stubs do not describe in full
Context = grpc.aio.ServicerContext[Any, Any]

_SERVICE: Final = "/inference.GRPCInferenceService/"
_RPCS: Final = {
    Category.HEALTH: ("ServerLive", "ServerReady", "ModelReady"),
    Category.METADATA: ("ServerMetadata", "ModelMetadata"),
    Category.INFERENCE: ("ModelInfer", "ModelStreamInfer"),
    Category.SHARED_MEMORY: tuple(
        f"{kind}SharedMemory{action}" for kind in ("System", "Cuda") for action in ("Status", "Register", "Unregister")
    ),
    Category.MODEL_CONFIG: ("ModelConfig",),
    Category.MODEL_REPOSITORY: ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    Category.STATISTICS: ("ModelStatistics",),
    Category.TRACE: ("TraceSetting",),
    Category.LOGGING: ("LogSettings",),
}
_HEALTH_SERVICE: Final = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")
CATEGORY_OF: Final = {f"{_SERVICE}{rpc}": category for category, rpcs in _RPCS.items() for rpc in rpcs} | dict.fromkeys(
    _HEALTH_SERVICE, Category.HEALTH
)
OPEN_RPCS: Final = frozenset({f"{_SERVICE}ServerLive", f"{_SERVICE}ServerReady", *_HEALTH_SERVICE})
_OPERATORS_RPCS: Final = frozenset(
    f"{_SERVICE}{rpc}"
    for rpc in (
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        *(name for category in OPERATORS_CATEGORIES for name in _RPCS[category]),
    )
)
_STATUS_NAMES: Final[dict[Any, str]] = {code.value[0]: code.name for code in grpc.StatusCode}
_KINDS: Final = ("unary_unary", "unary_stream", "stream_stream")


class GrpcDoor(grpc.aio.ServerInterceptor):
    """`keys` None: everybody may enter."""

    def __init__(
        self, keys: KeyRing | None, restrictions: Restrictions, metrics: DoorMetrics, log_requests: bool
    ) -> None:
        self._keys = keys
        self._restrictions = restrictions
        self._metrics = metrics
        self._log_requests = log_requests

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        headers = {key: _bytes(value) for key, value in reversed(handler_call_details.invocation_metadata)}
        handler, account = self._open(method, headers, handler)
        return _logged(handler, method, account) if self._log_requests else handler

    def _open(self, method: str, headers: dict[str, bytes], handler: Handler) -> tuple[Handler, Account | None]:
        """The handler to use, and whose call it is."""
        account: Account | None = None
        if self._keys is not None and method not in OPEN_RPCS:
            key = refusals.bearer_token(headers)
            account = None if key is None else self._keys.find(key)
            if account is None:
                self._metrics.decided(None, "grpc", "unauthenticated")
                text = refusals.NO_KEY if key is None else refusals.WRONG_KEY
                return _refusing(grpc.StatusCode.UNAUTHENTICATED, text), None
        category = CATEGORY_OF.get(method)
        header = self._restrictions.missing_header(category, headers)
        if header is not None:
            self._metrics.decided(account, "grpc", "restricted")
            text = f"This protocol is restricted, expecting header '{header}'"
            return _refusing(grpc.StatusCode.UNAVAILABLE, text), account
        if account is not None:
            handler = self._admit(account, method, category, handler)
        return handler, account

    def _admit(self, account: Account, method: str, category: Category | None, handler: Handler) -> Handler:
        """Roles are asked for first. Limits are on inference; anything else just passes."""
        if account.role is not Role.OPERATOR and method in _OPERATORS_RPCS:
            self._metrics.decided(account, "grpc", "forbidden")
            return _refusing(grpc.StatusCode.PERMISSION_DENIED, role_needed(account.name, account.role))
        visit = Visit(account, "grpc", self._metrics)
        if category is not Category.INFERENCE:
            self._metrics.decided(account, "grpc", "accepted")
            return _visiting(handler, visit)
        refusal = None if handler.stream_stream is not None else visit.enter()
        if refusal is not None:
            return _refusing(
                grpc.StatusCode.RESOURCE_EXHAUSTED, refusal.message, (("retry-after", refusal.retry_after),)
            )
        return _visiting(handler, visit)


def _bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8", "replace") if isinstance(value, str) else value


def _refusing(code: grpc.StatusCode, text: str, trailers: tuple[tuple[str, str], ...] = ()) -> Handler:
    """Ends the call. Told to be a stream in both directions, whatever the call is, gRPC reads no message first."""

    async def refuse(requests: Any, context: Context) -> None:
        await context.abort(code, text, trailers)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _wrapped(handler: Handler, wrap: Callable[[Any], Any]) -> Handler:
    return handler._replace(**{kind: wrap(call) for kind in _KINDS if (call := getattr(handler, kind)) is not None})


def _visiting(handler: Handler, visit: Visit) -> Handler:
    def wrap(call: Callable[[Any, Context], Awaitable[Any]]) -> Any:
        async def visited(request: Any, context: Context) -> Any:
            VISIT.set(visit)  # the call has a task, and so a context, of its own
            return await call(request, context)

        return visited

    return _wrapped(handler, wrap)


def _logged(handler: Handler, method: str, account: Account | None) -> Handler:
    began_s = time.perf_counter()
    name = "-" if account is None else account.name

    def wrap(call: Callable[[Any, Context], Awaitable[Any]]) -> Any:
        async def logged(request: Any, context: Context) -> Any:
            status = "OK"
            try:
                return await call(request, context)
            except asyncio.CancelledError:
                status = "CANCELLED"
                raise
            except Exception:
                status = _STATUS_NAMES.get(context.code(), "UNKNOWN")
                raise
            finally:
                elapsed_ms = (time.perf_counter() - began_s) * 1e3
                log.info("gRPC %s %s key=%s %.1f ms", method, status, name, elapsed_ms)

        return logged

    return _wrapped(handler, wrap)
