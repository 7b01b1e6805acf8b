"""Waits for running requests before a model or the server stops, and cuts off those that run too long.

For: InferenceServer.stop and ModelLifecycle. Does not know: signals, how models are unloaded. Invariants: a wait with a
deadline ends at it, even if a backend hangs; a request that is cut off is answered with an error. Log lines of the wait
are Triton's (golden transcripts 52, 53).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence

from llmbackend.core.errors import request_tag, unavailable
from llmbackend.core.models.model import LoadedModel
from llmbackend.core.requests.response_channel import ResponseChannel

from .model_versions import ModelVersions

log = logging.getLogger(__name__)

IDS_NAMED = 20
"""Requests per model version whose ids are logged when they are cut off."""
ID_CHARACTERS_SHOWN = 64

FIRST_DRAIN_LOG_S = 10.0
MAX_DRAIN_LOG_S = 600.0
CUT_REASON = "Server is stopping: the exit timeout expired before the request was finished"


def wait_until_drained(versions: ModelVersions, deadline_s: float) -> bool:
    """Waits for every in-flight request and open sequence, logging progress each second. False at the deadline
    (monotonic clock)."""
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
    """For a model with sequences at least the number of open ones, as in Triton."""
    return max(model.in_flight.count, model.sequences.open_count if model.sequences is not None else 0)


def _wait_until_idle(model: LoadedModel, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    if model.in_flight.wait_for_zero(timeout_s) and model.sequences is not None:
        model.sequences.wait_until_none_is_open(max(deadline_s - time.monotonic(), 0.0))


def wait_until_unloaded(versions: ModelVersions, timeout_s: float) -> bool:
    """Waits until no load or unload is under way, logging progress each second. False after `timeout_s`."""
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
    """Waits without a deadline. Warns about a model that takes long, after 10 s and then at doubling intervals."""
    wait_s = FIRST_DRAIN_LOG_S
    while not model.in_flight.wait_for_zero(wait_s):
        count = model.in_flight.count
        log.warning("Model '%s' (version %d) still drains: %d in-flight inferences", model.name, model.version, count)
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
    """The requests' ids, which are clients' text: quoted and shortened, so that they cannot forge log lines."""
    shown = [repr(channel.request_id[:ID_CHARACTERS_SHOWN] or "<id_unknown>") for channel in channels[:IDS_NAMED]]
    more = len(channels) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
