"""Instances added to and taken from a model version that serves, without unloading it.

For: the life cycle (may a change be made in place?) and Model. Does not know: why a model is reloaded, schedulers'
insides.
Invariants: a failed update leaves the old instances as they were; a removed instance is finalised when its thread has
ended, which serves the sequences that it has to their end, and every request that was given to it is over.
Source: ConfigChangeRequiresReload and UpdateInstanceGroup in Triton's core (reference §1.5, §2.2).
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.repository.model_files import is_version_touched
from llmbackend.core.repository.model_repository import ModelSpec

from .live_requests import LiveRequests
from .model_instance import InstanceThread, LoadedInstance

log = logging.getLogger(__name__)

UPDATED_IN_PLACE = ("instance_group", "version_policy")


def is_update(old: ModelSpec, new: ModelSpec, version: int) -> bool:
    """Whether a version loaded from `old` becomes that of `new` by other instances alone.

    Agents and uploaded files bring a directory of their own with every load.
    """
    if old.has_agents or new.has_agents or old.directory != new.directory or not new.signature:
        return False
    if new.config.HasField("ensemble_scheduling"):
        return False
    if is_version_touched(old.signature, new.signature, version, new.config_file):
        return False
    return bool(_without_instances(old.config) == _without_instances(new.config))


def _without_instances(config: ModelConfig) -> ModelConfig:
    rest = ModelConfig()
    rest.CopyFrom(config)
    for field in UPDATED_IN_PLACE:
        rest.ClearField(field)
    return rest


@dataclass(frozen=True, slots=True)
class InstanceChange:
    """kept + added are the model's instances afterwards."""

    kept: list[LoadedInstance]
    added: list[LoadedInstance]
    removed: list[LoadedInstance]


def compare(present: Sequence[LoadedInstance], wanted: Sequence[LoadedInstance]) -> InstanceChange:
    """An instance stays when one of its place (kind, device and settings) is wanted, best under its own name; it keeps
    its name. Names do not matter, as in Triton."""
    free: defaultdict[object, dict[str, LoadedInstance]] = defaultdict(dict)
    for instance in present:
        free[instance.place][instance.name] = instance
    kept, others, added = [], [], []
    for one in wanted:
        same = free[one.place].pop(one.name, None)
        if same is not None:
            kept.append(same)
        else:
            others.append(one)
    for one in others:
        if free[one.place]:
            kept.append(free[one.place].pop(next(iter(free[one.place]))))
        else:
            added.append(one)
    left = [instance for instances in free.values() for instance in instances.values()]
    return InstanceChange(kept, added, left)


class InstanceRemovals:
    """Removed instances that have not been finalised yet. Any thread."""

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()

    def __len__(self) -> int:
        return sum(thread.is_alive() for thread in tuple(self._threads))

    def begin(self, removal: Callable[[], None]) -> threading.Thread:
        """Runs `removal` on a thread of its own."""
        self._threads = {thread for thread in self._threads if thread.is_alive()}
        thread = threading.Thread(target=removal, name="remove-instance", daemon=True)
        self._threads.add(thread)
        thread.start()
        return thread

    def join(self) -> None:
        for thread in tuple(self._threads):
            thread.join()


def remove(instance: LoadedInstance, thread: InstanceThread | None, live: LiveRequests) -> None:
    """Finalises an instance, whose `thread` was told to end, when no request is with it any more."""
    if thread is not None:
        thread.join()
    live.wait_until_gone(live.with_instance(instance))
    instance.finalize()
    log.info("removed instance '%s' of model '%s'", instance.name, instance.model.name)


def undoing(instances: Sequence[LoadedInstance], initialize: Callable[[], None]) -> None:
    """Initialises new instances; when one fails, all of them are finalised and the error comes out."""
    try:
        initialize()
    except BaseException:
        for instance in instances:
            instance.finalize()
        raise
