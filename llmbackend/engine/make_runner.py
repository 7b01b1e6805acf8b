"""Makes the runner that a config asks for, and what engines with the same config share in their fork server.

Used by callers of an engine core; LlmManager passes this module to the engine's process, which imports it by name.
Independent of requests and process lifetimes. A model that runs as a native program is packed once, by the first
engine's process, which then exits (`ModelPrepared`); the fork server reads the packed weights into memory that all
later engines share. Any other model is loaded by each engine, which shares only imports. Invariants: importing this
module imports neither torch nor transformers; a forked engine finds everything made here unchanged and writes to none
of it; a fork server imports torch only if its engines compute with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from llmbackend.testing.faults import Faults, with_faults

from .config import EngineConfig
from .cpu_threads import engine_threads
from .load_progress import note, part, report
from .messages import ModelPrepared
from .model import lean_imports
from .step import Runner

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from .cpu.packed_decoder import PackedModel, PackingPlace
    from .gpu.parallel.followers import Followers
    from .rank_order import RankMeeting
    from .weight_cache.cache import Draft

logger = logging.getLogger(__name__)


class SharedParts:
    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._packed: PackedModel | None = None
        self._draft: Draft | None = None
        """Where the next process that packs the model puts it; kept for the process that publishes it."""
        self._writers = -1
        """Locked by the process that writes the draft."""
        self._why_whole = self._prepare_imports()

    def before_fork(self, is_whole: bool) -> None:
        """Reads the packed weights, or allocates space for them, or imports what loading a checkpoint needs. A failure
        recurs in the engine, or makes it load the checkpoint."""
        if self._config.model == "mock":
            return
        if is_whole:
            _import_torch(self._config)
        elif not self._why_whole and self._packed is None:
            try:
                self._packed = self._find()
                self._check_adapters()
            except (OSError, MemoryError) as error:
                logger.warning("packed weights cannot be shared yet: %s", error)

    def in_own_process(
        self, is_whole: bool, lifeline_fd: int | None = None, meeting: RankMeeting | None = None
    ) -> Callable[[], Runner | ModelPrepared]:
        """Forks the other ranks of a split model, which close `lifeline_fd`; with a meeting, they are started elsewhere
        and connect to it."""
        config = self._config
        if config.num_ranks > 1:
            return partial(make_runner, config, meeting or _fork_others(config, lifeline_fd))
        if is_whole or self._why_whole:
            return partial(make_runner, config)
        if self._packed is not None:
            return partial(self._run, self._packed)
        return partial(make_runner, config) if self._draft is None else partial(self._pack, self._draft)

    @property
    def is_unpacked(self) -> bool:
        """Whether engines run packed weights but none exist yet."""
        return not self._why_whole and self._packed is None

    def publish(self) -> None:
        """In the process that packed the model: moves it into the cache; returns once it is on disk."""
        if self._draft is not None:
            self._draft.publish()

    def _prepare_imports(self) -> str:
        """Imports what all engines of this config need. Returns why they load the checkpoint themselves, or ""."""
        if self._config.model == "mock":
            return "it is the mock model"
        from .cpu.native_runner import why_modules

        if reason := why_modules(self._config):
            _import_torch(self._config)
            return reason
        from .cpu import native_runner  # noqa: F401
        from .kernels import library
        from .weight_cache import cache  # noqa: F401

        return "" if library.load() is not None else "there are no native kernels"

    def _find(self) -> PackedModel | None:
        """The packed model; None = not packed yet, but there is space for it. Raises OSError or MemoryError."""
        from .kernels import library
        from .weight_cache.cache import CachedModel

        memory, num_threads = library.load(), engine_threads(self._config)
        assert memory is not None
        with part("read packed weights"):
            packed = None if self._draft is None else self._draft.read(memory.memory, num_threads)
        if packed is not None:
            return packed
        with part("find packed weights"):
            cached = CachedModel(self._config)
        try:
            with part("read packed weights"):
                packed = cached.read(memory.memory, num_threads)
            if packed is not None:
                note(f"weights from {cached.directory}")
                return packed
            note(f"weights packed: {cached.why_not or f'none of this model were in {cached.directory}'}")
            if self._draft is None:
                self._draft = cached.draft()
                self._writers = os.memfd_create("llmbackend-writers", os.MFD_CLOEXEC)
        finally:
            cached.close()
        return None

    def _check_adapters(self) -> None:
        """Makes engines load the checkpoint if the packed model cannot take the enabled adapters."""
        from .cpu.native_runner import why_no_adapters

        reason = "" if self._packed is None else why_no_adapters(self._config, self._packed.decoder)
        if reason:
            self._packed, self._why_whole = None, reason
            _import_torch(self._config)

    def _run(self, packed: PackedModel) -> Runner:
        from .cpu.native_runner import NativeRunner

        with part("program"):
            runner = self._with_faults(NativeRunner(self._config, packed))
        if self._draft is not None:  # the disk may take seconds
            threading.Thread(target=self._draft.publish, name="publish-weights", daemon=True).start()
        return runner

    def _pack(self, draft: Draft) -> Runner | ModelPrepared:
        """Packs the model. Returns its runner instead if it cannot be packed."""
        from .cpu.packed_decoder import PackedModel

        with self._sole_writer():
            if draft.is_written():
                return ModelPrepared()
            report("importing torch")
            draft.prefault()
            with part("import torch"):
                _import_torch(self._config)
            made = pack_or_run(self._config, draft)
            if not isinstance(made, PackedModel):
                draft.abandon()
                return self._with_faults(made)
            report("writing packed weights")
            with part("write packed weights"):
                draft.write(made, engine_threads(self._config))
        return ModelPrepared()

    @contextlib.contextmanager
    def _sole_writer(self) -> Iterator[None]:
        """Lets one process at a time write; the lock is released when the process ends."""
        descriptor = os.open(f"/proc/self/fd/{self._writers}", os.O_RDWR | os.O_CLOEXEC)  # a lock of its own
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report("waiting for another process that packs the model")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _with_faults(self, runner: Runner) -> Runner:
        directory = self._config.fault_directory
        return with_faults(runner, Faults(directory)) if directory else runner


def _import_torch(config: EngineConfig) -> None:
    """Imports what loading a checkpoint needs. A failing import fails again during the load, with its reason."""
    with contextlib.suppress(Exception):
        lean_imports.import_for(config.model)
        from .model import module_runner  # noqa: F401


def _fork_others(config: EngineConfig, lifeline_fd: int | None = None) -> Followers:
    """The other ranks of a split model, as children of this process, which must not have threads."""
    from .gpu.parallel.followers import fork_followers

    not_theirs = () if lifeline_fd is None else (lifeline_fd,)
    return fork_followers(config.num_ranks, partial(_follow, config), not_theirs)


def _follow(config: EngineConfig, rank: int, link: Connection) -> None:
    from .gpu.parallel.follow import follow

    logging.basicConfig(level=logging.INFO, format=f"rank {rank} %(process)d %(levelname)s %(message)s")
    follow(config, rank, link)


T = TypeVar("T")


def shared_parts(config: EngineConfig) -> SharedParts:
    """For a fork server: what the engines of this config have in common."""
    return SharedParts(config)


def make_runner(config: EngineConfig, others: Followers | RankMeeting | None = None) -> Runner:
    """others: the other ranks of a split model, or where they connect; None = they are forked here.

    Raises ValueError, OSError or RuntimeError with a message for the user.
    """
    if config.num_ranks > 1:
        others = others or _fork_others(config)
    if others is None:
        runner = _make_runner(config)
    else:
        from .gpu.parallel.parallel_runner import start_rank_0

        runner = start_rank_0(config, others)
    return with_faults(runner, Faults(config.fault_directory)) if config.fault_directory else runner


def _make_runner(config: EngineConfig) -> Runner:
    if config.model == "mock" and config.mock_steps_in_flight:
        from llmbackend.testing.overlapping_mock import OverlappingMockRunner

        return OverlappingMockRunner(config)
    if config.model == "mock":
        from llmbackend.testing.mock_model import MockRunner

        return MockRunner(config)
    from .model.module_runner import make_model_runner

    return _with_lean_imports(config, make_model_runner)


def pack_or_run(config: EngineConfig, place: PackingPlace | None = None) -> PackedModel | Runner:
    """A checkpoint on CPU: packed for native runners, in `place`, or its runner if it must run as modules. Raises as
    `make_runner` does."""
    from .model.module_runner import pack_or_run

    return _with_lean_imports(config, partial(pack_or_run, place=place))


def _with_lean_imports(config: EngineConfig, load: Callable[[EngineConfig], T]) -> T:
    """Runs `load`; without torch's compiler if this process belongs to a CPU engine."""
    if config.device != "cpu" or config.transport != "process":
        return load(config)
    try:
        with lean_imports.without_compiler():  # for the whole process, which belongs to the engine
            return load(config)
    except (AttributeError, ImportError):
        logger.warning("loading without torch's compiler failed; loading with it", exc_info=True)
    return load(config)
