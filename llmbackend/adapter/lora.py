"""The LoRA adapters of a model: those of its configuration, and those that operators load and unload at run time.

Used by request conversion, which takes an adapter for each request, by ModelState, and by the engines' loops, which
load what this registry asks for. Independent of matrices, tensors and HTTP. Invariants: a request uses the same
weights from conversion to its end, even if its adapter's name is reloaded or unloaded meanwhile. Engines read private
copies of an adapter's files, which never change, so that an engine that starts later computes the same results. Each
change is answered exactly once, and a load within its deadline even if a disk hangs, as files are read on a separate
thread.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, Final, Literal

import msgspec

from llmbackend.core.backend_api import ErrorCode, Request, TritonError, internal, invalid_argument, unavailable
from llmbackend.engine.errors import is_shortage
from llmbackend.engine.messages import AdapterResult
from llmbackend.fork_server.process_resources import OwnedFolder
from llmbackend.waiting.timer import Alarm, Timer

from .schemas.schema import LoraError

logger = logging.getLogger(__name__)

Answer = Callable[[TritonError | None], None]

LOAD_TIMEOUT_S: Final = 60.0
"""Time to read an adapter's files and load it into the engines. 4 GiB from a 100 MB/s disk take 43 s."""
_MAX_READS: Final = 8
"""Concurrent reads. Each has a thread, which a hanging disk can block beyond the deadline."""
WEIGHTS: Final = "adapter_model.safetensors"
FILES: Final = {"adapter_config.json": 1 << 20, WEIGHTS: 4 << 30}
"""The files of an adapter (PEFT's names) and their maximum sizes in bytes."""
_MAX_HEADER_BYTES: Final = 16 << 20
_MAX_RANK: Final = 512
"""The largest max_lora_rank that vLLM accepts."""
_MAX_FEATURES: Final = 1 << 18
_ELEMENT_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class AdapterCopies:
    """Private copies of adapters' files. Thread-safe.

    Nothing outside the operator's folder is read: symbolic links in it are refused. `remove` takes no lock and does not
    wait for a disk, because finalizers call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._root: OwnedFolder | None = None
        self._is_closed = False
        self._removed: SimpleQueue[str | None] = SimpleQueue()
        """A SimpleQueue, because a finalizer may call `put` during another `put`."""
        self._remover = threading.Thread(target=self._remove_all, name="lora-copies", daemon=True)

    def copy(self, folder: str, path: str) -> str:
        """Copies the adapter at `path` below `folder`. Returns the copy's folder. Raises TritonError."""
        with self._lock:
            if self._is_closed:
                raise unavailable("the model was unloaded")
            if self._root is None:
                root = OwnedFolder("lora")
                try:
                    self._remover.start()
                except BaseException:
                    root.remove()
                    raise
                self._root = root
        target = Path(tempfile.mkdtemp(dir=self._root.path))
        try:
            with _opened_below(folder, path) as descriptor:
                for name, limit_bytes in FILES.items():
                    _copy_file(descriptor, name, limit_bytes, path, target / name)
        except OSError as error:
            self.remove(str(target))
            raise _why(path, error) from None
        except BaseException:
            self.remove(str(target))
            raise
        finally:
            if self._is_closed:  # `close` may have removed the root before a file was created
                shutil.rmtree(self._root.path, ignore_errors=True)
        return str(target)

    def remove(self, copy: str) -> None:
        """Schedules the removal of a copy. Thread-safe."""
        self._removed.put(copy)

    def close(self) -> None:
        """A copy still in progress is removed when it is complete."""
        with self._lock:
            self._is_closed = True
        if self._root is not None:
            self._removed.put(None)
            self._remover.join()
            self._root.remove()

    def _remove_all(self) -> None:
        while (copy := self._removed.get()) is not None:
            shutil.rmtree(copy, ignore_errors=True)


def relative_path(folder: str, path: str) -> str:
    """`path`, which may be absolute, relative to `folder`. Raises TritonError INVALID_ARG if it is not below it."""
    inside = os.path.relpath(path, folder) if os.path.isabs(path) else path
    parts = inside.split("/")
    if "\0" in path or ".." in parts or not any(part not in ("", ".") for part in parts):
        text = f"'lora_path' is '{path[:200]}', expected a folder below the server's LoRA folder"
        raise invalid_argument(text, param="lora_path")
    return "/".join(part for part in parts if part not in ("", "."))


@contextlib.contextmanager
def _opened_below(folder: str, path: str) -> Iterator[int]:
    """A descriptor of the folder `path`, none of whose components below `folder` is a symbolic link."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in relative_path(folder, path).split("/"):
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _copy_file(directory: int, name: str, limit_bytes: int, path: str, target: Path) -> None:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)  # a pipe would block
    with open(descriptor, "rb") as source:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _unusable(path, f"'{name}' is not a file")
        if status.st_size > limit_bytes:
            raise _unusable(path, f"'{name}' has {status.st_size} bytes, expected at most {limit_bytes}")
        if name == WEIGHTS:
            try:
                _check_header(source, status.st_size)
            except ValueError as error:
                raise _unusable(path, f"'{name}' is not an adapter's file: {error}") from None
            source.seek(0)
        with target.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)


def _unusable(path: str, reason: str) -> TritonError:
    return invalid_argument(f"LoRA adapter '{path}': {reason}", param="lora_path")


def _check_header(source: BinaryIO, size_bytes: int) -> None:
    """Raises ValueError unless the header describes the whole file, and only matrices of an adapter's size. Done before
    gigabytes are copied. Source: the safetensors format."""
    header_bytes = int.from_bytes(source.read(8), "little")
    if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, size_bytes - 8):
        raise ValueError(f"its header has {header_bytes} bytes, expected 1 to {_MAX_HEADER_BYTES}, within the file")
    try:
        tensors = json.loads(source.read(header_bytes))
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(tensors, dict):
        raise ValueError("its header is not a JSON object")
    tensors.pop("__metadata__", None)
    described_bytes = 8 + header_bytes
    for name, tensor in tensors.items():
        fields: dict[str, Any] = tensor if isinstance(tensor, dict) else {}
        shape, dtype = fields.get("shape", "no shape"), fields.get("dtype", "no dtype")
        if not _is_matrix(shape) or not isinstance(dtype, str) or dtype not in _ELEMENT_BYTES:
            what = f"{str(dtype)[:200]} of {str(shape)[:200]}"
            raise ValueError(f"tensor {name[:200]!r} is {what}, expected a LoRA matrix")
        described_bytes += shape[0] * shape[1] * _ELEMENT_BYTES[dtype]
    if described_bytes != size_bytes:
        raise ValueError(f"its header describes {described_bytes} bytes, the file has {size_bytes}")


def _is_matrix(shape: Any) -> bool:
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int for size in shape):
        return False
    return bool(0 < min(shape) <= _MAX_RANK and max(shape) <= _MAX_FEATURES)


def _why(path: str, error: OSError) -> TritonError:
    if isinstance(error, FileNotFoundError):
        missing = "" if error.filename in (None, *path.split("/")) else f": it has no '{error.filename}'"
        return TritonError(f"No adapter found for '{path}'{missing}", ErrorCode.NOT_FOUND, "lora_path")
    if is_shortage(error):
        return unavailable(f"the adapter '{path}' cannot be copied now: {error.strerror}")
    text = f"which cannot be read: {error.strerror}"
    if isinstance(error, NotADirectoryError) or error.errno == errno.ELOOP:  # a symbolic link
        text = "expected a folder of plain files, without symbolic links"
    return invalid_argument(f"'lora_path' is '{path}', {text}", param="lora_path")


class AdapterHandle:
    """An adapter in use: engines keep it loaded as long as this handle exists."""

    __slots__ = ("__weakref__", "key", "name")

    def __init__(self, key: str, name: str = "") -> None:
        """name: the clients' name for it; "" = same as the key."""
        self.key = key
        """Its name in engines and in the prefix cache, different for each load of the same name."""
        self.name = name or key


NO_ADAPTER = AdapterHandle("")


@dataclass(frozen=True, slots=True)
class LoraChange:
    """A request's `command`, as JSON."""

    action: Literal["load", "unload"]
    name: str
    folder: str = ""
    """The operator's folder for adapters."""
    path: str = ""
    """Relative to the folder, as given by the operator."""
    in_place: bool = False
    """Whether it may replace a loaded adapter with the same name."""


_decode_change = msgspec.json.Decoder(LoraChange).decode


def lora_change(request: Request) -> LoraChange | None:
    """None for an inference request."""
    return _decode_change(request.command) if request.command else None


@dataclass(eq=False, slots=True)
class _Loading:
    change: LoraChange
    answer: Answer
    alarm: Alarm
    """Fires at the deadline."""
    copy: str = ""
    """"" while the files are being read."""
    handle: AdapterHandle = NO_ADAPTER
    engines: set[int] = field(default_factory=set)
    """Engines that have not yet reported the result."""


class LoraRegistry:
    """Thread-safe. The lock is reentrant, because dropping a handle ends in `_retire`."""

    def __init__(
        self,
        configured: Mapping[str, str] | None,
        timer: Timer,
        on_change: Callable[[], None],
        on_names: Callable[[str, bool], None] = lambda name, is_served: None,
        load_timeout_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        """configured: name → folder; None = this model accepts no adapters
        timer: for the deadlines of loads; stopped after `close`
        on_change: called after a change of `wanted`
        on_names: called when an adapter that was loaded at run time becomes available or unavailable
        """
        self._is_enabled = configured is not None
        self._configured = dict(configured or {})
        self._on_change = on_change
        self._on_names = on_names
        self._timer = timer
        self._load_timeout_s = load_timeout_s
        self._lock = threading.RLock()
        self._copies = AdapterCopies()
        self._keys = itertools.count(1)
        self._served = {name: AdapterHandle(name) for name in self._configured}
        self._wanted: Mapping[str, str] = dict(self._configured)
        self._loading: dict[str, _Loading] = {}
        self._num_reads = 0

    def wanted(self) -> Mapping[str, str]:
        """The adapters that engines should have, key → folder. A change creates a new mapping."""
        return self._wanted

    def take(self, name: str) -> AdapterHandle:
        """Takes the adapter for one request. Raises LoraError with vllm_backend's texts."""
        if not name:
            return NO_ADAPTER
        if not self._is_enabled:
            raise LoraError("LoRA feature is not enabled.")
        with self._lock:
            handle = self._served.get(name)
            if handle is None:
                raise LoraError(f"LoRA {name} is not supported, we currently support {list(self._served)}")
            return handle

    def load(self, change: LoraChange, engines: Callable[[], Iterable[int]], answer: Answer) -> None:
        """Begins to copy the adapter and load it into the engines. `answer` is called once all engines have it, if it
        cannot be loaded, or with UNAVAILABLE at the deadline.

        engines: returns the running engines; called under a lock when the files have been copied
        Raises TritonError if the load cannot begin; then `answer` is not called.
        """
        self._timer.start()
        with self._lock:
            self._check_name(change.name, change.in_place)
            if self._num_reads >= _MAX_READS:
                raise unavailable(
                    f"The lora adapter '{change.name}' cannot be loaded now: {_MAX_READS} others are being read."
                )
            key = f"{change.name}#{next(self._keys)}"
            loading = _Loading(change, answer, partial(self._expire, key))
            threading.Thread(target=self._read, args=(key, change, engines), name="lora-read", daemon=True).start()
            self._num_reads += 1
            self._loading[key] = loading
        self._timer.set(loading.alarm, time.monotonic_ns() + int(self._load_timeout_s * 1e9))

    def _read(self, key: str, change: LoraChange, engines: Callable[[], Iterable[int]]) -> None:
        """On a separate thread."""
        try:
            copy = self._copies.copy(change.folder, change.path)
        except TritonError as error:
            self._give_up(key, error)
        except Exception as error:
            logger.exception("a LoRA adapter could not be read")
            self._give_up(key, internal(f"the adapter could not be read: {error}"))
        else:
            self._offer(key, copy, engines)
        finally:
            with self._lock:
                self._num_reads -= 1

    def _offer(self, key: str, copy: str, engines: Callable[[], Iterable[int]]) -> None:
        """Offers the copy to the engines, unless the load has been given up in the meantime."""
        with self._lock:
            running = set(engines())  # under the lock: `engine_ended` comes before, or finds the load
            loading = self._loading.get(key)
            if loading is None or not running:
                self._copies.remove(copy)
            else:
                loading.copy, loading.handle, loading.engines = copy, AdapterHandle(key, loading.change.name), running
                weakref.finalize(loading.handle, self._retire, key, copy).atexit = False
                self._wanted = {**self._wanted, key: copy}
        if not running:
            self._give_up(key, unavailable("no engine is running"))
        self._on_change()

    def _give_up(self, key: str, error: TritonError) -> None:
        """Ends a load with an error, unless it has ended. A copy still in progress is removed later."""
        with self._lock:
            loading = self._loading.pop(key, None)
        if loading is not None:
            self._timer.clear(loading.alarm)
            loading.answer(error)

    def _expire(self, key: str) -> None:
        with self._lock:
            loading = self._loading.get(key)
            if loading is None:
                return
            change = loading.change
            doing = f"its engines did not load '{change.path}'" if loading.copy else f"'{change.path}' was not read"
            text = f"The lora adapter '{change.name}' was not loaded: {doing} within {self._load_timeout_s:g} s."
        logger.error("%s", text)
        self._give_up(key, unavailable(text))

    @property
    def is_loading(self) -> bool:
        """Whether requests are waiting for engines to load an adapter."""
        return bool(self._loading)

    def unload(self, name: str) -> None:
        """Requests that use the adapter continue. Raises TritonError if there is no such adapter."""
        if name in self._configured:
            raise invalid_argument(f"The lora adapter '{name}' is part of the model's configuration: it stays loaded.")
        with self._lock:
            if name not in self._served:
                raise TritonError(f"The lora adapter '{name}' cannot be found.", ErrorCode.NOT_FOUND, "lora_name")
            handle = self._served.pop(name)
            self._on_names(name, False)
            del handle

    def loaded(self, engine: int, result: AdapterResult) -> None:
        """Called when an engine has loaded the adapter, or reports why it cannot or why it lost it."""
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
                self._served[loading.change.name] = loading.handle
                self._on_names(loading.change.name, True)
        self._timer.clear(loading.alarm)
        text = result.error.replace(f"LoRA '{result.name}'", f"LoRA adapter '{loading.change.name}'")
        text = text.replace(loading.copy, loading.change.path)
        loading.answer(invalid_argument(text, param="lora_path") if text else None)

    def engine_ended(self, engine: int) -> None:
        """Called even if the engine will be replaced. Its loads are given up, as one may have killed it."""
        with self._lock:
            waiting = [key for key, one in self._loading.items() if engine in one.engines]
        for key in waiting:
            self.loaded(engine, AdapterResult(key, "the engine that should have loaded it has exited"))

    def close(self) -> None:
        """After the last engine."""
        for key in tuple(self._loading):
            self._give_up(key, unavailable("the model was unloaded"))
        served, self._served = self._served, {}
        for name in served.keys() - self._configured.keys():
            self._on_names(name, False)
        served.clear()  # until here, `_retire` needs it
        self._copies.close()

    def _check_name(self, name: str, in_place: bool) -> None:
        if not self._is_enabled:
            raise LoraError("LoRA feature is not enabled.")
        with self._lock:
            if name in self._configured:
                raise invalid_argument(f"The lora adapter '{name}' is part of the model's configuration.")
            if any(one.change.name == name for one in self._loading.values()):
                raise invalid_argument(f"The lora adapter '{name}' is being loaded.")
            if name in self._served and not in_place:
                raise invalid_argument(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                    "'load_inplace' to True."
                )

    def _retire(self, key: str, copy: str) -> None:
        """Called when the adapter's last handle is gone."""
        with self._lock:
            self._wanted = {one: path for one, path in self._wanted.items() if one != key}
        self._copies.remove(copy)
        self._on_change()
