"""Which scheduler a model's configuration asks for.

For: Model. Does not know: what a scheduler does. Invariant: one scheduler per model version; its sources are asked for
by instance.
"""

from __future__ import annotations

from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.inner_door import ModelHost
from llmbackend.core.response_channel import ChannelOwner
from llmbackend.waiting.queue_policy import QueuePolicies
from llmbackend.waiting.timer import Timer

from .dynamic_batcher import DynamicBatcher
from .ensemble import EnsembleScheduler
from .request_queue import RequestQueue
from .scheduler import Scheduler
from .sequence_batcher import SequenceBatcher


def new_scheduler(
    config: ModelConfig, model: ChannelOwner, model_directory: Path, timer: Timer, host: ModelHost
) -> Scheduler:
    """Raises TritonError INVALID_ARG for a configuration that only the scheduler finds wrong."""
    if config.HasField("ensemble_scheduling"):
        return EnsembleScheduler(config, host)
    if config.HasField("sequence_batching"):
        return SequenceBatcher(config, model, model_directory, timer)
    if config.HasField("dynamic_batching"):
        if config.max_batch_size > 1:
            return DynamicBatcher(config, model.statistics, timer)
        return RequestQueue(QueuePolicies.of(config.dynamic_batching), model.statistics, timer)
    return RequestQueue(QueuePolicies(), model.statistics, timer)
