"""The runner that a config names: a model on its device, or the mock.

For: what drives an engine core; LlmManager hands this module to the engine's process, which imports it by its name.
Does not know: requests, processes' lives. Invariant: importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from . import lean_imports
from .config import EngineConfig
from .fault_injection import Faults, with_faults
from .shared_parts import SharedParts
from .step import Runner

if TYPE_CHECKING:
    from .cpu.packed_decoder import PackedModel, PackingPlace
    from .gpu.parallel.followers import Followers
    from .rank_order import RankMeeting

logger = logging.getLogger(__name__)

T = TypeVar("T")


def shared_parts(config: EngineConfig) -> SharedParts:
    """In a fork server: what the engines of this config have in common."""
    return SharedParts(config, make_runner, pack_or_run)


def make_runner(config: EngineConfig, others: Followers | RankMeeting | None = None) -> Runner:
    """others: the other ranks of a model that is split, or where they come to.

    Raises ValueError, OSError or RuntimeError with a text for the user.
    """
    runner = _make_runner(config) if others is None else _make_parallel_runner(config, others)
    return with_faults(runner, Faults(config.fault_directory)) if config.fault_directory else runner


def _make_parallel_runner(config: EngineConfig, others: Followers | RankMeeting) -> Runner:
    from .gpu.parallel.start import start_rank_0

    return start_rank_0(config, others)


def _make_runner(config: EngineConfig) -> Runner:
    if config.model == "mock" and config.mock_steps_in_flight:
        from .mock.overlapping_mock import OverlappingMockRunner

        return OverlappingMockRunner(config)
    if config.model == "mock":
        from .mock.mock_model import MockRunner

        return MockRunner(config)
    from .model_runner import make_model_runner

    return _leanly(config, make_model_runner)


def pack_or_run(config: EngineConfig, place: PackingPlace | None = None) -> PackedModel | Runner:
    """A checkpoint on CPU: packed for native runners, in `place`, or its runner where it must run as modules.
    Raises as `make_runner`."""
    from .model_runner import pack_or_run

    return _leanly(config, partial(pack_or_run, place=place))


def _leanly(config: EngineConfig, load: Callable[[EngineConfig], T]) -> T:
    """`load`, in a CPU engine's own process without torch's compiler."""
    if config.device != "cpu" or config.transport != "process":
        return load(config)
    try:
        with lean_imports.without_compiler():  # for the whole process, which is the engine's own
            return load(config)
    except (AttributeError, ImportError):
        logger.warning("loading without torch's compiler failed; loading with it", exc_info=True)
    return load(config)
