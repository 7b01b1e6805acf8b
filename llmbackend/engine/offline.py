"""An engine as a plain object: requests in, an iterator of step results out, on the caller's thread.

For: benchmarks, tests and programs that embed the engine. Does not know: queues, processes, callbacks.
Invariant: when `generate` ends, even early, the engine is idle: every row and block is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType

from .config import EngineConfig
from .engine_core import EngineCore, make_runner
from .infer_request import InferRequest, ModelInfo, StepResult


class Engine:
    """A loaded model and its core. `config.transport` does not matter here: it always runs in line."""

    def __init__(self, config: EngineConfig) -> None:
        self._core = EngineCore(config, make_runner(config))

    @property
    def info(self) -> ModelInfo:
        return self._core.info

    def generate(self, requests: Iterable[InferRequest]) -> Iterator[StepResult]:
        """Submits all requests at once and yields every step until the last one has ended.

        More than max_num_seqs are fine: they wait. Closing the iterator aborts what is not finished.
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

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
