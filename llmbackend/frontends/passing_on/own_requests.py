"""Which requests a frontend process answers itself: those whose work grows with their tokens.

For: passing on, over HTTP and gRPC. Does not know: how they are answered. Invariant: a request whose stream or answer
the host keeps, for a client that comes back, is not among them.
"""

from __future__ import annotations

from typing import Final

from starlette.types import Scope

MODEL_STREAM_INFER: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
_RPCS: Final = frozenset({"/inference.GRPCInferenceService/ModelInfer", MODEL_STREAM_INFER})
_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages"})
_MODEL_PREFIX: Final = "/v2/models/"
_MODEL_WORDS: Final = frozenset({"infer", "generate", "generate_stream"})
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
