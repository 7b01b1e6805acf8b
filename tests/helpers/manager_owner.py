"""Plays the role of ModelState for an LlmManager, with a mock engine: a queue, a map of outcomes, a list of control
signals.

Used by tests of the manager's loop and of its engines. Independent of where engines run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.errors import EngineDeadError
from llmbackend.engine.llm_manager import LlmManager, ManagerCallbacks, Operation
from llmbackend.engine.messages import BlockChanges, EngineStats, InferRequest, StepOutput, Vocabulary
from tests.helpers.mock_engine import Outcome


class Owner:
    """What ModelState is to a manager: a queue, a map of outcomes, a list of control signals."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queue: list[InferRequest] = []
        self.controls: list[tuple[str, Operation]] = []
        self.outcomes: dict[str, Outcome] = {}
        self.refusals: dict[str, str] = {}
        self.stats: list[EngineStats] = []
        self.rooms: list[int] = []
        self.deaths: list[tuple[tuple[str, ...], EngineDeadError]] = []
        self.submitted: dict[str, InferRequest] = {}
        self.num_vocabularies = 0
        self.blocks: set[bytes] = set()
        """That the engine has, if the manager follows them."""
        self.manager: LlmManager

    def start(self, **arguments: Any) -> Owner:
        stall_timeout_s = arguments.pop("stall_timeout_s", 60.0)
        return self.start_with(EngineConfig(model="mock", **arguments), stall_timeout_s)

    def start_with(self, config: EngineConfig, stall_timeout_s: float = 60.0) -> Owner:
        callbacks = ManagerCallbacks(
            get_requests=self.get_requests,
            send_responses=self.send_responses,
            control_signal=self.control_signal,
            stats=self.stats.append,
            status_response=self.refusals.__setitem__,
            engine_lost=self.engine_lost,
            vocabulary=self.vocabulary,
            blocks_changed=self.blocks_changed,
        )
        self.manager = LlmManager(config, callbacks, stall_timeout_s=stall_timeout_s)
        self.manager.start()
        return self

    def blocks_changed(self, changes: BlockChanges) -> None:
        known = set() if changes.is_snapshot else self.blocks
        self.blocks = (known | set(_hashes(changes.stored))) - set(_hashes(changes.removed))

    def vocabulary(self) -> Vocabulary:
        self.num_vocabularies += 1
        return Vocabulary(token_bytes=tuple(bytes((byte,)) for byte in range(256)))

    def get_requests(self, room: int) -> Sequence[InferRequest]:
        self.rooms.append(room)
        with self.changed:
            taken, self.queue = self.queue[:room], self.queue[room:]
        return taken

    def send_responses(self, outputs: Sequence[StepOutput]) -> None:
        with self.changed:
            for output in outputs:
                self.outcomes.setdefault(output.request_id, Outcome()).add(output)
            self.changed.notify_all()

    def engine_lost(self, request_ids: Sequence[str], error: EngineDeadError) -> None:
        """Every request goes on where it was: back to the front of the queue, with the tokens so far."""
        with self.changed:
            self.deaths.append((tuple(request_ids), error))
            self.queue[:0] = [
                msgspec.structs.replace(
                    self.submitted[name], output_token_ids=tuple(self.outcomes.get(name, Outcome()).token_ids)
                )
                for name in request_ids
            ]
            self.changed.notify_all()

    def control_signal(self) -> Sequence[tuple[str, Operation]]:
        taken, self.controls = self.controls, []
        return taken

    def submit(self, *requests: InferRequest) -> None:
        with self.changed:
            self.queue.extend(requests)
            self.submitted.update({request.request_id: request for request in requests})
        self.manager.wake()

    def control(self, request_id: str, operation: Operation = Operation.STOP) -> None:
        self.controls.append((request_id, operation))
        self.manager.wake()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=20), "it did not come about"

    def wait_for_end(self, *request_ids: str) -> None:
        self.wait_for(lambda: all(self.reason(request_id) for request_id in request_ids))

    def wait_for_tokens(self, request_id: str) -> None:
        self.wait_for(lambda: bool(self.outcomes.get(request_id, Outcome()).token_ids))

    def reason(self, request_id: str) -> str | None:
        return self.outcomes.get(request_id, Outcome()).finish_reason


def _hashes(joined: bytes) -> list[bytes]:
    return [joined[start : start + 8] for start in range(0, len(joined), 8)]
