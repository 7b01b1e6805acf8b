"""An engine as a plain object on the caller's thread, with the runner that a server's engine would have.

For benchmarks, tests and programs that embed the engine. Invariants: when `generate` ends, even early, the engine is
idle, with every row and block free; a model that is not in the weight cache is packed by a separate process, which
takes its libraries and memory with it.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable
from types import TracebackType

import msgspec

from .config import EngineConfig
from .engine_core import EngineCore
from .make_runner import SharedParts, make_runner, shared_parts
from .messages import InferRequest, ModelInfo, StepResult
from .step import Runner


class OfflineEngine:
    """A loaded model and its core, on the caller's thread regardless of `config.transport`."""

    def __init__(self, config: EngineConfig, make: Callable[[EngineConfig], Runner] = make_runner) -> None:
        runner = make(config)
        try:
            self._core = EngineCore(config, runner)
        except BaseException:
            runner.close()
            raise

    @property
    def info(self) -> ModelInfo:
        return self._core.info

    def generate(self, requests: Iterable[InferRequest]) -> Generator[StepResult, None, None]:
        """Submits all requests at once, and yields every step until the last request has ended.

        Requests beyond max_num_seqs wait. Closing the iterator aborts the remaining ones.
        """
        request_ids = []
        try:
            for request in requests:
                self._core.add(request)
                request_ids.append(request.request_id)
            while self._core.has_work:
                yield self._core.step()
        finally:
            for request_id in request_ids:
                self._core.abort(request_id)
            while self._core.has_work:
                self._core.step()

    def close(self) -> None:
        self._core.close()

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


logger = logging.getLogger(__name__)


def make_served_runner(config: EngineConfig) -> Runner:
    """Raises as `make_runner` does."""
    parts = _looked_up(config)
    if parts.is_unpacked:
        command = [sys.executable, "-m", __name__, msgspec.json.encode(config).decode()]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            logger.warning("the process that packs the model exited with %d", done.returncode)
        parts = _looked_up(config)
    if parts.is_unpacked:
        return make_runner(config)
    made = parts.in_own_process(is_whole=False)()
    assert not isinstance(made, msgspec.Struct), "it is packed"
    return made


def _looked_up(config: EngineConfig) -> SharedParts:
    parts = shared_parts(config)
    parts.before_fork(is_whole=False)
    return parts


def main() -> None:
    """Packs the model, in its own process."""
    parts = _looked_up(msgspec.json.decode(sys.argv[1], type=EngineConfig))
    if parts.is_unpacked:
        parts.in_own_process(is_whole=False)()
        parts.publish()


if __name__ == "__main__":
    main()
