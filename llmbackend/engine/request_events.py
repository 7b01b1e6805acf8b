"""What steps do with a traced request: chunks of its prompt, preemptions, its grammar.

For: the engine core, which tells them, and the host, which makes spans of them. Does not know: traces. Invariant: an
event is frozen, and has no token of the request.
"""

from __future__ import annotations

from typing import Literal

import msgspec

EventName = Literal["compile", "compiled", "prefill", "recompute", "preempted"]


class RequestEvent(msgspec.Struct, frozen=True, array_like=True):
    """One event of a traced request.

    request_id
    name        compile, compiled: of its grammar; prefill: a chunk of its prompt is computed; recompute: tokens are,
                that were computed before, after a preemption or by an engine that died; preempted: it lost its blocks
    time_ns     monotonic, the same for all processes of a machine
    num_tokens  of the chunk
    """

    request_id: str
    name: EventName
    time_ns: int
    num_tokens: int = 0
