"""What a starting server shows on the terminal: bars while models load, then what is served, where, and how to try it.

For: `llmbackend serve`. Does not know: engines. Invariants: no bar is drawn where standard error is no terminal; log
lines stand above the bars; when loading is over the bars are gone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from llmbackend import __version__
from llmbackend.core.inference_server import InferenceServer
from llmbackend.engine.load_progress import LoadProgress

from .load_reports import handled_by

_SERVED_AT = {
    "http": "KServe v2, generate and generate_stream; OpenAI under /v1",
    "grpc": "KServe v2, decoupled streams",
    "metrics": "Prometheus",
}


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
    progress = Progress(*columns, console=console, transient=True, refresh_per_second=4)
    with progress, handled_by(_Bars(progress)):
        yield


def announce(server: InferenceServer, urls: dict[str, str], startup_s: float) -> None:
    """Says on standard output what is served and where, and how to try it."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]llmbackend {__version__}[/] is ready after {startup_s:.1f} s")
    for row in server.repository_index():
        state = f"{row.state or 'not loaded'}{': ' if row.reason else ''}{row.reason}"
        console.print(f"model    {row.name}{' version ' if row.version else ''}{row.version}  {state}", markup=False)
    for name, url in urls.items():
        console.print(f"{name:8s} {url}  {_SERVED_AT[name]}", markup=False)
    ready = [row.name for row in server.repository_index(ready_only=True)]
    if ready and "http" in urls:
        console.print("\nTry:", _example(urls["http"], ready[0]), sep="\n", markup=False)
    sys.stdout.flush()


def _example(http_url: str, model: str) -> str:
    url = f"{http_url.replace('0.0.0.0', 'localhost')}/v1/chat/completions"
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Who are you?"}], "stream": True})
    return f"  curl -N {url} -H 'content-type: application/json' -d '{body}'"
