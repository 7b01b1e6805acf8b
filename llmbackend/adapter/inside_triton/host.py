"""The backend contract implemented on pb_utils, in a stub of Triton's python backend.

Used by TritonPythonModel and by the adapter, which sees only `core.backend_api`. Independent of LLMs. A stub is the
process of one model instance; with `instance_group.count: 2` there are two stubs that share nothing but Triton's queue.
Invariants: nothing is sent after FINAL; pb_utils is not asked about a request after its FINAL; Triton's inputs are not
used after `release`.
Source: the `args` of TritonPythonModel.initialize; python_backend's response_sender.cc and pb_cancel.cc.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from google.protobuf import json_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.activity.messages import NO_ACTIVITY
from llmbackend.core.backend_api import (
    API_VERSION,
    NO_TENANT,
    InstanceGroupKind,
    MetricKind,
    ParameterValue,
    ResponseFlag,
    Tensor,
    TritonError,
    unsupported,
)
from llmbackend.fork_server.host_policy import NO_POLICY

from .metrics import Histogram, MetricBuffer, Scalar

logger = logging.getLogger(__name__)

MIN_PAUSE_S = 0.01
METRICS_PERIOD_S = 0.1
DUTY = 0.05
"""Maximum fraction of time that the poller is active."""


class BackgroundPoller:
    """A thread that asks Triton which requests were cancelled, and sends it changed metrics.

    pb_utils has no events: cancellations must be polled, and each poll is a round trip between processes. Invariants:
    without a live request or a changed metric the thread sleeps without a timeout; otherwise it is active for at most
    DUTY of the time; no failure ends the thread or the stub.
    """

    def __init__(self) -> None:
        self._work = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llm-poller", daemon=True)
        self._metrics_flushed_s = 0.0
        self.watch = CancelWatch(self._wake)
        self.metrics = MetricBuffer(self._wake)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and removes the metrics. To be called after the last request has ended."""
        self._stopping.set()
        self._work.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.metrics.close()

    def _wake(self) -> None:
        if not self._work.is_set():
            self._work.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._work.wait()
            self._work.clear()
            start_s = time.monotonic()
            try:
                self.watch.ask_all()
                metrics_wait = self._flush_metrics()
            except Exception:
                logger.exception("reading cancelled requests or reporting metrics to Triton failed")
                metrics_wait = False
            if len(self.watch) or metrics_wait:
                self._work.set()
            now_s = time.monotonic()
            self._stopping.wait(max(MIN_PAUSE_S, (now_s - start_s) / DUTY))

    def _flush_metrics(self) -> bool:
        """Returns whether it is too early, that is, less than METRICS_PERIOD_S after the last flush."""
        if time.monotonic() - self._metrics_flushed_s < METRICS_PERIOD_S:
            return True
        self.metrics.flush()
        self._metrics_flushed_s = time.monotonic()
        return False


def parse_config(fields: dict[str, Any]) -> ModelConfig:
    """The configuration passed to a stub. Fields unknown to this protobuf are ignored."""
    config: ModelConfig = json_format.ParseDict(fields, ModelConfig(), ignore_unknown_fields=True)
    return config


class TritonBackend:
    """backend_api.Backend, restricted to what this backend uses; likewise for the classes below."""

    api_version = API_VERSION

    def __init__(self, name: str, poller: BackgroundPoller) -> None:
        self.state: Any = None
        self.name = name
        self.resumes = False
        self.poller = poller

    def metric_family(
        self,
        kind: MetricKind,
        name: str,
        description: str,
        label_names: Sequence[str],
        buckets: Sequence[float] = (),
    ) -> Scalar | Histogram:
        return self.poller.metrics.family(kind, name, description, buckets)


class TritonModel:
    """backend_api.Model."""

    auto_complete_config = False
    """Triton completes the configuration earlier, in another process."""

    def __init__(self, backend: TritonBackend, arguments: Mapping[str, str]) -> None:
        """`arguments`: those of TritonPythonModel.initialize."""
        self.state: Any = None
        self.backend = backend
        self.name = arguments["model_name"]
        self.version = int(arguments["model_version"])
        self.directory = Path(arguments["model_repository"])
        self.version_directory = self.directory / arguments["model_version"]
        self._config = parse_config(json.loads(arguments["model_config"]))

    @property
    def config(self) -> ModelConfig:
        return copy.deepcopy(self._config)

    def set_config(self, config: ModelConfig) -> None:
        raise unsupported("inside Triton only auto_complete_config completes a configuration")


class TritonInstance:
    """backend_api.ModelInstance. Triton's python backend reports a request's statistics itself."""

    host_policy = NO_POLICY
    """Triton binds the stub itself, and thereby the engine that it starts."""
    activity = NO_ACTIVITY

    def __init__(self, model: TritonModel, arguments: Mapping[str, str]) -> None:
        self.state: Any = None
        self.model = model
        self.name = arguments["model_instance_name"]
        self.kind = InstanceGroupKind(f"KIND_{arguments['model_instance_kind']}")
        self.device_id = int(arguments["model_instance_device_id"])

    def _count_nothing(self, *_: Any, **__: Any) -> None:
        """Triton makes these reports itself."""

    report_statistics = report_batch_statistics = report_response_statistics = _count_nothing


_NUMBERS = itertools.count(1)


class Channel:
    """Makes a response sender of pb_utils usable from several threads. `_lock`: calls must never overlap."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._lock = threading.Lock()
        self._is_final = False

    def send(self, response: Any | None, flags: ResponseFlag) -> None:
        """Blocks until Triton has taken the response (the stub waits for its parent process). Raises pb_utils' errors;
        those of the final response are logged."""
        is_final = bool(flags & ResponseFlag.FINAL)
        with self._lock:
            if self._is_final:
                logger.error("a response after the final one is dropped")
                return
            self._is_final = is_final
            try:
                self._send(response, is_final)
            except Exception:
                if not is_final:
                    raise
                logger.exception("Triton did not accept the last response of a request")

    def ask_cancelled(self) -> bool:
        """Whether the request was cancelled; False after FINAL. Costs a round trip to Triton's process."""
        with self._lock:
            return not self._is_final and bool(self._sender.is_cancelled())

    def _send(self, response: Any | None, is_final: bool) -> None:
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_final else 0
        if response is None:
            self._sender.send(flags=flags)
        else:
            self._sender.send(response, flags)


class CancelWatch:
    """The live requests that have cancel callbacks. Any thread may add and discard; one thread polls.

    A request must not be polled after its FINAL: the stub asks by address, and Triton's object may have been freed.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: called when there is a request to poll."""
        self._wake = wake
        self._lock = threading.Lock()
        self._callbacks: dict[Channel, list[Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._callbacks)

    def add(self, channel: Channel, callback: Callable[[], None]) -> None:
        with self._lock:
            self._callbacks.setdefault(channel, []).append(callback)
        self._wake()

    def discard(self, channel: Channel) -> None:
        with self._lock:
            self._callbacks.pop(channel, None)

    def ask_all(self) -> None:
        """Asks Triton about each request, and calls the callbacks of cancelled ones once."""
        with self._lock:
            channels = list(self._callbacks)
        for channel in channels:
            if channel.ask_cancelled():
                with self._lock:
                    callbacks = self._callbacks.pop(channel, [])
                for callback in callbacks:
                    callback()


class TritonRequest:
    """One inference request."""

    priority = 0
    """Unknown here; Triton's queue has already ordered the requests."""
    trace = None
    """Triton traces requests itself."""
    tenant = NO_TENANT
    """Triton does not identify clients."""
    resume = None
    """Triton has no resumable requests."""
    command = ""
    """Triton has no commands."""

    def __init__(self, request: Any, channel: Channel, watch: CancelWatch) -> None:
        """Raises TritonError for a tensor of an unknown type."""
        self.id: str = request.request_id()
        self.number = next(_NUMBERS)
        self.timeout_us = int(request.timeout())
        self.parameters: Mapping[str, ParameterValue] = _request_parameters(request.parameters())
        self.requested_outputs = tuple(sorted(request.requested_output_names()))
        self.inputs: Mapping[str, Tensor] = {
            tensor.name(): Tensor.of(tensor.name(), tensor.as_numpy()) for tensor in request.inputs()
        }
        self._request = request  # owns the shared memory that contains the inputs
        self._channel = channel
        self._watch = watch

    def on_cancel(self, callback: Callable[[], None]) -> None:
        self._watch.add(self._channel, callback)

    def new_response(self) -> TritonResponse:
        return TritonResponse(self._channel)

    def response_factory(self) -> TritonResponseFactory:
        return TritonResponseFactory(self._channel)

    def release(self) -> None:
        self._watch.discard(self._channel)
        self.inputs = {}
        self._request = None


class TritonResponse:
    """A response without outputs."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, flags: ResponseFlag, error: TritonError | None = None, delta: bytes = b"") -> None:
        response = pb_utils.InferenceResponse(output_tensors=[]) if error is None else error_response(error)
        self._channel.send(response, flags)


class TritonResponseFactory:
    """Makes the responses of one request, even after its release."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def new_response(self) -> TritonResponse:
        return TritonResponse(self._channel)

    def send(self, outputs: Sequence[Tensor], flags: ResponseFlag, delta: bytes = b"") -> None:
        tensors = [pb_utils.Tensor(tensor.name, tensor.data) for tensor in outputs]
        self._channel.send(pb_utils.InferenceResponse(output_tensors=tensors), flags)

    def send_flags(self, flags: ResponseFlag) -> None:
        self._channel.send(None, flags)

    def close(self) -> None:
        """Triton's factory is freed with the last reference to its sender."""


def error_response(error: TritonError) -> Any:
    code = getattr(pb_utils.TritonError, error.code.name)
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(error.message, code))


def _request_parameters(parameters: Any) -> dict[str, ParameterValue]:
    """pb_utils returns JSON text in all releases so far."""
    values = json.loads(parameters) if isinstance(parameters, str) else parameters
    return dict(values or {})
