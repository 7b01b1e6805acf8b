"""Options by which an operator changes how the protocols behave.

For: the frontend server and its endpoints. Does not know: flags, limits (`limits.py`). Invariant: the defaults are
Triton's behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Final, Literal

from .kserve.request_parameters import FORWARD_NOTHING, HeaderForward

CompressionLevel = Literal["none", "low", "medium", "high"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorsOptions:
    """Which web pages of other sites may use the HTTP port from a browser; names of the options are vLLM's."""

    origins: tuple[str, ...] = ()
    """Of the pages; "*": any; none: no page, and responses have no CORS headers."""
    credentials: bool = False
    """Whether browsers may send their cookies and client certificates along."""
    methods: tuple[str, ...] = ("*",)
    """ "*": any."""
    headers: tuple[str, ...] = ("*",)
    """ "*": any."""


NO_ORIGINS: Final = CorsOptions()


@dataclass(frozen=True, kw_only=True)
class ProtocolOptions:
    """All frontends of one server share one object."""

    http_forward: HeaderForward = FORWARD_NOTHING
    """Which headers of /infer the model sees."""
    grpc_forward: HeaderForward = FORWARD_NOTHING
    """Which metadata of ModelInfer and ModelStreamInfer the model sees."""
    grpc_response_compression: CompressionLevel = "none"
    """Of the responses of inference alone."""
    grpc_reuse_port: bool = False
    """Whether several servers may share the gRPC port."""
    openai_lora_folder: str = ""
    """Below it lie the LoRA adapters that operators may load at run time; "": they may load none."""
    openai_lora_separator: str = ""
    """Stands between the names of a model and its LoRA adapter in OpenAI requests; "": adapters have no such name."""
    reasoning_secret: bytes = field(default=b"", repr=False)
    """What reasoning is sealed with that clients send back; b"": with a key that everyone knows."""
    cors: CorsOptions = NO_ORIGINS
    allowed_hosts: frozenset[str] = frozenset()
    """In lower case: names of this server, besides IP addresses, localhost and the machine's name, by which pages are
    served, and requests to a loopback address without API keys."""
    http_metrics: bool = True
    """Whether the metrics page is served on the HTTP port, too."""
    allow_fault_injection: bool = False
    """Whether operators may kill the processes of instances, to see what a crash does."""


DEFAULT_OPTIONS: Final = ProtocolOptions()


@dataclass(frozen=True, kw_only=True)
class PageSettings:
    enabled: bool = False
    idle_timeout_s: float = 300.0
    """The page process ends this long after its last viewer has gone."""


NO_PAGES = PageSettings()


def pages_are_installed() -> bool:
    """Whether the extra `pages` is; nothing is imported."""
    return find_spec("nicegui") is not None
