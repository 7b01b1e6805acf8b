"""The runner that a config names: a model on its device, or the mock.

For: what drives an engine core; LlmManager hands this module to the engine's process, which imports it by its name.
Does not know: requests, processes' lives. Invariant: importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

from . import lean_imports
from .config import EngineConfig
from .fault_injection import Faults, with_faults
from .gpu.parallel.followers import Followers, fork_followers
from .step import Runner

logger = logging.getLogger(__name__)


def prepare(config: EngineConfig) -> None:
    """Imports what `make_runner` needs. An import that fails here fails again there, with its reason."""
    if config.model == "mock":
        return
    with contextlib.suppress(Exception):
        lean_imports.import_for(config.model)
        from . import model_runner  # noqa: F401


def in_own_process(config: EngineConfig, lifeline_fd: int) -> Callable[[], Runner]:
    """`make_runner` of this config, for a process of the engine's own that has no threads yet.

    Forks the other ranks of an engine over several devices, which close `lifeline_fd`.
    """
    if config.tensor_parallel_size == 1:
        return partial(make_runner, config)

    def follow(rank: int, link: Connection) -> None:
        from .gpu.parallel.start import follow

        logging.basicConfig(level=logging.INFO, format=f"rank {rank} %(process)d %(levelname)s %(message)s")
        follow(config, rank, link)

    return partial(make_runner, config, fork_followers(config.tensor_parallel_size, follow, [lifeline_fd]))


def make_runner(config: EngineConfig, followers: Followers | None = None) -> Runner:
    """followers: the other ranks, where tensor_parallel_size is not 1.

    Raises ValueError, OSError or RuntimeError with a text for the user.
    """
    runner = _make_runner(config) if followers is None else _make_parallel_runner(config, followers)
    return with_faults(runner, Faults(config.fault_directory)) if config.fault_directory else runner


def _make_parallel_runner(config: EngineConfig, followers: Followers) -> Runner:
    from .gpu.parallel.start import start_rank_0

    return start_rank_0(config, followers)


def _make_runner(config: EngineConfig) -> Runner:
    if config.model == "mock" and config.mock_steps_in_flight:
        from .mock.mock_model import OverlappingMockRunner

        return OverlappingMockRunner(config)
    if config.model == "mock":
        from .mock.mock_model import MockRunner

        return MockRunner(config)
    if config.device != "cpu" or config.transport != "process":
        return _make_model_runner(config)
    try:
        with lean_imports.without_compiler():  # for the whole process, which is the engine's own
            return _make_model_runner(config)
    except (AttributeError, ImportError):
        logger.warning("loading without torch's compiler failed; loading with it", exc_info=True)
    return _make_model_runner(config)


def _make_model_runner(config: EngineConfig) -> Runner:
    from .model_runner import make_model_runner

    return make_model_runner(config)
