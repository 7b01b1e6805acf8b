"""ModelLifecycle loads and unloads models. Only it changes the state of a version.

Invariants: a new version serves before the old one stops; a model is finalised when its last in-flight handle is
closed; a load that a newer operation has overtaken is undone. Source: Triton's model life cycle; texts of golden
transcripts 06, 07, 50, 51.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import ParamSpec

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.fork_server.process_resources import give_back_freed_memory
from llmbackend.waiting.thread_pool import ThreadPool

from ..daemon_threads import DaemonThreadPool
from ..errors import LoadError, TritonError, as_triton_error, internal, request_tag, unavailable
from ..models.model import LoadedModel
from ..repository.model_files import is_version_affected
from ..repository.model_repository import ModelSpec
from ..requests.response_channel import ResponseChannel
from .model_versions import Load, ModelReadyState, ModelVersions, StateListener

log = logging.getLogger(__name__)

IDS_NAMED = 20
"""Ids per model version that are logged when requests are cut off."""
ID_CHARACTERS_SHOWN = 64

FIRST_DRAIN_LOG_S = 10.0
MAX_DRAIN_LOG_S = 600.0
CUT_REASON = "Server is stopping: the exit timeout expired before the request was finished"


def wait_until_drained(versions: ModelVersions, deadline_s: float) -> bool:
    """Waits for requests in flight and open sequences, logging progress every second. False at the (monotonic)
    deadline."""
    while True:
        busy = [model for model in versions.live_models() if _in_flight_count(model)]
        left_s = deadline_s - time.monotonic()
        shown_s = max(math.ceil(left_s), 0)
        log.info("Timeout %d: Found %d model versions that have in-flight inferences", shown_s, len(busy))
        for model in busy:
            count = _in_flight_count(model)
            log.info("Model '%s' (version %d) has %d in-flight inferences", model.name, model.version, count)
        if not busy:
            return True
        if left_s <= 0:
            return False
        _wait_until_idle(busy[0], min(left_s, 1.0))


def _in_flight_count(model: LoadedModel) -> int:
    """For a model with sequences, at least the number of open sequences, as in Triton."""
    return max(model.in_flight.count, model.sequences.open_count if model.sequences is not None else 0)


def _wait_until_idle(model: LoadedModel, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    if model.in_flight.wait_for_zero(timeout_s) and model.sequences is not None:
        model.sequences.wait_until_none_is_open(max(deadline_s - time.monotonic(), 0.0))


def wait_until_unloaded(versions: ModelVersions, timeout_s: float) -> bool:
    """Waits for loads and unloads, logging progress every second. Returns False after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = deadline_s - time.monotonic()
        shown_s = max(math.ceil(left_s), 0)
        count = len(versions.live_models())
        log.info("Timeout %d: Found %d live models and 0 in-flight non-inference requests", shown_s, count)
        if versions.operations.wait_for_zero(0):
            return True
        if left_s <= 0:
            return False
        versions.operations.wait_for_zero(min(left_s, 1.0))


def wait_for_last_request(model: LoadedModel) -> None:
    """Waits without a deadline. Logs a WARNING after 10 s, then at doubling intervals."""
    wait_s = FIRST_DRAIN_LOG_S
    while not model.in_flight.wait_for_zero(wait_s):
        count = model.in_flight.count
        log.warning("Model '%s' (version %d) is draining: %d in-flight inferences", model.name, model.version, count)
        wait_s = min(2 * wait_s, MAX_DRAIN_LOG_S)


def cut_off(models: Iterable[LoadedModel]) -> None:
    """Answers every running request with UNAVAILABLE, cancels it at its backend, and logs the ids."""
    for model in models:
        ended = [
            channel
            for channel in model.live_requests.all()
            if channel.abort(unavailable(f"{request_tag(channel.request_id)}{CUT_REASON}"))
        ]
        if ended:
            ids = _ids(ended)
            log.error("Model '%s' (version %d): cut off %d requests: %s", model.name, model.version, len(ended), ids)


def _ids(channels: Sequence[ResponseChannel]) -> str:
    """The requests' ids for the log, quoted and shortened, because clients choose them."""
    shown = [repr(channel.request_id[:ID_CHARACTERS_SHOWN] or "<id_unknown>") for channel in channels[:IDS_NAMED]]
    more = len(channels) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


OUTDATED = "Newer operation has been applied to the model lifecycle, current load operation is out-dated."
UPDATED_IN_PLACE = ("instance_group", "version_policy")
"""Fields of a configuration whose change needs no reload."""
P = ParamSpec("P")
ModelFactory = Callable[[ModelSpec, int], LoadedModel]
"""Makes and loads one version; raises TritonError."""


class ModelLifecycle:
    def __init__(
        self,
        make_model: ModelFactory,
        load_thread_count: int,
        load_retry_count: int,
        on_change: StateListener,
    ) -> None:
        self.versions = ModelVersions(on_change)
        self._make_model = make_model
        self._retries = load_retry_count
        self._pool = ThreadPool(max(load_thread_count, 1), thread_name_prefix="model-load")
        self._unloading = DaemonThreadPool("unload")

    def load(self, spec: ModelSpec) -> None:
        """Loads the versions of `spec` and puts them into service together; blocks until done. A version that differs
        only in its instances is updated in place. Raises LoadError with Triton's text if a version fails; the old
        versions then keep serving."""
        if not spec.versions:
            self.versions.record_without_versions(spec.key)
            policy = f"policy of model '{spec.key}'"
            raise LoadError(spec.key, f"at least one version must be available under the version {policy}")
        load = self.versions.begin_load(spec, lambda model: is_instance_update(model, spec))
        try:
            self._run(load)
        finally:
            self.versions.end_load(load)

    def unload(self, name: str) -> None:
        """Begins to unload all versions; requests in flight are finished. Ignores unknown models."""
        self._retire(self.versions.stop_serving(name))

    def close(self, timeout_s: float) -> bool:
        """Refuses new loads, unloads everything and waits until all models are finalised. False after `timeout_s`."""
        self.versions.refuse_loads()
        for name in self.versions.names():
            self.unload(name)
        self._unloading.close()
        if not wait_until_unloaded(self.versions, timeout_s):
            return False
        self._pool.shutdown()
        return True

    def _run(self, load: Load) -> None:
        spec, updated = load.spec, load.updated
        futures = {
            version: self._submit(self._update_version, spec, updated[version])
            if version in updated
            else self._submit(self._load_version, spec, version)
            for version in spec.versions
        }
        errors = {version: error for version, future in futures.items() if (error := _error_of(future)) is not None}
        models = {version: future.result() for version, future in futures.items() if version not in errors}
        is_outdated, retired = self.versions.swap(load, models, errors)
        self._retire(retired)
        if spec.agents is not None:
            spec.agents.load_ended(not errors and not is_outdated, len(models))
        if is_outdated:
            raise LoadError(spec.key, f"{OUTDATED}\n")
        if errors:
            log.info("failed to load '%s'", spec.key)
            raise LoadError(spec.key, _failure_text(errors, updated), tuple(errors.values()))
        log.info("successfully loaded '%s'", spec.key)

    def _submit(self, work: Callable[P, LoadedModel], *args: P.args, **kwargs: P.kwargs) -> Future[LoadedModel]:
        """Fails only through the future, also if no thread can be started: other versions may already be loading."""
        try:
            # Later, no thread may be available that unloads the model.
            self._unloading.run(lambda: None)
            return self._pool.submit(work, *args, **kwargs)
        except RuntimeError as error:
            failed: Future[LoadedModel] = Future()
            failed.set_exception(error)
            return failed

    def _update_version(self, spec: ModelSpec, model: LoadedModel) -> LoadedModel:
        log.info("loading: %s:%d", spec.key, model.version)  # as Triton
        try:
            model.update_instances(spec)
        except Exception as error:
            log.error("failed to update '%s' version %d: %s", spec.key, model.version, as_triton_error(error).status)
            raise
        return model

    def _load_version(self, spec: ModelSpec, version: int) -> LoadedModel:
        log.info("loading: %s:%d", spec.key, version)
        for attempt in range(self._retries + 1):
            try:
                return self._make_model(spec, version)
            except Exception as error:
                status = as_triton_error(error).status
                log.error("failed to load '%s' version %d: %s", spec.key, version, status)
                if attempt == self._retries or self.versions.is_closing:
                    raise
        raise AssertionError("unreachable")

    def _retire(self, models: Iterable[LoadedModel]) -> None:
        """Uses a thread per model, as Triton does, while threads can be started: a model that drains slowly must not
        delay others."""
        for model in models:
            retire = partial(self._retire_one, [model])
            try:
                self._unloading.run(retire)
            except RuntimeError:  # closed, and no thread can be started
                retire()

    def _retire_one(self, models: list[LoadedModel]) -> None:
        """models: with one element, which is removed, so that the arguments do not keep it alive"""
        self._finalize_when_idle(models.pop())
        if not self.versions.is_closing:
            gc.collect()  # a backend's objects may reference each other, and may hold the model's weights
            give_back_freed_memory()
        self.versions.operations.leave()

    def _finalize_when_idle(self, model: LoadedModel) -> None:
        """Waits for the model's last request, finalises the model, and notifies its agents and the version table."""
        agents = model.spec.agents
        if agents is not None:
            agents.unloading()
        try:
            wait_for_last_request(model)
            model.finalize()
            log.info("successfully unloaded '%s' version %d", model.key, model.version)
        except Exception:
            log.exception("failed to unload '%s' version %d", model.key, model.version)
        self.versions.end_draining(model)
        if agents is not None:
            agents.version_unloaded()


def is_instance_update(model: LoadedModel, new: ModelSpec) -> bool:
    """Whether adding and removing instances is enough to turn the serving version into `new`. Never for models with
    agents or uploaded files, whose loads have new directories."""
    old = model.spec
    if not model.instance_set.are_elastic:
        return False
    if old.has_agents or new.has_agents or old.directory != new.directory or not new.signature:
        return False
    if new.config.HasField("ensemble_scheduling"):
        return False
    if is_version_affected(old.signature, new.signature, model.version, new.config_file):
        return False
    return bool(_without_instances(old.config) == _without_instances(new.config))


def _without_instances(config: ModelConfig) -> ModelConfig:
    rest = ModelConfig()
    rest.CopyFrom(config)
    for field in UPDATED_IN_PLACE:
        rest.ClearField(field)
    return rest


def _failure_text(errors: Mapping[int, TritonError], updated: Collection[int]) -> str:
    """Triton's text for a failed load. updated: versions that were to be updated in place and still serve."""
    states = {
        version: ModelReadyState.READY if version in updated else ModelReadyState.UNAVAILABLE for version in errors
    }
    return "".join(
        f"version {version} is at {states[version].value} state: {error.status};\n" for version, error in errors.items()
    )


def _error_of(future: Future[LoadedModel]) -> TritonError | None:
    error = future.exception()
    if error is None:
        return None
    if not isinstance(error, Exception):
        return internal(f"{type(error).__name__}: {error}")
    return as_triton_error(error)
