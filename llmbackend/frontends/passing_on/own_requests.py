"""Which requests a frontend process answers itself: those whose work grows with their tokens, and, while its machine's
host is away, those about which it was told enough by hosts.

For: passing on, over HTTP and gRPC. Does not know: how they are answered. Invariants: a request whose stream or answer
the host keeps, for a client that comes back, is not among them; one that is answered in the host's place changes
nothing, and asks nothing that only this host knows.
"""

from __future__ import annotations

import re
from typing import Final

from starlette.types import Scope

MODEL_STREAM_INFER: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
_RPCS: Final = frozenset({"/inference.GRPCInferenceService/ModelInfer", MODEL_STREAM_INFER})
_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages"})
_MODEL_PREFIX: Final = "/v2/models/"
_MODEL_WORDS: Final = frozenset({"infer", "generate", "generate_stream"})
_KNOWN_RPCS: Final = frozenset(
    {f"/inference.GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady", "ModelReady")}
    | {f"/inference.GRPCInferenceService/{name}" for name in ("ServerMetadata", "ModelMetadata")}
    | {"/grpc.health.v1.Health/Check"}
)
_KNOWN_PATHS: Final = frozenset({"/v2", "/v2/health/live", "/v2/health/ready", "/health", "/health/ready", "/ping"})
_KNOWN_MODEL: Final = re.compile(r"/v2/models/(?!stats$)[^/]+(/versions/[^/]+)?(/ready)?|/v1/models(/.+)?")
_KEPT: Final = frozenset({b"x-resumable-stream", b"last-event-id", b"idempotency-key"})


def is_own_request(scope: Scope) -> bool:
    """Whether a request over HTTP is answered in this process."""
    if scope["method"] != "POST":
        return False
    path: str = scope["path"]
    if path not in _PATHS and not (path.startswith(_MODEL_PREFIX) and path.rpartition("/")[2] in _MODEL_WORDS):
        return False
    return all(name not in _KEPT for name, _ in scope["headers"])


def is_own_rpc(method: str) -> bool:
    """Whether an RPC is answered in this process, if it keeps nothing. method: as gRPC names it, `/service/name`."""
    return method in _RPCS


def is_known_request(scope: Scope) -> bool:
    """Whether a request over HTTP can be answered here in the place of a host that is away."""
    path: str = scope["path"]
    return scope["method"] == "GET" and (path in _KNOWN_PATHS or _KNOWN_MODEL.fullmatch(path) is not None)


def is_known_rpc(method: str) -> bool:
    """The same of an RPC, which has one request and one response."""
    return method in _KNOWN_RPCS
