"""The flags of `llmbackend serve` that change how the protocols behave.

For: the command line. Does not know: what is done with them. Invariant: names, defaults and meanings are Triton's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args

import typer

from llmbackend.frontends.header_forwarding import HeaderForward
from llmbackend.frontends.protocol_options import CompressionLevel, ProtocolOptions

from .flag_types import switch


@dataclass(frozen=True)
class ProtocolFlags:
    PANEL: ClassVar = "Protocols"

    http_header_forward_pattern: Annotated[
        str, typer.Option(help="RE2 pattern, any case: HTTP headers that /infer hands to the model.")
    ] = ""
    grpc_header_forward_pattern: Annotated[
        str, typer.Option(help="RE2 pattern, any case: gRPC metadata that inference hands to the model.")
    ] = ""
    grpc_infer_response_compression_level: Annotated[
        str, typer.Option(help="Compression of inference responses: none, low, medium or high.")
    ] = "none"
    reuse_grpc_port: Annotated[Any, switch("--reuse-grpc-port", "Let several servers listen on one gRPC port.")] = False
    lora_separator: Annotated[
        str, typer.Option(help="What stands between a model and its LoRA adapter in OpenAI requests, such as _lora_.")
    ] = ""

    def options(self) -> ProtocolOptions:
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
            openai_lora_separator=self.lora_separator,
        )


def _forward(protocol: str, pattern: str) -> HeaderForward:
    try:
        return HeaderForward.of(pattern)
    except ValueError as error:
        raise typer.BadParameter(
            f"--{protocol}-header-forward-pattern '{pattern}' is not a regular expression: {error}"
        ) from None
