"""Terminal output of a starting server: progress bars of loads, then models, URLs and an example.

Used by `llmbackend serve`. Independent of engines. Invariants: if standard error is not a terminal, log lines replace
the bars, at least one for each stage of a load; log lines appear above the bars; the bars disappear when loading ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from llmbackend import __version__
from llmbackend.core.backend_api import SERVED_MODEL_NAME, split_names
from llmbackend.core.inference_server import InferenceServer
from llmbackend.engine.load_progress import LoadProgress
from llmbackend.engine.load_progress import logger as progress_log

from .ports import UNIX, in_url
from .process import in_thread
from .settings import ServerSettings

if TYPE_CHECKING:  # rich is imported while the engines start
    from rich.console import Console
    from rich.progress import Progress, TaskID

ORDER_TIMEOUT_S = 2.0
"""Limit on the wait, because models without an engine report nothing."""


@contextlib.contextmanager
def handled_by(handler: logging.Handler) -> Iterator[None]:
    """Passes progress reports to `handler` until the block ends."""
    level = progress_log.level
    progress_log.addHandler(handler)
    progress_log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        progress_log.removeHandler(handler)
        progress_log.setLevel(level)


class _FirstReport(logging.Handler):
    """Sets `event` at the first report. Thread-safe."""

    def __init__(self, event: asyncio.Event) -> None:
        super().__init__()
        self._event = event
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._event.set)


async def begin_load(load: Callable[[], None]) -> asyncio.Future[None]:
    """Runs `load` on a thread. Returns when it has ordered an engine or has ended, or after ORDER_TIMEOUT_S.

    Until then, other work by the caller would hold the GIL and delay the engine's start."""
    ordered = asyncio.Event()
    with handled_by(_FirstReport(ordered)):
        loading = in_thread(load)
        waiting = asyncio.ensure_future(ordered.wait())
        await asyncio.wait((loading, waiting), timeout=ORDER_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
    return loading


log = logging.getLogger(__name__)


class Listening(Protocol):
    @property
    def http_port(self) -> int | None: ...

    @property
    def grpc_port(self) -> int | None: ...

    @property
    def metrics_port(self) -> int | None: ...


def log_endpoints(listening: Listening, settings: ServerSettings) -> None:
    """Writes Triton's log lines, for which some tools wait."""
    started = (
        ("GRPCInferenceService", settings.grpc.address, listening.grpc_port),
        ("HTTPService", settings.http.address, listening.http_port),
        ("Metrics Service", settings.metrics.address, listening.metrics_port),
    )
    for name, address, port in started:
        if port is not None:
            log.info("Started %s at %s:%d", name, address, port)


def urls_of(listening: Listening, settings: ServerSettings) -> dict[str, str]:
    """URLs of the enabled endpoints, by protocol."""
    scheme = "http" if settings.access.http_tls is None else "https"
    found = {
        "http": (scheme + "://{}:{}", settings.http.address, listening.http_port),
        "grpc": ("{}:{}", settings.grpc.address, listening.grpc_port),
        "metrics": ("http://{}:{}/metrics", settings.metrics.address, listening.metrics_port),
    }
    urls = {
        name: form.format(in_url(address), port) for name, (form, address, port) in found.items() if port is not None
    }
    return {"http": settings.http.address} | urls if settings.http.is_unix else urls


def _local(url: str) -> str:
    """The URL for clients on this machine."""
    return url.replace("0.0.0.0", "localhost").replace("[::]", "localhost")


def page_url(urls: Mapping[str, str], settings: ServerSettings) -> dict[str, str]:
    """The pages' URL for a browser on this machine; "" if there are no pages."""
    if not settings.pages.enabled or "http" not in urls or settings.http.is_unix:
        return {}
    return {"pages": f"{_local(urls['http'])}/"}


_SERVED_AT = {
    "pages": "in a browser: chat, live engine, operations",
    "http": "KServe v2, generate and generate_stream; OpenAI under /v1",
    "grpc": "KServe v2, decoupled streams",
    "metrics": "Prometheus",
}


LINE_INTERVAL_S: Final = 10.0
"""Time between two log lines about one stage of a load."""


class LoadLines(logging.Handler):
    """Logs progress instead of drawing bars."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._last: dict[int, tuple[str, float]] = {}
        """For each loading engine: the last logged stage, and when it was logged."""

    def emit(self, record: logging.LogRecord) -> None:
        engine: int = record.__dict__["engine"]
        now: LoadProgress | None = record.__dict__["progress"]
        now_s = self._clock()
        if now is None:
            self._last.pop(engine, None)
            return
        stage, last_s = self._last.get(engine, ("", now_s))
        if now.stage != stage or now_s - last_s >= LINE_INTERVAL_S:
            self._last[engine] = now.stage, now_s
            amount = f" {now.done} of {now.total}" if now.total else ""
            log.info("%s: loading: %s%s", record.__dict__["model"], now.stage, amount)


class _Bars(logging.Handler):
    """One task of `progress` for each loading engine."""

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
    """Shows bars until the block ends, by default on standard error; log lines if that is not a terminal."""
    if console is None and not sys.stderr.isatty():
        with handled_by(LoadLines()):
            yield
        return
    from rich import progress as bars
    from rich.console import Console

    console = console or Console(stderr=True)
    columns = (
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
    )
    progress = bars.Progress(*columns, console=console, transient=True, refresh_per_second=4)
    with progress, handled_by(_Bars(progress)):
        yield


def announce(server: InferenceServer, urls: dict[str, str], startup_s: float, is_on_one_port: bool = False) -> None:
    """Prints models, URLs and an example on standard output."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]llmbackend {__version__}[/] is ready after {startup_s:.1f} s")
    paths = _paths(server)
    for row in server.repository_index():
        state = f"{row.state or 'not loaded'}{': ' if row.reason else ''}{row.reason}"
        name, path = f"{row.name}{' version ' if row.version else ''}{row.version}", paths.get((row.name, row.version))
        console.print(f"model    {name}  {state}{f'  {path}' if path else ''}", markup=False)
    show_urls(urls)
    closed = [f"--{name}-port" for name in ("grpc", "metrics") if name not in urls]
    if is_on_one_port and closed:
        console.print(f"         everything is on this port; {' and '.join(closed)} open others")
    ready = [row.name for row in server.repository_index(ready_only=True)]
    if ready and "http" in urls:
        parameters = server.model_parameters(ready[0])
        names = *split_names(parameters.get(SERVED_MODEL_NAME, "")), ready[0]
        example = _example(urls["http"], names[0], has_chat=bool(parameters.get("chat_template")))
        console.print("\nTry:", example, sep="\n", markup=False)
    sys.stdout.flush()


def _paths(server: InferenceServer) -> dict[tuple[str, str], str]:
    """The implementation that computes each model, by name and version, and why a faster one is not used."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for source, instance in server.describe_instances():
        if instance.path:
            text = f"{instance.path}, because {instance.path_reason}" if instance.path_reason else instance.path
            found.setdefault((source.model, source.version), {})[text] = None
    return {model: ", ".join(paths) for model, paths in found.items()}


def show_urls(urls: Mapping[str, str]) -> None:
    """urls: the URL of each protocol."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for name, url in urls.items():
        console.print(f"{name:8s} {url}  {_SERVED_AT[name]}", markup=False)
    sys.stdout.flush()


def _example(http_url: str, model: str, *, has_chat: bool) -> str:
    is_unix = http_url.startswith(UNIX)
    host = "http://localhost" if is_unix else _local(http_url)
    chat, text = {"messages": [{"role": "user", "content": "Who are you?"}]}, {"prompt": "Once upon a time"}
    url = f"{host}/v1/{'chat/' if has_chat else ''}completions"
    body = json.dumps({"model": model, **(chat if has_chat else text), "stream": True})
    socket = f" --unix-socket {shlex.quote(http_url.removeprefix(UNIX))}" if is_unix else ""
    curl = f"  curl -N{socket} {url} -H 'content-type: application/json' -d {shlex.quote(body)}"
    if is_unix or not has_chat:
        return curl
    return f"  llmbackend chat --url {host} --model {shlex.quote(model)}\n{curl}"
