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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """What chat and completion requests of /v1 mean where they leave fields out; names are vLLM's."""

    return_tokens_as_token_ids: bool = False
    """Where log probabilities are asked for."""
    force_include_usage: bool = False
    """Whether every chunk of a stream has the usage so far, asked for or not."""
    stream_interval_tokens: int = 1
    """Tokens of a choice that go out together in a stream."""


NO_DEFAULTS: Final = RequestDefaults()


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
    openai_fingerprint: str | None = None
    """`system_fingerprint` of OpenAI's answers; None: made of the server's release and the model, "": null."""
    request_defaults: RequestDefaults = NO_DEFAULTS
    reasoning_secret: bytes = field(default=b"", repr=False)
    """What reasoning is sealed with that clients send back; b"": with a key that everyone knows."""
    cors: CorsOptions = NO_ORIGINS
    allowed_hosts: frozenset[str] = frozenset()
    """In lower case: names of this server, besides IP addresses, localhost and the machine's name, by which pages are
    served, and requests to a loopback address without API keys."""
    root_path: str = ""
    """What a proxy puts before all paths."""
    documents_api: bool = True
    """Whether /openapi.json and /docs are served."""
    answers_request_ids: bool = False
    """Whether each HTTP response has the header X-Request-Id: the client's, or a new one."""
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
