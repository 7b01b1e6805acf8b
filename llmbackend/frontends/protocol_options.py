"""Ways in which an operator may have the protocols behave otherwise: one frozen object for all frontends of a server.

For: the frontend server and its endpoints. Does not know: flags, limits (`limits.py`). Invariant: the defaults are
Triton's, and ask for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from .cors import NO_ORIGINS, CorsOptions
from .header_forwarding import FORWARD_NOTHING, HeaderForward

CompressionLevel = Literal["none", "low", "medium", "high"]


@dataclass(frozen=True, kw_only=True)
class ProtocolOptions:
    """grpc_response_compression: of inference's responses alone. grpc_reuse_port: several servers may share a port.
    openai_lora_separator: stands between a model's name and its LoRA adapter's in OpenAI requests; "": nothing does.
    cors: which web pages may use the HTTP port. http_metrics: the metrics page is on the HTTP port, too."""

    http_forward: HeaderForward = FORWARD_NOTHING
    grpc_forward: HeaderForward = FORWARD_NOTHING
    grpc_response_compression: CompressionLevel = "none"
    grpc_reuse_port: bool = False
    openai_lora_separator: str = ""
    cors: CorsOptions = NO_ORIGINS
    http_metrics: bool = True


DEFAULT_OPTIONS: Final = ProtocolOptions()
