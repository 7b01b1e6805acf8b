"""What frontends and the host say to each other: an inference request, its responses, and the options of a server.

For: frontends (they build `InferenceRequest` and receive `InferenceResponse`) and the host. Does not know: wire
protocols.
Invariant: both are not changed any more once handed over; the callback of a request is called from any thread, ends
with exactly one call that carries ResponseFlag.FINAL, and must only enqueue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from .backend_api import ParameterValue, RequestFlag, ResponseFlag
from .errors import TritonError
from .metrics.metrics_options import MetricsOptions
from .scheduling.rate_limit_resources import RateLimitMode, RateLimitResource
from .tenants import NO_TENANT, Tenant
from .tensors import Place, RawTensor, SharedInput, Tensor
from .tracing.settings import TraceSettings
from .tracing.trace import RequestTrace

if TYPE_CHECKING:
    from .statistics import PhaseTimes

__all__ = [
    "InferenceHandle",
    "InferenceRequest",
    "InferenceResponse",
    "LoadParameters",
    "ModelIndex",
    "ModelMetadata",
    "Place",
    "RateLimitMode",
    "RateLimitResource",
    "RawTensor",
    "RequestObserver",
    "ResponseCallback",
    "ServerMetadata",
    "ServerOptions",
    "SharedInput",
    "TensorMetadata",
]

NO_FLAGS = RequestFlag(0)


@dataclass(frozen=True, slots=True)
class InferenceResponse:
    """One response. With `error` set, `outputs` is empty; `request_id` is the client's id."""

    model_name: str
    model_version: int
    request_id: str
    outputs: tuple[Tensor, ...] = ()
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    error: TritonError | None = None


ResponseCallback = Callable[[InferenceResponse | None, ResponseFlag], None]
"""(response, flags); response None is a flags-only completion. Any thread; must only enqueue."""


def nobody(response: InferenceResponse | None, flags: ResponseFlag) -> None:
    """The callback of a request that is not submitted yet."""


class RequestObserver(Protocol):
    """Who made a request inside the host and follows more of it than its responses: an ensemble. Any thread."""

    def make_room(self) -> None:
        """Called before each response of a backend that may be blocked (SendPolicy) is delivered: blocks to hold it
        back."""

    def computed(self, times: PhaseTimes) -> None:
        """The request succeeded, and this is what its backend reported."""

    def done(self) -> None:
        """The last handle on the request is gone."""


@dataclass(slots=True)
class InferenceRequest:
    """A request as a frontend hands it to InferenceServer.infer_async. model_version -1 = the highest READY version.

    `raw_input` marks a tensor whose shape the host deduces from the model's single input (Triton's raw binary request):
    then `inputs` is empty. A RawTensor in `inputs` is checked against the model's configuration before it is decoded.
    `shared_inputs` lie in shared memory; SharedMemory.with_inputs makes `inputs` of them. `output_places` says which
    outputs are written there, `classes` of which outputs only the so many largest elements are wanted, as text.
    `trace` is that of a sampled request, or a child of the trace of the request on whose behalf this one is made;
    `tenant` is that of the client, or of that request.
    """

    model_name: str
    response_callback: ResponseCallback
    model_version: int = -1
    id: str = ""
    inputs: tuple[Tensor | RawTensor, ...] = ()
    requested_outputs: tuple[str, ...] = ()
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    correlation_id: int | str = 0
    flags: RequestFlag = NO_FLAGS
    priority: int = 0
    timeout_us: int = 0
    raw_input: bytes | None = None
    shared_inputs: tuple[SharedInput, ...] = ()
    output_places: Mapping[str, Place] = field(default_factory=dict)
    classes: Mapping[str, int] = field(default_factory=dict)
    observer: RequestObserver | None = None
    trace: RequestTrace | None = None
    tenant: Tenant = NO_TENANT


class InferenceHandle(Protocol):
    """What infer_async gives back: the way to cancel."""

    def cancel(self) -> None:
        """Asks for cancellation; idempotent, any thread. The FINAL callback still comes (a CANCELLED error, or
        whatever the backend had in flight)."""


@dataclass(frozen=True, slots=True)
class ModelIndex:
    """One row of the repository index. A model never loaded has no version, state and reason."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """`shape`s carry a leading -1 when the model batches; `versions` lists every READY one unless one was asked for.

    Not part of the protocol: optional_inputs, the names of inputs that a request may leave out; fingerprint, a short
    text that changes with the server's release, the model's configuration and the files of its version.
    """

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    optional_inputs: frozenset[str] = frozenset()
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True)
class ServerOptions:
    """Options of the host, with Triton's names and defaults.

    `repository_poll_secs` 0 = mode poll does not poll. `backend_config` maps a backend's name ("" = every backend) to
    its settings, `cache_config` a cache's.
    """

    model_repositories: Sequence[Path] = ()
    server_id: str = "triton"
    model_control_mode: Literal["none", "poll", "explicit"] = "none"
    repository_poll_secs: float = 15.0
    startup_models: Sequence[str] = ()
    backend_directory: Path | None = None
    backend_config: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    strict_readiness: bool = True
    exit_on_error: bool = True
    model_load_thread_count: int = 4
    model_load_retry_count: int = 0
    auto_complete_config: bool = True
    model_config_name: str = ""
    model_namespacing: bool = False
    repoagent_directory: Path | None = None
    allow_client_shm: bool = False
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    cache_config: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    rate_limit: RateLimitMode = "off"
    rate_limit_resources: Sequence[RateLimitResource] = ()
    trace: TraceSettings = field(default_factory=TraceSettings)


LoadParameters = Mapping[str, str | bytes]
"""Overrides of a load: "config" → JSON text of a ModelConfig; "file:<path>" → the file's bytes."""
