"""What the loop of an engine asks and tells the owner of its requests: one frozen object of callbacks.

For: LlmManager, and the owner of a request queue (the adapter's ModelState), as in MindIE's LlmManager. Does not know:
the loop. Invariant: all are called on the loop's thread. An exception of get_requests or send_responses discards the
engine, and engine_lost follows; an exception of another callback is logged, and the loop goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from .block_changes import BlockChanges
from .engine_state import EngineState
from .errors import EngineDeadError
from .infer_request import AdapterResult, EngineStats, InferRequest, StepOutput, Vocabulary
from .load_progress import LoadProgress
from .request_events import RequestEvent
from .step_report import EngineReport


class Operation(IntEnum):
    """STOP ends a request. RELEASE_KV gives back its KV too; here every end does, so both are an abort."""

    STOP = 1
    RELEASE_KV = 2


class StatusType(IntEnum):
    CONTROL_SIGNAL_STATUS = 0
    REQUEST_ENQUEUE_STATUS = 1


@dataclass(frozen=True, kw_only=True)
class ManagerCallbacks:
    """get_requests(n)                     drains at most n requests from the shared queue; this engine has room for n
    send_responses(outputs)             gets all outputs of a step at once
    control_signal()                    drains the requests to stop; one that is not live is answered with an error
    stats(stats)                        after each batch of steps
    status_response(id, error, type)    for each pulled request and control signal; error "" = accepted
    engine_lost(request_ids, cause)     the engine has ended, and with it these requests, in the order in which they
                                        were pulled; get_requests may give them out again, to the next engine. After
                                        an exception of get_requests the owner may have given out more, and after one
                                        of send_responses some of them may have ended.
    vocabulary()                        what tokens stand for, for requests with a grammar; once an engine; None = such
                                        requests cannot be served
    adapters()                          the LoRA adapters that the engine should have, name → folder; None = those of
                                        the config. A changed mapping is another object.
    adapter_loaded(result)              for each adapter that was loaded for it, again in each new engine
    request_events(events)              of traced requests, before the outputs of the same step
    reported(report)                    before the outputs of the same step; after `watch` alone
    state_changed(state)                when the engine is ready, was lost, or has stopped
    progress(progress)                  while an engine loads
    blocks_changed(changes)             of its prefix cache, before the outputs of the same step; after
                                        `follow_prefixes` alone
    """

    get_requests: Callable[[int], Sequence[InferRequest]]
    send_responses: Callable[[Sequence[StepOutput]], None]
    control_signal: Callable[[], Sequence[tuple[str, Operation]]]
    stats: Callable[[EngineStats], None]
    status_response: Callable[[str, str, StatusType], None]
    engine_lost: Callable[[Sequence[str], EngineDeadError], None]
    vocabulary: Callable[[], Vocabulary | None] = lambda: None
    adapters: Callable[[], Mapping[str, str]] | None = None
    adapter_loaded: Callable[[AdapterResult], None] = lambda result: None
    request_events: Callable[[Sequence[RequestEvent]], None] = lambda events: None
    reported: Callable[[EngineReport], None] = lambda report: None
    state_changed: Callable[[EngineState], None] = lambda state: None
    progress: Callable[[LoadProgress], None] = lambda progress: None
    blocks_changed: Callable[[BlockChanges], None] = lambda changes: None
