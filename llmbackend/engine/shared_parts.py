"""What the engines of one config have in common, in the fork server that they are forked from.

For: engine/runners.py. Does not know: requests, processes' lives. Invariants: an engine that is forked finds what was
made here as it was, and writes to none of it; importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Protocol

from . import lean_imports
from .config import EngineConfig
from .gpu.parallel.followers import Followers, fork_followers
from .infer_request import ModelPrepared
from .step import Runner


class MakeRunner(Protocol):
    def __call__(self, config: EngineConfig, followers: Followers | None = None) -> Runner: ...


class SharedParts:
    def __init__(self, config: EngineConfig, make_runner: MakeRunner) -> None:
        """make_runner: loads the model, in an engine's process."""
        self._config = config
        self._make_runner = make_runner
        if config.model != "mock":
            _import_torch(config)

    def before_fork(self, is_whole: bool) -> None:
        """Makes what the next engine shares."""

    def in_own_process(self, is_whole: bool, lifeline_fd: int) -> Callable[[], Runner | ModelPrepared]:
        """Forks the other ranks of an engine over several devices, which close `lifeline_fd`."""
        config = self._config
        if config.tensor_parallel_size == 1:
            return partial(self._make_runner, config)
        followers = fork_followers(config.tensor_parallel_size, partial(_follow, config), [lifeline_fd])
        return partial(self._make_runner, config, followers)


def _import_torch(config: EngineConfig) -> None:
    """Imports what loading a checkpoint needs. An import that fails here fails again there, with its reason."""
    with contextlib.suppress(Exception):
        lean_imports.import_for(config.model)
        from . import model_runner  # noqa: F401


def _follow(config: EngineConfig, rank: int, link: Connection) -> None:
    from .gpu.parallel.start import follow

    logging.basicConfig(level=logging.INFO, format=f"rank {rank} %(process)d %(levelname)s %(message)s")
    follow(config, rank, link)
