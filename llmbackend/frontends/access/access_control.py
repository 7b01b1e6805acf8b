"""Access control on HTTP and gRPC: API keys, restricted APIs, roles and rate limits.

Independent of flags and of what paths and RPCs do. Invariants: checks that no setting requires are not installed. A
request is refused before its body or message is read. The access log records method, path, status, key name, time and
the request's own labels (`user`), never headers, queries or other parts of bodies. Refusals do not repeat what the
client sent. Sources: OpenAI's API errors (401 invalid_api_key, 429 rate_limit_exceeded), RFC 6750, Triton's
RespondIfRestricted; UNAVAILABLE for restricted protocols is Triton's, the other codes follow gRPC's documentation.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import grpc
from prometheus_client import CollectorRegistry
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions

from ..errors import UnauthenticatedError
from ..http.errors import INVALID_REQUEST, body_for, error_body, is_anthropic, is_openai
from ..http.request_scope import IS_COUNTED, LABELS
from ..http.responses import JSON, TEXT, plain
from ..shared_counts import SharedCounts
from .api_keys import (
    NO_KEY,
    NO_KEY_ANTHROPIC,
    WRONG_KEY,
    KeyFile,
    KeyRing,
    bearer_token,
    parse_keys,
    presented_key,
    unnamed_keys,
)
from .keyed_server import KeyedServer
from .permissions import (
    CATEGORY_OF_RPC,
    OPEN_PATHS,
    OPEN_RPCS,
    OPERATOR_RPCS,
    Category,
    Restrictions,
    Role,
    begins_no_inference,
    category_of,
    needs_operator,
    role_needed,
)
from .rate_limit import Account, Refusal
from .request_identity import REQUEST_IDENTITY, AccessMetrics, KeyTotals, RequestIdentity
from .settings import AccessSettings, GrpcCertificate, HttpCertificate

log = logging.getLogger(__name__)
_LOGGED_PATH_CHARACTERS: Final = 200
_READING: Final = ("GET", "HEAD")


class HttpAccess:
    """Checks requests before the wrapped ASGI application. keys: None: every client is admitted"""

    def __init__(
        self, app: ASGIApp, keys: KeyRing | None, restrictions: Restrictions, metrics: AccessMetrics, log_requests: bool
    ) -> None:
        self._app = app
        self._keys = keys
        self._restrictions = restrictions
        self._metrics = metrics
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = _CheckedRequest(scope, send)
        try:
            refusal = self._check(request)
            await (refusal or self._app)(scope, receive, request.send)
        finally:
            REQUEST_IDENTITY.set(None)
            if self._log_requests:
                _log(request)

    def _check(self, request: _CheckedRequest) -> Response | None:
        """The refusal; None: the request's identity is set, and the application may handle it."""
        path = request.path
        account: Account | None = None
        if self._keys is not None and path not in OPEN_PATHS:
            key = presented_key(request.headers, is_anthropic=request.is_anthropic)
            account = request.account = None if key is None else self._keys.find(key)
            if account is None:
                self._metrics.decided(None, "http", "unauthenticated")
                return _unauthenticated(request, has_key=key is not None)
        category = category_of(path)
        header = self._restrictions.missing_header(category, request.headers)
        if header is not None:
            self._metrics.decided(account, "http", "restricted")
            return _restricted(request, header)
        return None if account is None else self._admit(request, account, category)

    def _admit(self, request: _CheckedRequest, account: Account, category: Category | None) -> Response | None:
        """Checks the role first. Rate limits apply to requests that start an inference."""
        if account.role is not Role.OPERATOR and needs_operator(request.path, category):
            self._metrics.decided(account, "http", "forbidden")
            message = role_needed(account.name, account.role)
            return _error(request, 403, message, INVALID_REQUEST, "insufficient_permissions")
        identity = RequestIdentity(account, "http", self._metrics, is_counted=request.scope.get(IS_COUNTED, False))
        begins_none = begins_no_inference(request.path, request.headers.get("last-event-id", b""))
        if category is not Category.INFERENCE or request.method in _READING or begins_none:
            self._metrics.decided(account, "http", "accepted")
        else:
            refusal = identity.take(1)
            if refusal is not None:
                return _rate_limited(request, refusal, account)
            request.limited = account
        REQUEST_IDENTITY.set(identity)
        return None


class _CheckedRequest:
    def __init__(self, scope: Scope, send: Send) -> None:
        self.began_s = time.perf_counter()
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1"): value for name, value in reversed(scope["headers"])}
        self.is_anthropic = is_anthropic(self.path, self.headers.get("anthropic-version"))
        self.account: Account | None = None
        self.limited: Account | None = None
        self.status = 0
        self.scope = scope
        self._send = send

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.limited is not None and (added := self.limited.headers()):
                message = {**message, "headers": [*message["headers"], *added]}
        return self._send(message)


def _log(request: _CheckedRequest) -> None:
    name = "-" if request.account is None else request.account.name
    path = quote(request.path[:_LOGGED_PATH_CHARACTERS])
    elapsed_ms = (time.perf_counter() - request.began_s) * 1e3
    labels = request.scope.get(LABELS, "")
    log.info("%s %s %s key=%s %.1f ms%s", request.method, path, request.status or "-", name, elapsed_ms, labels)


def _unauthenticated(request: _CheckedRequest, has_key: bool) -> Response:
    message = WRONG_KEY if has_key else NO_KEY_ANTHROPIC if request.is_anthropic else NO_KEY
    response = _error(request, 401, message, INVALID_REQUEST, "invalid_api_key")
    response.headers["www-authenticate"] = 'Bearer error="invalid_token"' if has_key else "Bearer"
    return response


def _restricted(request: _CheckedRequest, header: str) -> Response:
    message = f"This API is restricted, expecting header '{header}'"
    if is_openai(request.path):
        return _error(request, 403, message, "authentication_error", "invalid_auth")
    return plain(error_body(message), 403, TEXT)


def _rate_limited(request: _CheckedRequest, refusal: Refusal, account: Account) -> Response:
    response = _error(request, 429, refusal.message, refusal.kind, "rate_limit_exceeded")
    response.headers["retry-after"] = refusal.retry_after
    response.raw_headers.extend(account.headers())
    return response


def _error(request: _CheckedRequest, status: int, message: str, kind: str, code: str) -> Response:
    return plain(body_for(request.path, request.is_anthropic, status, message, kind, code), status, JSON)


Handler = Any  # grpc.RpcMethodHandler, which the type stubs describe only in part
Context = grpc.aio.ServicerContext[Any, Any]
_STATUS_NAMES: Final[dict[Any, str]] = {code.value[0]: code.name for code in grpc.StatusCode}
_KINDS: Final = ("unary_unary", "unary_stream", "stream_stream")


class GrpcAccess(grpc.aio.ServerInterceptor):
    """keys: None: every client is admitted"""

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
        """The handler to use, and the caller's account."""
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
            identity = RequestIdentity(account, "grpc", self._metrics)
            if handler.stream_stream is not None:
                handler = self._rechecked(handler, headers, identity)
            handler = self._admit(identity, method, category, handler)
        return handler, account

    def _rechecked(self, handler: Handler, headers: dict[str, bytes], identity: RequestIdentity) -> Handler:
        """Checks the key again with each request of the stream, whose identity gets the key's present account."""

        async def checked(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
            assert self._keys is not None
            async for request in requests:
                account = self._keys.find(bearer_token(headers) or b"")
                if account is None:
                    self._metrics.decided(None, "grpc", "unauthenticated")
                    raise UnauthenticatedError(WRONG_KEY)
                identity.account = account
                yield request

        call = handler.stream_stream
        return handler._replace(stream_stream=lambda requests, context: call(checked(requests), context))

    def _admit(self, identity: RequestIdentity, method: str, category: Category | None, handler: Handler) -> Handler:
        """Checks the role first. Rate limits apply to inference; within a stream, to each request (keyed_server.py)."""
        account = identity.account
        if account.role is not Role.OPERATOR and method in OPERATOR_RPCS:
            self._metrics.decided(account, "grpc", "forbidden")
            return _refusing(grpc.StatusCode.PERMISSION_DENIED, role_needed(account.name, account.role))
        if category is not Category.INFERENCE:
            self._metrics.decided(account, "grpc", "accepted")
            return _identified(handler, identity)
        refusal = None if handler.stream_stream is not None else identity.take(1)
        if refusal is not None:
            return _refusing(
                grpc.StatusCode.RESOURCE_EXHAUSTED, refusal.message, (("retry-after", refusal.retry_after),)
            )
        return _identified(handler, identity)


def _bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8", "replace") if isinstance(value, str) else value


def _refusing(code: grpc.StatusCode, text: str, trailers: tuple[tuple[str, str], ...] = ()) -> Handler:
    """A handler that ends the call. A bidirectional-streaming handler, because that runs before any message is read."""

    async def refuse(requests: Any, context: Context) -> None:
        await context.abort(code, text, trailers)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _wrapped(handler: Handler, wrap: Callable[[Any], Any]) -> Handler:
    return handler._replace(**{kind: wrap(call) for kind in _KINDS if (call := getattr(handler, kind)) is not None})


def _identified(handler: Handler, identity: RequestIdentity) -> Handler:
    def wrap(call: Callable[[Any, Context], Awaitable[Any]]) -> Any:
        async def with_identity(request: Any, context: Context) -> Any:
            REQUEST_IDENTITY.set(identity)  # each call has its own task, and so its own context
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


class AccessControl:
    """The keys, certificates and checks of one server."""

    def __init__(
        self, settings: AccessSettings, shared: SharedCounts | None = None, frontend_metrics: Path | None = None
    ) -> None:
        """Reads the keys. Raises ValueError with one line if they are invalid.

        shared: counts of all processes of the server, if it has several
        frontend_metrics: in a host, the folder of its frontend processes' counters
        """
        self._settings = settings
        self._frontend_metrics = frontend_metrics
        self._keys = key_ring(settings, shared) if settings.needs_keys else None
        if self._keys is not None and not self._keys.has_operator:
            log.info(
                "no API key has role=operator: loading and unloading models, shared memory, and the settings of trace "
                "and log are refused for everyone (docs/security.md)"
            )
        self._http_tls = None if settings.http_tls is None else HttpCertificate(settings.http_tls)
        self._grpc_tls = None if settings.grpc_tls is None else GrpcCertificate(settings.grpc_tls)
        self._metrics: AccessMetrics | None = None

    @property
    def has_keys(self) -> bool:
        """Whether clients need an API key."""
        return self._keys is not None

    def host(self, options: ServerOptions) -> InferenceServer:
        """The host; with API keys, one that charges each request to its key."""
        return InferenceServer(options) if self._keys is None else KeyedServer(options)

    def http_tls_context(self) -> ssl.SSLContext | None:
        """The context for a new connection; None without TLS."""
        return None if self._http_tls is None else self._http_tls.context

    def grpc_credentials(self) -> grpc.ServerCredentials | None:
        return None if self._grpc_tls is None else self._grpc_tls.credentials

    def reload(self) -> None:
        """Reloads API keys with their limits, and certificates, for later requests and connections. If one cannot be
        used, an error is logged and the previous one remains in use."""
        done = []
        for what, source in (
            ("API keys", self._keys),
            ("HTTP certificate", self._http_tls),
            ("gRPC certificate", self._grpc_tls),
        ):
            if source is None:
                continue
            try:
                source.reload()
                done.append(what)
            except (ValueError, OSError) as error:
                log.error("%s; the previous content remains in use", error)
        log.info("read again: %s", ", ".join(done) or "nothing")

    def wrap_http(self, app: ASGIApp, registry: CollectorRegistry) -> ASGIApp:
        settings = self._settings
        if self._keys is None and not settings.http_restrictions and not settings.log_requests:
            return app
        return HttpAccess(
            app, self._keys, settings.http_restrictions, self._metrics_of(registry), settings.log_requests
        )

    def grpc_interceptors(self, registry: CollectorRegistry) -> Sequence[grpc.aio.ServerInterceptor]:
        settings = self._settings
        if self._keys is None and not settings.grpc_restrictions and not settings.log_requests:
            return ()
        return (GrpcAccess(self._keys, settings.grpc_restrictions, self._metrics_of(registry), settings.log_requests),)

    @property
    def accounts(self) -> list[Account] | None:
        """The accounts, sorted by name; None if clients need no key. Used on the event loop."""
        return None if self._keys is None else self._keys.accounts

    def totals(self) -> dict[str, KeyTotals]:
        """Totals since the start, by key name."""
        return {} if self._metrics is None else self._metrics.totals()

    def _metrics_of(self, registry: CollectorRegistry) -> AccessMetrics:
        if self._metrics is None:
            self._metrics = AccessMetrics(registry, self._frontend_metrics)
        return self._metrics


def key_ring(settings: AccessSettings, shared: SharedCounts | None = None) -> KeyRing:
    """Raises ValueError, whose text does not contain any key."""
    defaults = settings.default_limits
    try:
        fixed = parse_keys(settings.environment_keys.replace(",", "\n"), defaults)
    except ValueError as error:
        raise ValueError(f"LLMBACKEND_API_KEYS: {error}") from None
    try:
        fixed += unnamed_keys(settings.api_keys, defaults)
    except ValueError as error:
        raise ValueError(f"--api-key: {error}") from None
    file = None if settings.api_key_file is None else KeyFile(settings.api_key_file, defaults)
    return KeyRing(fixed, file, shares_caches=settings.share_caches, shared=shared)
