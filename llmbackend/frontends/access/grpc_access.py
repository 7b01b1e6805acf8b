"""Access control of the gRPC port: API keys, restricted protocols, roles and rate limits, before an RPC's handler.

For: the gRPC server, as its outermost interceptor. Does not know: what an RPC does. Invariant: a call that is refused
ends before its message is read.
Source: UNAVAILABLE and its text for restricted protocols are Triton's; UNAUTHENTICATED, PERMISSION_DENIED and
RESOURCE_EXHAUSTED are used as gRPC's documentation of the status codes describes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from .api_keys import NO_KEY, WRONG_KEY, KeyRing, bearer_token
from .permissions import CATEGORY_OF_RPC, OPEN_RPCS, OPERATOR_RPCS, Category, Restrictions, Role, role_needed
from .rate_limit import Account
from .request_identity import REQUEST_IDENTITY, AccessMetrics, RequestIdentity

log = logging.getLogger(__name__)
Handler = Any  # grpc.RpcMethodHandler, which the type stubs do not describe in full
Context = grpc.aio.ServicerContext[Any, Any]

_STATUS_NAMES: Final[dict[Any, str]] = {code.value[0]: code.name for code in grpc.StatusCode}
_KINDS: Final = ("unary_unary", "unary_stream", "stream_stream")


class GrpcAccess(grpc.aio.ServerInterceptor):
    """Without `keys` every client is admitted."""

    def __init__(
        self, keys: KeyRing | None, restrictions: Restrictions, metrics: AccessMetrics, log_requests: bool
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
        handler, account = self._check(method, headers, handler)
        return _logged(handler, method, account) if self._log_requests else handler

    def _check(self, method: str, headers: dict[str, bytes], handler: Handler) -> tuple[Handler, Account | None]:
        """The handler to use, and the account that calls."""
        account: Account | None = None
        if self._keys is not None and method not in OPEN_RPCS:
            key = bearer_token(headers)
            account = None if key is None else self._keys.find(key)
            if account is None:
                self._metrics.decided(None, "grpc", "unauthenticated")
                text = NO_KEY if key is None else WRONG_KEY
                return _refusing(grpc.StatusCode.UNAUTHENTICATED, text), None
        category = CATEGORY_OF_RPC.get(method)
        header = self._restrictions.missing_header(category, headers)
        if header is not None:
            self._metrics.decided(account, "grpc", "restricted")
            text = f"This protocol is restricted, expecting header '{header}'"
            return _refusing(grpc.StatusCode.UNAVAILABLE, text), account
        if account is not None:
            handler = self._admit(account, method, category, handler)
        return handler, account

    def _admit(self, account: Account, method: str, category: Category | None, handler: Handler) -> Handler:
        """Checks the role first. Rate limits apply to inference only, in a stream to each request (keyed_server.py)."""
        if account.role is not Role.OPERATOR and method in OPERATOR_RPCS:
            self._metrics.decided(account, "grpc", "forbidden")
            return _refusing(grpc.StatusCode.PERMISSION_DENIED, role_needed(account.name, account.role))
        identity = RequestIdentity(account, "grpc", self._metrics)
        if category is not Category.INFERENCE:
            self._metrics.decided(account, "grpc", "accepted")
            return _identified(handler, identity)
        refusal = None if handler.stream_stream is not None else identity.take_first()
        if refusal is not None:
            return _refusing(
                grpc.StatusCode.RESOURCE_EXHAUSTED, refusal.message, (("retry-after", refusal.retry_after),)
            )
        return _identified(handler, identity)


def _bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8", "replace") if isinstance(value, str) else value


def _refusing(code: grpc.StatusCode, text: str, trailers: tuple[tuple[str, str], ...] = ()) -> Handler:
    """A handler that ends the call. It is a stream in both directions for every kind of call, so that it runs before
    any message is read."""

    async def refuse(requests: Any, context: Context) -> None:
        await context.abort(code, text, trailers)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _wrapped(handler: Handler, wrap: Callable[[Any], Any]) -> Handler:
    return handler._replace(**{kind: wrap(call) for kind in _KINDS if (call := getattr(handler, kind)) is not None})


def _identified(handler: Handler, identity: RequestIdentity) -> Handler:
    def wrap(call: Callable[[Any, Context], Awaitable[Any]]) -> Any:
        async def with_identity(request: Any, context: Context) -> Any:
            REQUEST_IDENTITY.set(identity)  # the call has a task, and so a context, of its own
            return await call(request, context)

        return with_identity

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
