"""The infer-task map as a state machine: engines die under requests, and every stream goes on or ends once.

The real host, adapter, managers and engine cores; the test moves their loops (hand_driven.py), so that every order of
what clients, loops and engines do can come up, and conservation is asked after every single move, without a race. A
stream that ends well is token for token what it is undisturbed, however often its engine died.
How to search with many more sequences: machine_settings.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, initialize, invariant, multiple, rule

from llmbackend.adapter.tasks.fault_isolation import BLAME_THRESHOLD
from llmbackend.adapter.tasks.infer_task import InferTask
from llmbackend.core.backend_api import ErrorCode
from llmbackend.engine.memory.prefix_cache import numbers
from tests.helpers.hand_driven import HandTurnedManager, World
from tests.helpers.llm_host import Call
from tests.helpers.llm_requests import MAX_MODEL_LEN, NUM_KINDS, answer, undisturbed
from tests.helpers.machine_settings import machine_settings

MAX_QUEUE_SIZE = 12
MAX_ENGINE_FAILURES = 5
GROUP = "instance_group [ {{ kind: KIND_CPU, count: {} }} ]"
QUEUE = f'parameters {{ key: "max_queue_size" value {{ string_value: "{MAX_QUEUE_SIZE}" }} }}'
LEVELS = "dynamic_batching { priority_levels: 2 default_priority_level: 2 }"

DEATHS_TO_BLAME = int(BLAME_THRESHOLD)
"""Of a request that runs isolated, by any signal but SIGKILL."""
CANCELLED = "Request was cancelled"
EXPIRED = "Request timeout expired"
FULL = "accepts no more requests: its queue holds"
NO_ENGINE = "times in a row"
DISOWNED = "has no engine that survives"
BLAMED = f"the engine died {DEATHS_TO_BLAME} times while running it"


@dataclass(eq=False)
class Client:
    """One request, from its sender's side. `may_fail`: texts of the errors that it may end with."""

    kind: int
    call: Call
    task: InferTask | None
    is_poison: bool
    may_fail: set[str] = field(default_factory=set)
    must_end_at: int | None = None
    """After its cancel or its deadline: the round by which it has ended, while no engine dies."""


class TaskMapMachine(RuleBasedStateMachine):
    clients = Bundle("clients")

    @initialize(
        num_instances=st.sampled_from((1, 2)),
        levels=st.sampled_from(("", LEVELS)),
        max_num_seqs=st.sampled_from((4, 2, 1)),
        num_kv_blocks=st.sampled_from((64, 20)),
    )
    def make(self, num_instances: int, levels: str, max_num_seqs: int, num_kv_blocks: int) -> None:
        self.undisturbed = undisturbed()
        self.world = World(
            GROUP.format(num_instances) + QUEUE + levels,
            max_model_len=MAX_MODEL_LEN,
            block_size=4,
            num_kv_blocks=num_kv_blocks,
            max_num_seqs=max_num_seqs,
            max_engine_failures=MAX_ENGINE_FAILURES,
        )
        self.has_levels = bool(levels)
        self.all: list[Client] = []
        self.num_rounds = 0
        self.num_kills = 0
        self.num_load_failures = 0

    # --- what clients do ----------------------------------------------------------------------------------------------

    @rule(target=clients, kinds=st.lists(st.integers(0, NUM_KINDS - 1), min_size=1, max_size=5))
    def send(self, kinds: list[int]) -> MultipleResults[Client]:
        return multiple(*(self._send(kind) for kind in kinds))

    @rule(target=clients, kind=st.integers(0, NUM_KINDS - 1))
    def send_urgent(self, kind: int) -> Client:
        return self._send(kind, priority=1 if self.has_levels else 0)

    @rule(target=clients, kind=st.integers(0, NUM_KINDS - 1))
    def send_poison(self, kind: int) -> Client:
        return self._send(kind, is_poison=True)

    @rule(client=clients)
    def cancel(self, client: Client) -> None:
        client.may_fail.add(CANCELLED)
        self._give_up(client)
        client.call.handle.cancel()

    @rule(client=clients)
    def expire(self, client: Client) -> None:
        """The deadline of a request is over."""
        if client.task is not None:
            client.may_fail.add(EXPIRED)
            self._give_up(client)
            self.world.state._expire(client.task.request_id)

    # --- what loops and engines do ------------------------------------------------------------------------------------

    @rule(index=st.integers(0, 1))
    def turn(self, index: int) -> None:
        self._manager(index).turn()

    @rule(index=st.integers(0, 1))
    def step(self, index: int) -> None:
        if transport := self._manager(index).transport:
            transport.step()

    @rule(count=st.integers(1, 8))
    def go_on(self, count: int) -> None:
        for _ in range(count):
            self._round()

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    @rule(index=st.integers(0, 1), drop_results=st.booleans())
    def kill(self, index: int, drop_results: bool) -> None:
        if transport := self._manager(index).transport:
            transport.kill(drop_results)
            self.num_kills += 1

    @rule(count=st.integers(1, 4))
    def fail_loads(self, count: int) -> None:
        """The next engines die while they load; when that is too often in a row, the engine is given up."""
        self.world.load_failures_left = count
        self.num_load_failures += count

    # --- conservation -------------------------------------------------------------------------------------------------

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "world"):
            return
        tasks = self.world.state.tasks
        open_ids = {client.task.request_id for client in self.all if client.task and not client.call.num_finals}
        assert set(tasks._tasks) == open_ids, "the map holds a request that is over, or lost one that is not"
        queued = {task.request_id for task in tasks._queue}
        assert len(tasks._queue) == len(queued)
        assert queued | set(tasks._engine_of) == open_ids and not queued & set(tasks._engine_of)
        for manager in self.world.managers:
            held = {one for one in manager._live if one in open_ids}
            assert all(tasks._engine_of[one].wake == manager.wake for one in held)
        assert set(tasks._engine_of) <= {one for manager in self.world.managers for one in manager._live}
        for client in self.all:
            assert client.call.num_finals <= 1
            if client.must_end_at is not None and self._moment() >= client.must_end_at:
                assert client.call.num_finals, "a request that was given up goes on"

    def teardown(self) -> None:
        """With sound engines everything ends, and nothing is left."""
        if not hasattr(self, "world"):
            return
        try:
            self._come_to_rest()
            for client in self.all:
                self._judge(client)
            self._expect_nothing_left()
        finally:
            self.world.close()

    def _come_to_rest(self) -> None:
        self.world.load_failures_left = 0
        for _ in range(MAX_MODEL_LEN * (len(self.all) + 2)):
            if all(client.call.num_finals for client in self.all):
                break
            self._round()
            self.conserved()
        for _ in range(8):  # the engines hear of what was cancelled last, and come back
            self._round()
        assert all(client.call.num_finals == 1 for client in self.all), "a request does not come to an end"

    def _expect_nothing_left(self) -> None:
        tasks = self.world.state.tasks
        engines = self.world.state.assignments()
        assert tasks.leaked_resources(engines) == ""
        assert not any(one.pending_stops or one.stopped_ids or len(one.isolation) for one in engines)
        for manager in self.world.managers:
            assert not manager._live
            assert manager.transport is not None and not manager.transport.core.has_work
        self._expect_exact_index()
        assert self.world.server.check() == []
        assert self.world.server.model_is_ready("mock_llm")
        assert self.world.host.metric("llmbackend:invariant_breaches_total") == 0

    def _expect_exact_index(self) -> None:
        """Of several engines the host knows what each has, whatever they died of; nobody computes any more."""
        index = self.world.state.prefixes.placement.index
        assert not index._computing and not index._computed_for
        for engine, manager in zip(self.world.state._engines, self.world.managers, strict=True):
            assert engine.manager is manager and manager.transport is not None
            journal = manager.transport.core.prefixes._journal
            assert (journal is None) == (len(self.world.managers) == 1)
            found = () if journal is None else journal._found.values()
            assert index.blocks_of(engine.assignment.bit) == set(numbers(b"".join([block.hash for block in found])))

    # --- moves --------------------------------------------------------------------------------------------------------

    def _manager(self, index: int) -> HandTurnedManager:
        return self.world.managers[index % len(self.world.managers)]

    def _give_up(self, client: Client) -> None:
        if client.must_end_at is None:
            client.must_end_at = self._moment() + 2

    def _moment(self) -> int:
        """In rounds, less two for each death: the request may have changed hands, and the news follow it."""
        return self.num_rounds - 2 * sum(manager.num_deaths for manager in self.world.managers)

    def _round(self) -> None:
        """Every loop turns and every engine steps: what was asked for before has come about after two of these."""
        self.num_rounds += 1
        for manager in self.world.managers:
            manager.turn()
            if transport := manager.transport:
                transport.step()

    def _send(self, kind: int, is_poison: bool = False, priority: int = 0) -> Client:
        call, task = self.world.start(kind, poison=is_poison, priority=priority)
        client = Client(kind, call, task, is_poison)
        self.all.append(client)
        return client

    def _judge(self, client: Client) -> None:
        assert client.call.num_finals == 1
        expected, error, got = self.undisturbed[client.kind], client.call.error, answer(client.call)
        if client.is_poison:
            assert error is not None and got.token_ids == ()
        elif error is None:
            assert got == expected, "a token was lost, repeated or changed"
        else:
            assert got.is_beginning_of(expected)
        if error is not None:
            blamed = client.may_fail | self._excuses(client)
            assert any(text in error.message for text in blamed), f"unexpected error: {error.message}"
            assert (error.code is ErrorCode.CANCELLED) == (CANCELLED in error.message)

    def _excuses(self, client: Client) -> set[str]:
        """Errors that may come without a fault or a cancel."""
        excuses = {FULL}
        if client.is_poison or self.num_kills >= DEATHS_TO_BLAME:
            excuses.add(BLAMED)
        num_poison = sum(one.is_poison for one in self.all)
        # A poisonous request ends the engine once for all, then alone until it is blamed; the first failure is reset.
        num_by_poison = (DEATHS_TO_BLAME + 1) * max(num_poison - 1, 1) if num_poison else 0
        if self.num_kills + self.num_load_failures + num_by_poison >= MAX_ENGINE_FAILURES:
            excuses |= {NO_ENGINE, DISOWNED}
        return excuses


TaskMapMachine.TestCase.settings = machine_settings(examples=40, steps=30)
TestTaskMapMachine = TaskMapMachine.TestCase


def test_two_poisonous_requests_fail_alone() -> None:
    machine = TaskMapMachine()
    machine.make(num_instances=1, levels="", max_num_seqs=4, num_kv_blocks=64)
    clients = [machine._send(kind, is_poison=kind < 2) for kind in range(4)]
    machine.teardown()
    errors = [client.call.error for client in clients]
    assert [BLAMED in error.message for error in errors[:2] if error is not None] == [True, True]
    assert errors[2:] == [None, None]
