"""Loads and removes LoRA adapters while an engine runs; a separate thread reads their files.

Owned by the engine core's thread. Independent of what an adapter is and who wants it. Invariants: each load ends with
one result; an adapter is removed only when no live request uses it; the engine's thread never waits for a file, because
requests whose adapter is still being read are held here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Protocol, runtime_checkable

from .config import EngineConfig
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
    """A runner whose model takes adapters; None = it does not."""

    @property
    def adapters(self) -> Adapters | None: ...


def num_in_memory(config: EngineConfig) -> int | None:
    """Maximum number of adapters in memory; None = all of them, or as many as a GPU has memory for."""
    return None if config.device.startswith("cuda") else config.max_cpu_loras


def first_adapters(config: EngineConfig) -> list[tuple[str, str]]:
    """Name and folder of the adapters to load at start."""
    return list(config.lora_modules.items())[: num_in_memory(config)]


def refuse_adapter(name: str) -> None:
    """For an engine without adapters: raises ValueError for any name but ""."""
    if name:
        raise ValueError(f"'lora_name' is '{name}', but this engine has no LoRA adapters")


def adapter_number(name: str, numbers: Mapping[str, int], none: int) -> int:
    """none: the number that stands for "", the model without an adapter. Raises ValueError if the adapter is not
    loaded."""
    if name and name not in numbers:
        raise ValueError(f"'lora_name' is '{name}', expected one of: {', '.join(numbers)}")
    return numbers.get(name, none)


class AdapterLoads:
    def __init__(
        self,
        runner: Runner,
        is_used: Callable[[str], bool],
        known: Mapping[str, str],
        limit: int | None,
    ) -> None:
        """is_used: whether a live request uses the adapter. known: name → folder of the adapters in the engine's
        config, of which the runner already has the first `limit`. limit: maximum number of adapters in memory, None =
        no limit. Beyond it, the least recently named adapters are evicted, and read again when a request names them."""
        self._adapters = runner.adapters if isinstance(runner, AdaptingRunner) else None
        self._is_used = is_used
        self._limit = limit
        self._known = dict(known)
        self._in_memory = dict.fromkeys(list(self._known)[:limit])
        """Least recently named first."""
        self._leaving: set[str] = set()
        """Adapters to evict as soon as no live request uses them."""
        self._thread: ThreadPoolExecutor | None = None
        self._wanted: dict[str, None] = {}
        """Adapters waiting for memory, in order of arrival, so none starves."""
        self._loading: dict[str, Future[Any]] = {}
        self._announced: set[str] = set()
        """Adapters whose load must be reported."""
        self._results: list[AdapterResult] = []
        self._failures: dict[str, str] = {}
        """Why adapters could not be read again; only until the requests held for them have ended with it."""
        self._unwanted: set[str] = set()
        self._held: dict[str, tuple[InferRequest, int]] = {}
        """Requests and their arrival numbers by id, in order of arrival."""

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    @property
    def has_work(self) -> bool:
        return bool(self._loading or self._wanted or self._results)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def load(self, wanted: AdapterLoad) -> None:
        if self._adapters is None:
            self._results.append(AdapterResult(wanted.name, "this engine's model does not accept LoRA adapters"))
            return
        self._known[wanted.name] = wanted.path
        self._announced.add(wanted.name)
        self._wanted[wanted.name] = None
        self._begin_reads()

    def drop(self, name: str) -> None:
        """Removes the adapter once no request uses it."""
        self._unwanted.add(name)
        self._drop_unused()

    def holds(self, request: InferRequest, arrival: int) -> bool:
        """Whether the request is held because its adapter is not in memory yet; `take_results` returns it later, with
        its arrival number."""
        name = request.lora_name
        if name not in self._known or name in self._failures:
            return False
        if name in self._in_memory and name not in self._leaving:
            self._in_memory[name] = self._in_memory.pop(name)
            return False
        self._held[request.request_id] = request, arrival
        if name not in self._loading and name not in self._wanted:
            self._wanted[name] = None
            self._begin_reads()
        return True

    def refusal(self, request: InferRequest) -> str:
        """Why the adapter could not be read again; "" = it could, or is unknown."""
        return self._failures.get(request.lora_name, "")

    def is_held(self, request_id: str) -> bool:
        return request_id in self._held

    def forget(self, request_id: str) -> bool:
        """Removes a held request; False = it is not held."""
        return self._held.pop(request_id, None) is not None

    def wait(self, timeout_s: float) -> None:
        """Waits until an adapter has been read."""
        wait(self._loading.values(), timeout_s, "FIRST_COMPLETED")

    def take_results(self, add: Callable[[InferRequest, int], None]) -> tuple[AdapterResult, ...]:
        """Results of completed loads; their adapters are now usable. add: called with each request held for them, also
        after a failed load."""
        for name in [name for name, future in self._loading.items() if future.done()]:
            self._take(name)
        waiting = self._loading.keys() | self._wanted.keys()
        for request, arrival in [each for each in self._held.values() if each[0].lora_name not in waiting]:
            del self._held[request.request_id]
            add(request, arrival)
        self._failures.clear()
        self._drop_unused()
        if self._wanted:
            self._begin_reads()
        results, self._results = tuple(self._results), []
        return results

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _begin_reads(self) -> None:
        """Starts reading the adapters that there is memory for."""
        assert self._adapters is not None
        if self._limit is not None:
            self._make_room(len(self._in_memory) + len(self._loading) + len(self._wanted) - self._limit)
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="lora-files")
        for name in [name for name in self._wanted if name not in self._in_memory]:
            if self._limit is not None and len(self._in_memory) + len(self._loading) >= self._limit:
                return
            del self._wanted[name]
            self._loading[name] = self._thread.submit(partial(self._adapters.read, name, self._known[name]))

    def _make_room(self, count: int) -> None:
        """Makes room for this many adapters, as far as live requests allow."""
        assert self._adapters is not None
        staying = [name for name in self._in_memory if name not in self._leaving]
        self._leaving |= set(staying[: max(0, count - len(self._leaving))])
        for name in [name for name in self._leaving if not self._is_used(name)]:
            self._forget_matrices(name)

    def _forget_matrices(self, name: str) -> None:
        assert self._adapters is not None
        self._leaving.discard(name)
        self._in_memory.pop(name, None)
        self._adapters.remove(name)

    def _take(self, name: str) -> None:
        assert self._adapters is not None
        future = self._loading.pop(name)
        try:
            self._adapters.add(name, future.result())
        except Exception as error:
            if not isinstance(error, ValueError):
                logger.exception("an adapter could not be loaded")
            self._give_up(name, str(error) or type(error).__name__)
        else:
            self._in_memory[name] = None
            if name in self._announced:
                self._announced.discard(name)
                self._results.append(AdapterResult(name))

    def _give_up(self, name: str, error: str) -> None:
        if name in self._announced:
            self._announced.discard(name)
            del self._known[name]
        else:
            self._failures[name] = error
        self._results.append(AdapterResult(name, error))

    def _drop_unused(self) -> None:
        held = {request.lora_name for request, _ in self._held.values()}
        for name in [name for name in self._unwanted - held if not self._is_used(name)]:
            self._unwanted.discard(name)
            future = self._loading.pop(name, None)
            if future is not None or name in self._wanted:
                if future is not None:
                    future.cancel()
                self._wanted.pop(name, None)
                self._give_up(name, "it was unloaded before it was read")
            self._known.pop(name, None)
            if self._adapters is not None:
                self._forget_matrices(name)
