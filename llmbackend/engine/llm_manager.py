"""The background loop of one engine. (Signatures agreed first; the bodies follow.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

from .config import EngineConfig
from .infer_request import EngineStats, InferRequest, ModelInfo, StepOutput


class Operation(IntEnum):
    STOP = 1
    RELEASE_KV = 2


class StatusType(IntEnum):
    CONTROL_SIGNAL_STATUS = 0
    REQUEST_ENQUEUE_STATUS = 1


class LlmManager:
    def __init__(
        self,
        config: EngineConfig,
        get_requests: Callable[[int], Sequence[InferRequest]],
        send_responses: Callable[[Sequence[StepOutput]], None],
        control_signal: Callable[[], Sequence[tuple[str, Operation]]],
        stats: Callable[[EngineStats], None],
        status_response: Callable[[str, str, StatusType], None],
    ) -> None:
        """get_requests(n) drains at most n requests from the shared queue; it is called when this engine has room for n more.
        send_responses gets all outputs of a step at once. status_response(request_id, error_text or "", type)."""

    def start(self) -> ModelInfo:
        """Starts the engine and the loop's thread; returns when the model is loaded. Raises RuntimeError when it cannot load."""

    def wake(self) -> None:
        """There may be new requests or control signals. Any thread, cheap; the loop blocks otherwise."""

    def check_ready(self) -> None:
        """Raises RuntimeError saying why, when the engine is dead or makes no progress."""

    def shutdown(self) -> None:
        """Ends loop and engine and reaps the process; outstanding requests end with finish_reason "abort"."""
