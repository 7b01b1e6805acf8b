"""Makes the scheduler that a model's configuration asks for.

For: LoadedModel. Does not know: what a scheduler does. Invariants: one scheduler per model version; requests pass the
order of responses first, then the response cache, then the queue.
Source: SetConfiguredScheduler in Triton's backend_model.cc.
"""

from __future__ import annotations

import logging
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.host_services import HostServices
from llmbackend.core.metrics.statistics import Statistics
from llmbackend.core.requests.response_channel import ChannelOwner
from llmbackend.core.scheduling.batch_strategy import BatchStrategy
from llmbackend.core.scheduling.caching_scheduler import CachingScheduler
from llmbackend.core.scheduling.dynamic_batcher import DynamicBatcher
from llmbackend.core.scheduling.ensembles.scheduler import EnsembleScheduler
from llmbackend.core.scheduling.request_queue import RequestQueue
from llmbackend.core.scheduling.response_order import ResponseOrder
from llmbackend.core.scheduling.scheduler import Scheduler
from llmbackend.core.scheduling.sequences.batcher import SequenceBatcher
from llmbackend.waiting.queue_policy import QueuePolicies
from llmbackend.waiting.timer import Timer

log = logging.getLogger(__name__)


def new_scheduler(
    config: ModelConfig,
    model: ChannelOwner,
    model_directory: Path,
    services: HostServices,
    strategy: BatchStrategy | None = None,
) -> Scheduler:
    """Raises TritonError INVALID_ARG for an error in the configuration that earlier checks do not find."""
    scheduler: Scheduler
    if config.HasField("ensemble_scheduling"):
        scheduler = EnsembleScheduler(config, services.host)
    elif config.HasField("sequence_batching"):
        scheduler = SequenceBatcher(config, model, model_directory, services.timer)
    else:
        scheduler = _queue(config, model.statistics, services.timer, strategy)
    if config.response_cache.enable:
        scheduler = _with_cache(scheduler, model, services)
    if config.dynamic_batching.preserve_ordering:
        scheduler = ResponseOrder(scheduler)
    return scheduler


def _queue(config: ModelConfig, statistics: Statistics, timer: Timer, strategy: BatchStrategy | None) -> RequestQueue:
    if not config.HasField("dynamic_batching"):
        return RequestQueue(QueuePolicies(), statistics, timer)
    if config.max_batch_size > 1:
        return DynamicBatcher(config, statistics, timer, strategy)
    return RequestQueue(QueuePolicies.of(config.dynamic_batching), statistics, timer)


def _with_cache(scheduler: Scheduler, model: ChannelOwner, services: HostServices) -> Scheduler:
    cache = services.caches.current
    if cache is None:
        log.warning("model '%s' has 'response_cache', but the server has none (--cache-config)", model.name)
        return scheduler
    return CachingScheduler(scheduler, cache, model)
