"""The flags of `llmbackend serve` that change how the protocols behave, and Triton's that can not mean anything here.

For: the command line. Does not know: what is done with them. Invariant: names, defaults and meanings are Triton's; a
flag without effect says so when it is given.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_args

import typer

from llmbackend.frontends.header_forwarding import HeaderForward
from llmbackend.frontends.protocol_options import CompressionLevel, ProtocolOptions

from .flag_types import switch, warn

_NO_EFFECT: Final = {
    "grpc_infer_thread_count": "one event loop serves every RPC, and no request holds a thread",
    "grpc_infer_allocation_pool_size": "requests are not pooled",
    "grpc_max_response_pool_size": "responses are not pooled",
}


def _ignored() -> Any:
    return typer.Option(min=0, help="Accepted as Triton's flag, without effect.")


@dataclass(frozen=True)
class ProtocolFlags:
    http_header_forward_pattern: Annotated[
        str, typer.Option(help="Regular expression, any case: HTTP headers that /infer hands to the model.")
    ] = ""
    grpc_header_forward_pattern: Annotated[
        str, typer.Option(help="Regular expression: gRPC metadata that inference hands to the model.")
    ] = ""
    grpc_infer_response_compression_level: Annotated[
        str, typer.Option(help="Compression of inference responses: none, low, medium or high.")
    ] = "none"
    reuse_grpc_port: Annotated[Any, switch("--reuse-grpc-port", "Let several servers listen on one gRPC port.")] = False
    grpc_infer_thread_count: Annotated[int | None, _ignored()] = None
    grpc_infer_allocation_pool_size: Annotated[int | None, _ignored()] = None
    grpc_max_response_pool_size: Annotated[int | None, _ignored()] = None

    def options(self) -> ProtocolOptions:
        for name, reason in _NO_EFFECT.items():
            if getattr(self, name) is not None:
                warn(f"--{name.replace('_', '-')} has no effect: {reason}")
        levels = get_args(CompressionLevel)
        if self.grpc_infer_response_compression_level not in levels:
            raise typer.BadParameter(
                f"--grpc-infer-response-compression-level is '{self.grpc_infer_response_compression_level}', "
                f"expected one of {', '.join(levels)}"
            )
        return ProtocolOptions(
            http_forward=_forward("http", self.http_header_forward_pattern),
            grpc_forward=_forward("grpc", self.grpc_header_forward_pattern),
            grpc_response_compression=self.grpc_infer_response_compression_level,  # type: ignore[arg-type]  # checked
            grpc_reuse_port=self.reuse_grpc_port,
        )


def _forward(protocol: str, pattern: str) -> HeaderForward:
    try:
        return HeaderForward.http(pattern) if protocol == "http" else HeaderForward.grpc(pattern)
    except re.error as error:
        raise typer.BadParameter(
            f"--{protocol}-header-forward-pattern '{pattern}' is not a regular expression: {error}"
        ) from None
