"""The order in which queued requests are served: by priority level, then by arrival, the delayed ones of a level last.

For: RequestQueue, which guards it with its lock. Does not know: threads, instances, who answers a request.
Invariants: no operation walks the queue, so that a full one costs what an empty one costs (a level that comes into use
is found by bisection); a level exists only while requests wait at it, however many levels a configuration names.
Source: Triton's PriorityQueue (scheduler_utils.cc).
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator

from llmbackend.core.errors import request_tag, unavailable
from llmbackend.core.requests.infer_request import InferRequest
from llmbackend.waiting.deadlines import Deadlines
from llmbackend.waiting.queue_policy import QueuePolicies, QueuePolicy

Line = OrderedDict[InferRequest, None]
"""Requests in the order they came, with O(1) removal anywhere (a plain dict is slow to find its first entry once
entries before it were deleted)."""


class _Level:
    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.waiting: Line = OrderedDict()
        self.delayed: Line = OrderedDict()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.delayed)


class PriorityQueue:
    def __init__(self, policies: QueuePolicies) -> None:
        self._policies = policies
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []
        self._deadlines: Deadlines[InferRequest] = Deadlines()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[InferRequest]:
        """In the order of service."""
        for number in self._order:
            yield from self._levels[number].waiting
            yield from self._levels[number].delayed

    def append(self, request: InferRequest) -> None:
        """Raises TritonError UNAVAILABLE when the request's level is full."""
        number = self._policies.level(request.priority)
        level = self._levels.get(number) or _Level(self._policies.policy(number))
        policy = level.policy
        if policy.max_queue_size and len(level) >= policy.max_queue_size:
            raise unavailable(f"{request_tag(request.id)}Exceeds maximum queue size")
        if number not in self._levels:
            self._levels[number] = level
            bisect.insort(self._order, number)
        level.waiting[request] = None
        self._count += 1
        deadline_ns = policy.deadline_ns(request.queue_start_ns, request.timeout_us)
        if deadline_ns:
            self._deadlines.add(request, deadline_ns)

    def remove(self, request: InferRequest) -> bool:
        """Whether the request was here."""
        number = self._policies.level(request.priority)
        level = self._levels.get(number)
        line = next((line for line in (level.waiting, level.delayed) if request in line), None) if level else None
        if level is None or line is None:
            return False
        del line[request]
        self._forget(request, number, level)
        return True

    def pop_first(self) -> InferRequest:
        """The next to be served. Raises IndexError when there is none."""
        number = self._order[0]
        level = self._levels[number]
        request, _ = (level.waiting or level.delayed).popitem(last=False)
        self._forget(request, number, level)
        return request

    def next_deadline_ns(self) -> int | None:
        return self._deadlines.earliest_ns()

    def take_expired(self, now_ns: int) -> list[InferRequest]:
        """Takes out the requests to reject because their time is over; those to delay are moved behind the others of
        their level."""
        rejected = []
        for request in self._deadlines.pop_due(now_ns):
            number = self._policies.level(request.priority)
            level = self._levels[number]
            del level.waiting[request]
            if level.policy.reject:
                self._forget(request, number, level)
                rejected.append(request)
            else:
                level.delayed[request] = None
        return rejected

    def _forget(self, request: InferRequest, number: int, level: _Level) -> None:
        self._count -= 1
        self._deadlines.discard(request)
        if not level:
            del self._levels[number]
            del self._order[bisect.bisect_left(self._order, number)]
