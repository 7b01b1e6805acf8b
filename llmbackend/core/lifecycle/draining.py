"""Letting running requests end before a server stops, and cutting off those that do not.

For: InferenceServer.stop, and the life cycle of a single model. Does not know: signals, protocols, how models are
unloaded. Invariants: where there is a deadline, waiting ends at it, whatever a backend does; a request that is cut is
answered with an error, so that its client sees an end and not a connection that breaks; a sequence that runs is waited
for until its client ends it or it was idle for too long.
Log lines of the wait are Triton's (golden 52, 53).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence

from llmbackend.core.errors import request_tag, unavailable
from llmbackend.core.models.in_flight import InFlight
from llmbackend.core.models.model import LoadedModel
from llmbackend.core.requests.response_channel import ResponseChannel

log = logging.getLogger(__name__)

IDS_NAMED = 20
"""How many requests of a model version are named in the log when they are cut."""
ID_CHARACTERS_SHOWN = 64

FIRST_DRAIN_LOG_S = 10.0
LONGEST_DRAIN_LOG_S = 600.0
CUT_REASON = "Server is stopping: the exit timeout expired before the request was finished"


def wait_until_drained(live_models: Callable[[], Sequence[LoadedModel]], deadline_s: float) -> bool:
    """Waits for every in-flight request and open sequence, with a line of log each second. False at the deadline
    (monotonic)."""
    while True:
        busy = [model for model in live_models() if _in_flight_count(model)]
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
    """For a model with sequences Triton counts those."""
    return max(model.in_flight.count, model.sequences.open_count if model.sequences is not None else 0)


def _wait_until_idle(model: LoadedModel, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    if model.in_flight.wait_for_zero(timeout_s) and model.sequences is not None:
        model.sequences.wait_until_none_is_open(max(deadline_s - time.monotonic(), 0.0))


def wait_until_unloaded(
    live_models: Callable[[], Sequence[LoadedModel]], operations: InFlight, timeout_s: float
) -> bool:
    """Waits until nothing is loaded or unloaded any more, with a line of log each second. False after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = deadline_s - time.monotonic()
        shown_s = max(math.ceil(left_s), 0)
        count = len(live_models())
        log.info("Timeout %d: Found %d live models and 0 in-flight non-inference requests", shown_s, count)
        if operations.wait_for_zero(0):
            return True
        if left_s <= 0:
            return False
        operations.wait_for_zero(min(left_s, 1.0))


def wait_for_last_request(model: LoadedModel) -> None:
    """As long as it takes; a model that takes long is named in the log, ever more rarely."""
    wait_s = FIRST_DRAIN_LOG_S
    while not model.in_flight.wait_for_zero(wait_s):
        count = model.in_flight.count
        log.warning("Model '%s' (version %d) still drains: %d in-flight inferences", model.name, model.version, count)
        wait_s = min(2 * wait_s, LONGEST_DRAIN_LOG_S)


def cut(models: Iterable[LoadedModel]) -> None:
    """Ends every running request with UNAVAILABLE for its client, asks its backend to drop it, and logs which."""
    for model in models:
        channels = model.live.all()
        cut_off = [
            channel
            for channel in channels
            if channel.abort(unavailable(f"{request_tag(channel.request_id)}{CUT_REASON}"))
        ]
        if cut_off:
            names = _names(cut_off)
            log.error(
                "Model '%s' (version %d): cut off %d requests: %s", model.name, model.version, len(cut_off), names
            )


def _names(channels: Sequence[ResponseChannel]) -> str:
    """Ids are clients' text: quoted and shortened, so that none can forge a line of the log."""
    shown = [repr(channel.request_id[:ID_CHARACTERS_SHOWN] or "<id_unknown>") for channel in channels[:IDS_NAMED]]
    more = len(channels) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
