"""A host's end of its link to an engine, wherever that runs: the interface that the supervisor uses.

The supervisor makes a new transport for each engine. Invariants: an engine first reports how its load goes, then sends
one message per step; whatever an engine does or fails to do, each call returns within the time allowed by the caller.
One thread at a time uses a transport; `kill` may be called from any.

Hosts import this module before they start an engine, so it imports nothing that only an engine's process needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import msgspec

from .. import load_progress
from ..config import EngineConfig
from ..errors import EngineDeadError
from ..load_progress import LoadProgress
from ..messages import EngineInput, EngineStarted, ModelInfo, ModelPrepared, StepResult
from ..rank_order import RankMeeting


class EngineOrder(msgspec.Struct, frozen=True):
    """endpoint  of the host's socket
    is_whole  whether the engine loads the whole checkpoint itself; otherwise it may share what its fork server has
              loaded, or prepare that and exit
    meeting   where the other ranks of a split model connect if they are started elsewhere; None = they are forked"""

    endpoint: str
    is_whole: bool = False
    meeting: RankMeeting | None = None


class Transport(ABC):
    """Each wait also ends when the wake-up's descriptor, `wake_fd` of the constructors, becomes readable."""

    num_requests_of_others = 0
    """Requests of other hosts in the engine, by its last report."""
    knows_vocabulary = False
    """Whether another host has sent the engine the vocabulary."""

    def __init__(self, config: EngineConfig, progress: Callable[[LoadProgress], None]) -> None:
        """progress: called while the engine loads."""
        self._config = config
        self._progress = progress

    @property
    def pid(self) -> int | None:
        """Of the engine's process; None if it has no process of its own on this machine."""
        return None

    @abstractmethod
    def launch(self) -> None:
        """Starts the engine, which then loads its model, or connects to it; returns at once."""

    def receive_started(self, timeout_s: float | None) -> ModelInfo | ModelPrepared | None:
        """Blocks until the model is loaded or prepared; None after a wake-up, a progress report, or `timeout_s`.

        Raises EngineDeadError with the engine's reason if the model cannot be loaded.
        """
        started = None
        for message in self._receive_started(timeout_s):
            if message.progress is None:
                started = message
            else:
                self._show_progress(message.progress)
        if started is None:
            return None
        if started.prepared is not None:
            return started.prepared
        self._show_progress(None)
        if started.info is None:
            raise EngineDeadError(started.error, "shortage" if started.is_shortage else "load")
        return started.info

    @abstractmethod
    def send(self, message: EngineInput) -> None:
        """Never blocks. Raises EngineDeadError if the engine has ended."""

    @abstractmethod
    def receive(self, timeout_s: float | None = None) -> list[StepResult]:
        """Blocks until there is a result, a wake-up, or `timeout_s` has passed; returns all results so far, oldest
        first.

        Raises EngineDeadError if the engine has ended or sent a malformed message, but only after all earlier results
        were returned.
        """

    def kill(self) -> int:
        """Sends SIGKILL to the engine's process and returns its pid; 0 = it has none here, or has ended."""
        return 0

    @abstractmethod
    def close(self, *, force: bool = False) -> None:
        """Leaves the engine, with a message unless `force`, and frees everything; an engine started by this host ends.
        Never raises for a dead engine."""

    @abstractmethod
    def _receive_started(self, timeout_s: float | None) -> Sequence[EngineStarted]:
        """As `receive`, before the model is loaded."""

    def _show_progress(self, progress: LoadProgress | None) -> None:
        if progress is not None:
            self._progress(progress)
        parts = [part for part in self._config.model.split("/") if part]
        is_version = len(parts) > 1 and parts[-1].isdecimal()  # of a repository: the model's name precedes it
        load_progress.show(id(self), parts[-2 if is_version else -1], progress)
