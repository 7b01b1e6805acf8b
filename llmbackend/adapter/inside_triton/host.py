"""Backend, Model and ModelInstance of the backend contract in a stub of Triton's python backend, and what polls Triton.

For: TritonPythonModel. Does not know: LLMs. A stub is the process of one model instance, so there is one of each here;
`instance_group.count: 2` are two stubs that share only Triton's own queue.
Source: the `args` of TritonPythonModel.initialize.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.activity.messages import NO_ACTIVITY
from llmbackend.core.backend_api import (
    API_VERSION,
    ExecutionPolicy,
    InstanceGroupKind,
    MetricFamily,
    MetricKind,
    SendPolicy,
    unsupported,
)
from llmbackend.fork_server.host_policy import NO_POLICY

from .metrics import MetricBuffer
from .requests import CancelWatch

logger = logging.getLogger(__name__)

MIN_PAUSE_S = 0.01
METRICS_PERIOD_S = 0.1
DUTY = 0.05
"""Largest share of the time in which the poller works."""


class BackgroundPoller:
    """One thread that asks Triton which requests were cancelled and tells it the metrics that changed.

    pb_utils has no events: a cancel can only be asked for, and each question is a round trip between processes.
    Invariants: without a live request or a changed metric it sleeps without a timeout; otherwise it works for at most
    DUTY of the time, however many requests are live; no failure ends it, or the stub.
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
        """Ends the thread and removes the metrics; after the last request has ended."""
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
        """Returns whether it is too early: the last flush was less than METRICS_PERIOD_S ago."""
        if time.monotonic() - self._metrics_flushed_s < METRICS_PERIOD_S:
            return True
        self.metrics.flush()
        self._metrics_flushed_s = time.monotonic()
        return False


def parse_config(fields: dict[str, Any]) -> ModelConfig:
    """The configuration that a stub is given; fields that this protobuf does not know are ignored."""
    config: ModelConfig = json_format.ParseDict(fields, ModelConfig(), ignore_unknown_fields=True)
    return config


class TritonBackend:
    """backend_api.Backend."""

    execution_policy = ExecutionPolicy.BLOCKING
    send_policy = SendPolicy.IMMEDIATE
    resumes = False
    api_version = API_VERSION

    def __init__(self, name: str, directory: Path, poller: BackgroundPoller) -> None:
        self.state: Any = None
        self.name = name
        self.directory = directory
        self.config: Mapping[str, str] = {}
        self.poller = poller

    def metric_family(
        self,
        kind: MetricKind,
        name: str,
        description: str,
        label_names: Sequence[str] | None = (),
        buckets: Sequence[float] | None = None,
    ) -> MetricFamily:
        return self.poller.metrics.family(kind, name, description, buckets)


class TritonModel:
    """backend_api.Model."""

    auto_complete_config = False
    """Triton has it completed before, in another process."""

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
        copy = ModelConfig()
        copy.CopyFrom(self._config)
        return copy

    def set_config(self, config: ModelConfig) -> None:
        raise unsupported("inside Triton only auto_complete_config completes a configuration")


class TritonInstance:
    """backend_api.ModelInstance. Triton's python backend reports the statistics of a request itself."""

    is_passive = False
    host_policy = NO_POLICY
    """Triton binds the stub itself, and so the engine that it starts."""
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
