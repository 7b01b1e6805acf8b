"""Reports of a load, from the loader to the host: progress, duration of its parts, and choices made.

Invariants: a report without a listener costs nothing; no part of a load depends on a listener.
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")
logger = logging.getLogger(__name__)

INTERVAL_S: Final = 0.1
"""Minimum interval between reports of one stage."""


class LoadProgress(msgspec.Struct, frozen=True):
    """stage  what is being done, for people
    done   how much of it
    total  out of how much; 0 = unknown"""

    stage: str
    done: int = 0
    total: int = 0


Sink = Callable[[LoadProgress], None]
_sink: ContextVar[Sink | None] = ContextVar("load_progress_sink", default=None)


@contextlib.contextmanager
def reporting_to(sink: Sink) -> Iterator[None]:
    """Sends this thread's reports to `sink`: the first and last of each stage, and some in between."""
    last_stage, last_s = "", 0.0

    def sparse(progress: LoadProgress) -> None:
        nonlocal last_stage, last_s
        now_s = time.monotonic()
        is_edge = progress.stage != last_stage or progress.done == progress.total
        if is_edge or now_s - last_s >= INTERVAL_S:
            last_stage, last_s = progress.stage, now_s
            sink(progress)

    token = _sink.set(sparse)
    try:
        yield
    finally:
        _sink.reset(token)


def report(stage: str, done: int = 0, total: int = 0) -> None:
    sink = _sink.get()
    if sink is not None:
        sink(LoadProgress(stage, done, total))


def counted(stage: str, items: Collection[T]) -> Iterator[T]:
    """`items`, reporting each when it has been processed."""
    total = len(items)
    if total:
        report(stage, 0, total)
    for done, item in enumerate(items, 1):
        yield item
        report(stage, done, total)


def show(engine: int, model: str, progress: LoadProgress | None) -> None:
    """On the host: logs the progress of an engine, with the values on the record for a handler; None = the load has
    ended."""
    logger.debug("%s: %s", model, progress, extra={"engine": engine, "model": model, "progress": progress})


def download_bar() -> type | None:
    """A replacement for tqdm in huggingface_hub's downloads: reports bytes, from any thread, to this thread's listener,
    and draws nothing. None = there is no listener."""
    sink = _sink.get()
    if sink is None:
        return None
    from tqdm import tqdm  # type: ignore[import-untyped]

    lock, most = threading.Lock(), 0

    def tell(done: int, total: int) -> None:
        nonlocal most
        with lock:
            if done > most or not most:  # several bars count the same bytes
                most = done
                sink(LoadProgress("downloading weights (MB)", done // 10**6, max(total, done) // 10**6))

    class DownloadBar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no monitor thread

        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": False, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> None:
            super().update(n)
            if self.unit == "B":
                tell(int(self.n), int(self.total or 0))

    return DownloadBar


class CountedBar:
    """Replaces a progress bar of transformers (tqdm): reports, and draws nothing."""

    def __init__(self, bar: Any, stage: str, items: Collection[Any]) -> None:
        self._bar = bar
        self._stage = stage
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return counted(self._stage, self._items)

    def __enter__(self) -> CountedBar:
        return self

    def __exit__(self, *_error: object) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)


def bar_hook(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """For transformers' `set_tqdm_hook`: reports the progress of its loop over the weights."""
    bar = factory(*args, **options)
    if options.get("desc") == "Loading weights" and args and isinstance(args[0], Collection):
        return CountedBar(bar, "reading weights", args[0])
    return bar


class StartPart(msgspec.Struct, frozen=True, array_like=True):
    """One part of a start, and its duration without nested parts."""

    name: str
    seconds: float


class Start:
    """The parts and notes of a start so far. Only one thread writes to it."""

    def __init__(self, parts: tuple[StartPart, ...] = ()) -> None:
        self.parts = parts
        """In the order in which they ended."""
        self.notes: tuple[str, ...] = ()
        self._inner_s = 0.0
        """Time spent in parts nested in the one being measured."""

    def begin(self, earlier: Start) -> None:
        """Prepends what was done earlier for this start."""
        self.parts, self.notes = earlier.parts + self.parts, earlier.notes + self.notes

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        outer_s, self._inner_s = self._inner_s, 0.0
        start_s = time.perf_counter()
        try:
            yield
        finally:
            took_s = time.perf_counter() - start_s
            self.parts += (StartPart(name, took_s - self._inner_s),)
            self._inner_s = outer_s + took_s


_start: ContextVar[Start | None] = ContextVar("start", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[Start]:
    """Collects the parts and notes of this thread."""
    start = Start()
    token = _start.set(start)
    try:
        yield start
    finally:
        _start.reset(token)


@contextlib.contextmanager
def part(name: str) -> Iterator[None]:
    """Measures its block as a part of the start."""
    start = _start.get()
    if start is None:
        yield
        return
    with start.measure(name):
        yield


def note(text: str) -> None:
    """Records for the log which choice was made, and why."""
    start = _start.get()
    if start is not None:
        start.notes += (text,)


def text_of(parts: Sequence[StartPart]) -> str:
    """For the log: "read image 0.31 s, program 0.04 s". Parts with negligible duration are left out."""
    seconds: dict[str, float] = {}
    for each in parts:
        seconds[each.name] = seconds.get(each.name, 0.0) + each.seconds
    return ", ".join(f"{name} {took_s:.2f} s" for name, took_s in seconds.items() if took_s >= 0.005)
