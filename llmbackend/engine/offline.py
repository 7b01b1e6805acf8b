"""An engine as a plain object: requests in, an iterator of step results out, on the caller's thread.

For: benchmarks, tests and programs that embed the engine. Does not know: queues, processes, callbacks. Invariant: when
`generate` ends, even early, the engine is idle: every row and block is free.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from types import TracebackType

from .config import EngineConfig
from .engine_core import EngineCore
from .infer_request import InferRequest, ModelInfo, StepResult
from .runners import make_runner
from .step import Runner


class OfflineEngine:
    """A loaded model and its core, on the caller's thread whatever `config.transport` is."""

    def __init__(self, config: EngineConfig, make: Callable[[EngineConfig], Runner] = make_runner) -> None:
        self._core = EngineCore(config, make(config))

    @property
    def info(self) -> ModelInfo:
        return self._core.info

    def generate(self, requests: Iterable[InferRequest]) -> Generator[StepResult, None, None]:
        """Submits all requests at once and yields every step until the last request has ended.

        More than max_num_seqs requests wait for each other. Closing the iterator aborts those that are left.
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
