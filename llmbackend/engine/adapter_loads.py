"""Loads and removes LoRA adapters while an engine runs; a thread of its own reads their files.

For: the engine core, whose thread owns it. Does not know: what an adapter is, or who wants it. Invariants: each load
ends with one result; an adapter is removed only when no live request uses it; the engine's thread never waits for a
file: a request whose adapter is still being read is held here until it has been read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Protocol, runtime_checkable

from .messages import AdapterLoad, AdapterResult, InferRequest
from .step import Runner

logger = logging.getLogger(__name__)


class Adapters(Protocol):
    """The adapters of one model; see model/lora.py and gpu/lora.py."""

    def read(self, name: str, path: str) -> Any: ...
    def add(self, name: str, matrices: Any) -> None: ...
    def remove(self, name: str) -> None: ...


@runtime_checkable
class AdaptingRunner(Protocol):
    """A runner whose model takes adapters, unless they are None."""

    @property
    def adapters(self) -> Adapters | None: ...


def refuse_adapter(name: str) -> None:
    """For an engine without adapters. Raises ValueError for any name but ""."""
    if name:
        raise ValueError(f"'lora_name' is '{name}', but this engine has no LoRA adapters")


def number_of_adapter(name: str, numbers: Mapping[str, int], none: int) -> int:
    """none: the number of "", the model without an adapter. Raises ValueError for an adapter that is not loaded."""
    if name and name not in numbers:
        raise ValueError(f"'lora_name' is '{name}', expected one of: {', '.join(numbers)}")
    return numbers.get(name, none)


class AdapterLoads:
    def __init__(self, runner: Runner, is_used: Callable[[str], bool]) -> None:
        """is_used: whether a live request uses the adapter"""
        self._adapters = runner.adapters if isinstance(runner, AdaptingRunner) else None
        self._is_used = is_used
        self._thread: ThreadPoolExecutor | None = None
        self._loading: dict[str, Future[Any]] = {}
        self._results: list[AdapterResult] = []
        self._unwanted: set[str] = set()
        self._held: dict[str, InferRequest] = {}
        """Requests by id, in order of arrival."""

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    @property
    def has_work(self) -> bool:
        return bool(self._loading or self._results)

    def load(self, wanted: AdapterLoad) -> None:
        if self._adapters is None:
            self._results.append(AdapterResult(wanted.name, "this engine's model does not accept LoRA adapters"))
            return
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="lora-files")
        self._loading[wanted.name] = self._thread.submit(partial(self._adapters.read, wanted.name, wanted.path))

    def drop(self, name: str) -> None:
        """Removes the adapter as soon as no request uses it."""
        self._unwanted.add(name)
        self._drop_unused()

    def holds(self, request: InferRequest) -> bool:
        """True = the request is held, because its adapter is still being read; `take_results` hands it back."""
        if request.lora_name not in self._loading:
            return False
        self._held[request.request_id] = request
        return True

    def is_held(self, request_id: str) -> bool:
        return request_id in self._held

    def forget(self, request_id: str) -> bool:
        """Ends a request that is held; False when it is not."""
        return self._held.pop(request_id, None) is not None

    def wait(self, timeout_s: float) -> None:
        """Waits until an adapter has been read."""
        wait(self._loading.values(), timeout_s, "FIRST_COMPLETED")

    def take_results(self, add: Callable[[InferRequest], None]) -> tuple[AdapterResult, ...]:
        """Results of the loads that have ended; their adapters can be used from now on. add: called with each request
        that was held for them, also when the load has failed."""
        for name in [name for name, future in self._loading.items() if future.done()]:
            self._take(name)
        ready = [request for request in self._held.values() if request.lora_name not in self._loading]
        for request in ready:
            del self._held[request.request_id]
            add(request)
        self._drop_unused()
        results, self._results = tuple(self._results), []
        return results

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _take(self, name: str) -> None:
        assert self._adapters is not None
        future = self._loading.pop(name)
        try:
            self._adapters.add(name, future.result())
        except Exception as error:
            if not isinstance(error, ValueError):
                logger.exception("an adapter could not be loaded")
            self._results.append(AdapterResult(name, str(error) or type(error).__name__))
        else:
            self._results.append(AdapterResult(name))

    def _drop_unused(self) -> None:
        held = {request.lora_name for request in self._held.values()}
        for name in [name for name in self._unwanted - held if not self._is_used(name)]:
            self._unwanted.discard(name)
            if (future := self._loading.pop(name, None)) is not None:
                future.cancel()
                self._results.append(AdapterResult(name, "it was unloaded before it was read"))
            elif self._adapters is not None:
                self._adapters.remove(name)
