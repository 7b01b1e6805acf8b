"""Mock runners whose engines need another process to prepare the model first.

Used by tests of supervisors and fork servers, which give this module's name to an engine's process. What is prepared is
a file in the config's `fault_directory`, `prepared`; its absence makes the next process prepare it. Files that begin
with `preparing-` make a process that prepares fail once, and `fork-server-hang` its fork server; `vanish` takes away
what it made, each time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.messages import ModelPrepared
from llmbackend.engine.rank_order import RankMeeting
from llmbackend.engine.step import Runner
from llmbackend.testing.faults import Faults

__all__ = ["make_runner", "shared_parts"]


class PreparedParts:
    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._directory = Path(config.fault_directory)

    def before_fork(self, is_whole: bool) -> None:
        if Faults(str(self._directory)).take("fork-server-hang"):
            time.sleep(86400)
        self._is_prepared = (self._directory / "prepared").exists()
        (self._directory / "forks").open("a").write("whole\n" if is_whole else f"{self._is_prepared}\n")

    def in_own_process(
        self, is_whole: bool, lifeline_fd: int, meeting: RankMeeting | None = None
    ) -> Callable[[], Runner | ModelPrepared]:
        if is_whole or self._is_prepared:
            return partial(make_runner, self._config)
        return self._prepare

    def _prepare(self) -> ModelPrepared:
        faults = Faults(str(self._directory))
        if faults.take("preparing-killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if faults.take("preparing-hang"):
            time.sleep(86400)
        if faults.take("preparing-error"):
            raise ValueError("the checkpoint is broken")
        if not (self._directory / "vanish").exists():
            (self._directory / "prepared").touch()
        return ModelPrepared()


def shared_parts(config: EngineConfig) -> PreparedParts:
    return PreparedParts(config)
