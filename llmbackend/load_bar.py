"""Bars on the terminal while models load: one for each engine, with what it does and how far it is.

For: `llmbackend serve`. Does not know: engines; it listens to the logger of `engine.load_progress`. Invariants: nothing
is drawn where standard error is no terminal; log lines stand above the bars; when loading is over the bars are gone.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from llmbackend.engine.load_progress import LoadProgress
from llmbackend.engine.load_progress import logger as progress_log


class _Bars(logging.Handler):
    """A task of `progress` for each engine that loads."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._tasks: dict[int, TaskID] = {}

    def emit(self, record: logging.LogRecord) -> None:
        engine: int = record.__dict__["engine"]
        now: LoadProgress | None = record.__dict__["progress"]
        task = self._tasks.pop(engine, None)
        if now is None:
            if task is not None:
                self._progress.remove_task(task)
            return
        text = f"{record.__dict__['model']}: {now.stage}"
        if task is None:
            task = self._progress.add_task(text, total=None)
        self._tasks[engine] = task
        self._progress.update(task, description=text, completed=now.done, total=now.total or None)


@contextlib.contextmanager
def load_bars(console: Console | None = None) -> Iterator[None]:
    """Shows bars until the block ends; by default on standard error."""
    if console is None and not sys.stderr.isatty():
        yield
        return
    console = console or Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    level = progress_log.level
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
        bars = _Bars(progress)
        progress_log.addHandler(bars)
        progress_log.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            progress_log.removeHandler(bars)
            progress_log.setLevel(level)
