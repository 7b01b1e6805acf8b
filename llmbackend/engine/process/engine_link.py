"""A host's end of its link to an engine, wherever that runs: what the supervisor needs of it.

For: the supervisor, which makes a new transport for each engine. Does not know: sockets, processes. Invariants: an
engine first reports how its load goes, and then one message for each step; whatever an engine does or fails to do, a
call returns within the time that the caller allows. One thread at a time uses a transport; `kill` is for any.

Hosts import this module before they start an engine, so it imports nothing that an engine's process needs.
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
    is_whole  whether the engine loads the checkpoint itself, with all that this takes; else it may share what its fork
              server holds, or prepare that and end
    meeting   where the other ranks of a split model come, which others start; None = they are forked
    """

    endpoint: str
    is_whole: bool = False
    meeting: RankMeeting | None = None


class Transport(ABC):
    """A wait ends early when the wake-up's descriptor, which its maker is given, becomes readable."""

    num_requests_of_others = 0
    """Requests of other hosts that the engine has, by its last report."""
    knows_vocabulary = False
    """Whether the engine has it from another host."""

    def __init__(self, config: EngineConfig, progress: Callable[[LoadProgress], None]) -> None:
        """progress: called while the engine loads."""
        self._config = config
        self._progress = progress

    @property
    def pid(self) -> int | None:
        """Of the engine's process; None where it has none of its own on this machine."""
        return None

    @abstractmethod
    def launch(self) -> None:
        """Starts the engine, which then loads its model, or connects to it; returns at once."""

    def receive_started(self, timeout_s: float | None) -> ModelInfo | ModelPrepared | None:
        """Blocks until the model is loaded or prepared; None after a wake-up, a report of the load's progress, or
        `timeout_s`.

        Raises EngineDeadError with the engine's reason when the model cannot be loaded.
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
        """Never blocks. Raises EngineDeadError when the engine has ended."""

    @abstractmethod
    def receive(self, timeout_s: float | None = None) -> list[StepResult]:
        """Blocks until there is a result, a wake-up, or `timeout_s` is over; all results so far, oldest first.

        Raises EngineDeadError when the engine has ended or sent a malformed message, after all results before that.
        """

    def kill(self) -> int:
        """Kills the engine's process with SIGKILL, and returns its id; 0 = it has none here, or has ended."""
        return 0

    @abstractmethod
    def close(self, *, force: bool = False) -> None:
        """Leaves the engine, with a message unless `force`, and frees everything; an engine that this host started
        ends. Never raises for a dead engine."""

    @abstractmethod
    def _receive_started(self, timeout_s: float | None) -> Sequence[EngineStarted]:
        """As `receive`, before the model is loaded."""

    def _show_progress(self, progress: LoadProgress | None) -> None:
        if progress is not None:
            self._progress(progress)
        parts = [part for part in self._config.model.split("/") if part]
        is_version = len(parts) > 1 and parts[-1].isdecimal()  # of a repository: the model's name is before it
        load_progress.show(id(self), parts[-2 if is_version else -1], progress)
