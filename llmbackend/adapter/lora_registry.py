"""The LoRA adapters of a model: those of its configuration, and those that operators load and unload while it serves.

For: request conversion, which takes an adapter for each request, ModelState, and the loops of engines, which bring
their engine to what is wanted here. Does not know: matrices, tensors, how an operator's request came. Invariants: a
name stands for one set of weights from a request's conversion to its end, also when it is loaded anew or unloaded
meanwhile; an engine that starts later gets the same files; each change is answered once.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from llmbackend.core.backend_api import ErrorCode, TritonError, invalid_argument, unavailable
from llmbackend.engine.infer_request import AdapterResult

from .lora_files import AdapterCopies
from .schemas.schema import LoraError

logger = logging.getLogger(__name__)

Answer = Callable[[TritonError | None], None]


class AdapterHandle:
    """An adapter in use: as long as someone holds it, engines keep the adapter."""

    __slots__ = ("__weakref__", "key")

    def __init__(self, key: str) -> None:
        self.key = key
        """Its name in engines and in the prefix cache: another one each time that a name is loaded."""


NO_ADAPTER = AdapterHandle("")


@dataclass(eq=False, slots=True)
class _Loading:
    name: str
    path: str
    """As the operator calls it."""
    copy: str
    handle: AdapterHandle
    engines: set[int] = field(default_factory=set)
    """Which have not told yet how it went."""
    answer: Answer = lambda error: None


class LoraRegistry:
    """Any thread. The lock may be taken again by its holder: dropping a handle ends in `_retire`."""

    def __init__(
        self,
        configured: Mapping[str, str] | None,
        on_change: Callable[[], None],
        on_names: Callable[[str, bool], None] = lambda name, is_served: None,
    ) -> None:
        """configured: name → folder; None = this model takes no adapters
        on_change: there is something new in `wanted`
        on_names: an adapter that was loaded at run time is served, or is not any more
        """
        self._is_enabled = configured is not None
        self._configured = dict(configured or {})
        self._on_change = on_change
        self._on_names = on_names
        self._lock = threading.RLock()
        self._copies = AdapterCopies()
        self._keys = itertools.count(1)
        self._served = {name: AdapterHandle(name) for name in self._configured}
        self._wanted: Mapping[str, str] = dict(self._configured)
        self._loading: dict[str, _Loading] = {}

    def wanted(self) -> Mapping[str, str]:
        """What engines should have, key → folder; a changed mapping is another object."""
        return self._wanted

    def take(self, name: str) -> AdapterHandle:
        """The adapter for one request. Raises LoraError with vllm_backend's texts."""
        if not name:
            return NO_ADAPTER
        if not self._is_enabled:
            raise LoraError("LoRA feature is not enabled.")
        with self._lock:
            handle = self._served.get(name)
            if handle is None:
                raise LoraError(f"LoRA {name} is not supported, we currently support {list(self._served)}")
            return handle

    def load(
        self, name: str, folder: str, path: str, *, in_place: bool, engines: Iterable[int], answer: Answer
    ) -> None:
        """Copies the adapter and has the engines load it; `answer` is called when all have, or one could not.

        Raises TritonError when the adapter cannot be taken; then `answer` is not called.
        """
        self._check_name(name, in_place)
        copy = self._copies.copy(folder, path)
        with self._lock:
            try:
                self._check_name(name, in_place)
                remaining = set(engines)
                if not remaining:
                    raise unavailable("no engine is running")
            except TritonError:
                self._copies.remove(copy)
                raise
            key = f"{name}#{next(self._keys)}"
            handle = AdapterHandle(key)
            weakref.finalize(handle, self._retire, key, copy).atexit = False
            self._loading[key] = _Loading(name, path, copy, handle, remaining, answer)
            self._wanted = {**self._wanted, key: copy}
        self._on_change()

    def unload(self, name: str) -> None:
        """Requests that have it go on. Raises TritonError when there is no such adapter."""
        if name in self._configured:
            raise invalid_argument(f"The lora adapter '{name}' is part of the model's configuration: it stays loaded.")
        with self._lock:
            if name not in self._served:
                raise TritonError(f"The lora adapter '{name}' cannot be found.", ErrorCode.NOT_FOUND, "lora_name")
            handle = self._served.pop(name)
            self._on_names(name, False)
            del handle

    def loaded(self, engine: int, result: AdapterResult) -> None:
        """An engine's own word."""
        with self._lock:
            loading = self._loading.get(result.name)
            if loading is None:
                if result.error and result.name in self._wanted:
                    logger.error("engine %d lost a LoRA adapter: %s", engine, result.error)
                return
            loading.engines.discard(engine)
            if loading.engines and not result.error:
                return
            del self._loading[result.name]
            if not result.error:
                self._served[loading.name] = loading.handle
                self._on_names(loading.name, True)
        text = result.error.replace(f"LoRA '{result.name}'", f"LoRA adapter '{loading.name}'")
        text = text.replace(loading.copy, loading.path)
        loading.answer(invalid_argument(text, param="lora_path") if text else None)

    def engine_ended(self, engine: int) -> None:
        """Or is to be replaced. What it was to load is given up: it may have died of that, and so would the next."""
        with self._lock:
            waiting = [key for key, one in self._loading.items() if engine in one.engines]
        for key in waiting:
            self.loaded(engine, AdapterResult(key, "the engine that was to load it has ended"))

    def close(self) -> None:
        """After the last engine."""
        with self._lock:
            loading, self._loading = self._loading, {}
        for one in loading.values():
            one.answer(unavailable("the model was unloaded"))
        served, self._served = self._served, {}
        for name in served.keys() - self._configured.keys():
            self._on_names(name, False)
        served.clear()  # what `_retire` needs is here until then
        self._copies.close()

    def _check_name(self, name: str, in_place: bool) -> None:
        if not self._is_enabled:
            raise LoraError("LoRA feature is not enabled.")
        with self._lock:
            if name in self._configured:
                raise invalid_argument(f"The lora adapter '{name}' is part of the model's configuration.")
            if any(one.name == name for one in self._loading.values()):
                raise invalid_argument(f"The lora adapter '{name}' is being loaded.")
            if name in self._served and not in_place:
                raise invalid_argument(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                    "'load_inplace' to True."
                )

    def _retire(self, key: str, copy: str) -> None:
        """Nobody has the adapter any more."""
        with self._lock:
            self._wanted = {one: path for one, path in self._wanted.items() if one != key}
        self._copies.remove(copy)
        self._on_change()


NO_LORAS = LoraRegistry(None, lambda: None)
"""Of a model without adapters."""
