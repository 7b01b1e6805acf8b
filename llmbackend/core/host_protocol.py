"""Host: the InferenceServer as seen by frontends, in the same process or in another one.

No method waits for a backend unless its documentation says so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from prometheus_client.samples import Sample

from .messages import InferenceHandle, InferenceRequest, ModelIndex, ModelMetadata, ResponseCallback, ServerMetadata
from .models.served_config import Description
from .tracing.manager import HeaderLookup
from .tracing.trace import RequestTrace

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function on a thread, and returns its value."""


class SharedRegions(Protocol):
    def with_inputs(self, request: InferenceRequest) -> InferenceRequest:
        """See SharedMemoryManager. A remote host reads the inputs itself, before it accepts the request."""


class Sampling(Protocol):
    """See TraceManager."""

    @property
    def is_idle(self) -> bool: ...

    def sample(self, model_name: str, header: HeaderLookup) -> RequestTrace | None: ...


class Host(Protocol):
    """Methods and errors are those of InferenceServer."""

    @property
    def shared_memory(self) -> SharedRegions: ...
    @property
    def tracing(self) -> Sampling: ...

    def infer_async(self, request: InferenceRequest, callback: ResponseCallback) -> InferenceHandle:
        """Thread-safe. A host in another process reports a refusal in the request's only response."""

    async def infer_accepted(
        self, request: InferenceRequest, callback: ResponseCallback, in_thread: InThread | None = None
    ) -> InferenceHandle:
        """Returns once the request is accepted. Raises TritonError if it is refused; then `callback` is never called.

        in_thread: for a request that takes long to validate or encode
        """

    def is_live(self) -> bool: ...
    def is_ready(self) -> bool:
        """May wait for backends."""

    @property
    def is_exiting(self) -> bool: ...

    def server_metadata(self) -> ServerMetadata: ...
    def metric_samples(self, name: str) -> list[Sample]: ...
    def model_is_ready(self, name: str, version: int = -1) -> bool:
        """May wait for backends."""

    def model_metadata(self, name: str, version: int = -1) -> ModelMetadata: ...
    def model_description(self, name: str, version: int = -1) -> Description: ...
    def model_parameters(self, name: str, version: int = -1) -> Mapping[str, str]: ...
    def is_decoupled(self, name: str, version: int = -1) -> bool: ...
    def repository_index(self, ready_only: bool = False) -> list[ModelIndex]:
        """May wait for backends."""
