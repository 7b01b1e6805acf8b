"""A thousand engines shared by a hundred hosts, in virtual time: what hosts must receive and store, and the balance.

Used by `python -m benchmarks.prefix_routing --simulate`. Independent of tokens' values and steps of engines. The hosts'
side is the server's own: task map, placement and index. Engines are models: seats, a cache of blocks by their hashes
(least recently used first, the end of a text before its beginning), the time that prompts and outputs take; their
contents are reported every `report_s`. A host asks one random engine whether it takes a request, and then the one for
which the request waits, instead of waking all engines. Invariant: seeded; every request is answered.

All hosts' indexes receive the same reports from engines, so a single copy is stored; what a host expects of its own
requests is separate.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llmbackend.adapter.tasks.placement import Placement, PrefixIndex
from llmbackend.adapter.tasks.task_map import EngineAssignment, TaskMap
from llmbackend.engine.memory.prefix_cache import prefix_hashes
from llmbackend.engine.messages import BlockChanges, InferRequest, SamplingParams, StepOutput
from llmbackend.waiting.queue_policy import QueuePolicies

from .policies import QueuedTask
from .trace import Conversation, Trace, TraceSettings
from .virtual_time import VirtualTime


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    num_engines: int = 1000
    num_hosts: int = 100
    seats: int = 8
    num_kv_blocks: int = 2048
    block_size: int = 32
    step_s: float = 0.025
    prompt_token_s: float = 1e-4
    report_s: float = 0.05
    trace: TraceSettings = field(
        default_factory=lambda: TraceSettings(
            num_conversations=8000,
            num_tenants=100,
            output_tokens=(50, 350),
            conversations_per_s=90.0,
        )
    )


class _Cache:
    """Blocks by their hashes."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.stored: dict[int, None] = {}
        self.removed: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def num_found(self, hashes: Sequence[int]) -> int:
        return next((index for index, block in enumerate(hashes) if block not in self._blocks), len(hashes))

    def add(self, hashes: Sequence[int]) -> None:
        for block in reversed(hashes):
            if block not in self._blocks:
                self._blocks[block] = None
                if self.removed.pop(block, 0) == 0:
                    self.stored[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._num_blocks:
            block, _ = self._blocks.popitem(last=False)
            if self.stored.pop(block, 0) == 0:
                self.removed[block] = None

    def changes(self) -> BlockChanges:
        changes = BlockChanges(array("Q", self.stored).tobytes(), array("Q", self.removed).tobytes())
        self.stored, self.removed = {}, {}
        return changes


@dataclass(slots=True)
class _Asked:
    """One request on its way."""

    host: _Host
    conversation: Conversation
    turn: int
    request: InferRequest
    hashes: Sequence[int]


class _Engine:
    def __init__(self, simulation: Simulation, number: int) -> None:
        self._simulation = simulation
        self.number = number
        self.bit = 1 << number
        self.cache = _Cache(simulation.settings.num_kv_blocks)
        self.running = 0
        self.waiting: deque[_Asked] = deque()
        self.reported_load = 0
        self.num_reports = 0
        self.num_tokens = 0
        self._is_report_due = False
        self.steps_with_blocks: set[int] = set()
        """Numbers of the steps, as the clock counts them, in which a block was filled."""

    @property
    def load(self) -> int:
        return self.running + len(self.waiting)

    def add(self, asked: _Asked) -> None:
        self.waiting.append(asked)
        self._begin()

    def _begin(self) -> None:
        settings, clock = self._simulation.settings, self._simulation.clock
        self.report_later()
        while self.waiting and self.running < settings.seats:
            asked = self.waiting.popleft()
            self.running += 1
            num_found = self.cache.num_found(asked.hashes) * settings.block_size
            missing = len(asked.request.prompt_token_ids) - num_found
            self._simulation.begun(self, asked, num_found)
            clock.after(missing * settings.prompt_token_s + settings.step_s, partial(self._generate, asked, missing))

    def _generate(self, asked: _Asked, num_computed: int) -> None:
        settings, simulation = self._simulation.settings, self._simulation
        self.cache.add(asked.hashes)
        simulation.first_token(self, asked, num_computed)
        num_tokens = asked.request.sampling.max_tokens
        self.num_tokens += num_computed + num_tokens
        first = simulation.clock.now_s
        every_s = settings.block_size * settings.step_s
        times_s = [first + i * every_s for i in range(num_tokens // settings.block_size + 1)]
        self.steps_with_blocks.update(math.floor(time_s / settings.step_s) for time_s in times_s)
        self.report_later()
        simulation.clock.after(num_tokens * settings.step_s, partial(self._end, asked))

    def _end(self, asked: _Asked) -> None:
        self.running -= 1
        self.cache.add(self._simulation.ended(self, asked))
        self._begin()

    def report_later(self) -> None:
        if not self._is_report_due:
            self._is_report_due = True
            self._simulation.clock.after(self._simulation.settings.report_s, self._report)

    def _report(self) -> None:
        self._is_report_due = False
        self.reported_load = self.load
        self.num_reports += 1
        self._simulation.reported(self, self.cache.changes())


class _Host:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.index = PrefixIndex()
        self.index._holders = simulation.index._holders
        self.index._num_blocks = simulation.index._num_blocks
        self.placement = Placement(self.index)
        self.placement.block_size = simulation.settings.block_size
        self.tasks = TaskMap(QueuePolicies(), 1 << 30, self.placement)
        self._sent: dict[int, tuple[int, int]] = {}
        """By engine: a report's number, and how many requests it got since."""
        self.assignments = [
            EngineAssignment(_nothing, partial(self.room, engine), engine.bit) for engine in simulation.engines
        ]
        self.asked: dict[str, _Asked] = {}

    def room(self, engine: _Engine) -> int:
        """By its last report, less what this host has sent since."""
        num_reports, num_sent = self._sent.get(engine.number, (0, 0))
        since = num_sent if num_reports == engine.num_reports else 0
        return self._simulation.settings.seats - engine.reported_load - since

    def submit(self, asked: _Asked) -> None:
        begin_ns = time.process_time_ns()
        request = asked.request
        asked.hashes = prefix_hashes(
            request.prefix_salt, request.prompt_token_ids, self._simulation.settings.block_size
        )
        self._simulation.hashing_ns += time.process_time_ns() - begin_ns
        task: Any = QueuedTask(request, asked.hashes)
        self.asked[request.request_id] = asked
        self.tasks.admit(task)
        self.tasks.enqueue(task)
        first = self._simulation.draw.choice(self._simulation.engines)
        self.offer(first)
        if task.placement.waits_for and request.request_id in self.asked:
            self.offer(self._simulation.engines[task.placement.waits_for.bit_length() - 1])
        if request.request_id in self.asked:
            self._simulation.has_queue[self] = None

    def offer(self, engine: _Engine) -> None:
        """The engine's loop asks for requests."""
        room, assignment = self.room(engine), self.assignments[engine.number]
        if room <= 0 or not self.tasks.num_queued:
            return
        begin_ns = time.process_time_ns()
        tasks = self.tasks.take(assignment, room, self.assignments, self._simulation.clock.now_ns)
        self._simulation.taking_ns += time.process_time_ns() - begin_ns
        if assignment.look_again_ns:
            self._simulation.clock.at(assignment.look_again_ns / 1e9, partial(self.offer, engine))
        for task in tasks:
            num_reports, num_sent = self._sent.get(engine.number, (0, 0))
            since = num_sent if num_reports == engine.num_reports else 0
            self._sent[engine.number] = engine.num_reports, since + 1
            engine.add(self.asked.pop(task.request_id))
        if not self.tasks.num_queued:
            self._simulation.has_queue.pop(self, None)


class Simulation:
    def __init__(self, settings: SimulationSettings) -> None:
        self.settings = settings
        self.clock = VirtualTime()
        self.draw = random.Random(settings.trace.seed)
        random.seed(settings.trace.seed)  # of the placement's samples
        self.index = PrefixIndex()
        self.engines = [_Engine(self, number) for number in range(settings.num_engines)]
        self.has_queue: dict[_Host, None] = {}
        self.hosts = [_Host(self) for _ in range(settings.num_hosts)]
        self._all = _Cache(settings.num_kv_blocks * settings.num_engines)
        self._started_s: dict[str, float] = {}
        self.num_requests = self.prompt_tokens = self.hit_tokens = self.all_hit_tokens = 0
        self.hashing_ns = self.taking_ns = self.applying_ns = self.changed_blocks = 0
        self.first_token_s: list[float] = []
        self.loads: list[tuple[float, float]] = []
        """Mean and largest load of the engines, each second."""
        self.peak_blocks = self.index_bytes = 0

    def run(self) -> None:
        for conversation in Trace(self.settings.trace).conversations():
            self.clock.at(conversation.start_s, partial(self._ask, conversation, 0, conversation.system_tokens))
        self.clock.after(1.0, self._look)
        self.clock.run()
        assert not self._started_s, f"{len(self._started_s)} requests were not answered"

    def _ask(self, conversation: Conversation, turn: int, text: tuple[int, ...]) -> None:
        now = conversation.turns[turn]
        self.num_requests += 1
        request = InferRequest(
            request_id=str(self.num_requests),
            prompt_token_ids=text + now.new_tokens,
            sampling=SamplingParams(max_tokens=now.output_tokens),
            tenant=conversation.tenant,
        )
        self._started_s[request.request_id] = self.clock.now_s
        host = self.draw.choice(self.hosts)
        host.submit(_Asked(host, conversation, turn, request, ()))

    # --- what engines do ----------------------------------------------------------------------------------------------

    def begun(self, engine: _Engine, asked: _Asked, num_found: int) -> None:
        self.prompt_tokens += len(asked.request.prompt_token_ids)
        self.hit_tokens += num_found
        self.all_hit_tokens += self._all.num_found(asked.hashes) * self.settings.block_size

    def first_token(self, engine: _Engine, asked: _Asked, num_computed: int) -> None:
        self._all.add(asked.hashes)
        request_id, host = asked.request.request_id, asked.host
        self.first_token_s.append(self.clock.now_s - self._started_s[request_id])
        host.placement.prompt_computed(num_computed, num_computed * self.settings.prompt_token_s)
        for _ in range(2):
            host.tasks.record_outputs(host.assignments[engine.number], [StepOutput(request_id, (1,))])

    def ended(self, engine: _Engine, asked: _Asked) -> Sequence[int]:
        request, turn = asked.request, asked.turn
        asked.host.tasks.pop(request.request_id)
        del self._started_s[request.request_id]
        text = request.prompt_token_ids + tuple(self.draw.randbytes(request.sampling.max_tokens))
        hashes = prefix_hashes(request.prefix_salt, text, self.settings.block_size)
        self._all.add(hashes)
        if turn + 1 < len(asked.conversation.turns):
            think_s = asked.conversation.turns[turn + 1].think_s
            self.clock.after(think_s, partial(self._ask, asked.conversation, turn + 1, text))
        return hashes

    def reported(self, engine: _Engine, changes: BlockChanges) -> None:
        self.changed_blocks += (len(changes.stored) + len(changes.removed)) // 8
        begin_ns = time.process_time_ns()
        self.index.apply(engine.bit, changes)
        self.applying_ns += time.process_time_ns() - begin_ns
        for host in tuple(self.has_queue):
            host.offer(engine)

    def _look(self) -> None:
        loads = [engine.load for engine in self.engines]
        self.loads.append((statistics.mean(loads), max(loads)))
        if len(self.index) > self.peak_blocks:
            self.peak_blocks = len(self.index)
        if (
            self._started_s
            or self.clock.now_s < self.settings.trace.num_conversations / self.settings.trace.conversations_per_s
        ):
            self.clock.after(1.0, self._look)

    # --- what came of it ----------------------------------------------------------------------------------------------

    def summary(self) -> str:
        """In Markdown."""
        settings, seconds = self.settings, self.clock.now_s
        held = sum(len(engine.cache) for engine in self.engines)
        size = index_bytes(self.index)
        reports = sum(engine.num_reports for engine in self.engines)
        steps = sum(len(engine.steps_with_blocks) for engine in self.engines)
        tokens = [engine.num_tokens for engine in self.engines]
        mean_tokens = statistics.mean(tokens)
        first_s = statistics.quantiles(self.first_token_s, n=100)
        busy = [(mean, most) for mean, most in self.loads if mean >= 0.5 * max(load for load, _ in self.loads)]
        rows = {
            "engines, hosts": f"{settings.num_engines}, {settings.num_hosts}",
            "requests, virtual seconds": f"{self.num_requests}, {seconds:.0f}",
            "prompt tokens found": f"{self.hit_tokens / self.prompt_tokens:.1%}",
            "of one cache over all": f"{self.hit_tokens / self.all_hit_tokens:.1%}",
            "first token, median and p99": f"{first_s[49] * 1e3:.0f} ms, {first_s[98] * 1e3:.0f} ms",
            "tokens of an engine, p99 and most / mean": f"{statistics.quantiles(tokens, n=100)[98] / mean_tokens:.2f}, "
            f"{max(tokens) / mean_tokens:.2f}",
            "live requests of an engine, mean and most": f"{statistics.mean(mean for mean, _ in busy):.1f}, "
            f"{max(most for _, most in busy)} of {settings.seats} seats",
            "index of one host": f"{len(self.index)} blocks that engines hold {held} times, {size / 1e6:.0f} MB, "
            f"{size / max(held, 1):.0f} bytes for each",
            f"messages to one host, every {settings.report_s * 1e3:.0f} ms at most": f"{reports / seconds:.0f}/s, "
            f"{self.changed_blocks / seconds:.0f} changed blocks/s, {8 * self.changed_blocks / seconds / 1e3:.0f} kB/s",
            "the same, one for each step that fills a block": f"{steps / seconds:.0f}/s",
            "one host's CPU for the index": f"{self.applying_ns / 1e9 / seconds:.1%} of a core, "
            f"{self.applying_ns / max(self.changed_blocks, 1) / 1e3:.2f} µs a block",
            "CPU of a request: hashes, choice": f"{self.hashing_ns / self.num_requests / 1e3:.0f} µs, "
            f"{self.taking_ns / self.num_requests / 1e3:.0f} µs",
        }
        return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def index_bytes(index: PrefixIndex) -> int:
    """Of its dictionary, and of the numbers in it, each object once."""
    holders = index._holders
    numbers = {id(mask): sys.getsizeof(mask) for mask in holders.values()}
    return sys.getsizeof(holders) + sum(numbers.values()) + sum(map(sys.getsizeof, holders))


def _nothing() -> None:
    pass
