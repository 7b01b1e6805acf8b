"""Protocol options; the defaults are Triton's behaviour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Final, Literal

from starlette.types import ASGIApp

from .kserve.request_parameters import FORWARD_NOTHING, HeaderForward

CompressionLevel = Literal["none", "low", "medium", "high"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorsOptions:
    """Which pages of other sites may use the HTTP port from a browser; vLLM's names."""

    origins: tuple[str, ...] = ()
    """Origins of the pages; "*": any; (): none, and responses have no CORS headers."""
    credentials: bool = False
    """Whether browsers may send cookies and client certificates."""
    methods: tuple[str, ...] = ("*",)
    """ "*": any."""
    headers: tuple[str, ...] = ("*",)
    """ "*": any."""


NO_ORIGINS: Final = CorsOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """Server-wide defaults for chat and completion requests of /v1; vLLM's names."""

    return_tokens_as_token_ids: bool = False
    """Whether logprobs identify tokens by their ids."""
    force_include_usage: bool = False
    """Whether every chunk of every stream has the usage so far."""
    stream_interval_tokens: int = 1
    """Tokens of a choice per chunk; requests can only ask for more."""
    per_request_metrics: bool = False
    """Whether answers with one choice include their timings, unless a request says otherwise."""
    sse_keep_alive_s: float | None = 15.0
    """Seconds of silence after which a stream sends a comment; None: never."""


NO_DEFAULTS: Final = RequestDefaults()


@dataclass(frozen=True, kw_only=True)
class ProtocolOptions:
    http_forward: HeaderForward = FORWARD_NOTHING
    """Which headers of /infer are forwarded to the model."""
    grpc_forward: HeaderForward = FORWARD_NOTHING
    """Which metadata of ModelInfer and ModelStreamInfer are forwarded to the model."""
    grpc_response_compression: CompressionLevel = "none"
    """Compression of inference responses."""
    grpc_reuse_port: bool = False
    """Whether several servers may share the gRPC port."""
    openai_lora_folder: str = ""
    """Contains the LoRA adapters that operators may load at run time; "": none."""
    openai_lora_separator: str = ""
    """Separates the names of a model and its LoRA adapter in OpenAI requests; "": adapters have no such names."""
    openai_fingerprint: str | None = None
    """`system_fingerprint` of OpenAI's answers; None: derived from the server's release and the model, "": null."""
    request_defaults: RequestDefaults = NO_DEFAULTS
    reasoning_secret: bytes = field(default=b"", repr=False)
    """Signs reasoning that clients send back; b"": a publicly known key."""
    cors: CorsOptions = NO_ORIGINS
    allowed_hosts: frozenset[str] = frozenset()
    """Names of this server in lower case, in addition to IP addresses, localhost and the machine's name. Pages, and
    requests to a loopback address without API keys, are served only under these names."""
    root_path: str = ""
    """The prefix that a proxy adds to all paths."""
    documents_api: bool = True
    """Whether /openapi.json and /docs are served."""
    answers_request_ids: bool = False
    """Whether each HTTP response has the header X-Request-Id: the client's, or a new one."""
    shows_tokenizers: bool = False
    """Whether /tokenizer_info is served."""
    middleware: tuple[Callable[[ASGIApp], ASGIApp], ...] = ()
    """Wraps the HTTP application, the last one outermost. Not available with frontend processes."""
    http_metrics: bool = True
    """Whether the HTTP port also serves metrics."""
    allow_fault_injection: bool = False
    """Whether operators may kill the processes of instances."""


DEFAULT_OPTIONS: Final = ProtocolOptions()


@dataclass(frozen=True, kw_only=True)
class PageSettings:
    enabled: bool = False
    idle_timeout_s: float = 300.0
    """How long the page process runs after its last viewer has left."""


NO_PAGES = PageSettings()


def pages_are_installed() -> bool:
    """Checks without importing anything."""
    return find_spec("nicegui") is not None
