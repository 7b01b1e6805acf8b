"""This machine's copies of models that are not at their configured path here: one folder per model, received once.

Used by engines' actors. Independent of how files are sent. Invariants: a copy appears by a rename, complete and synced;
its checksums are verified before each use; one process receives a copy while others wait for it; above the size limit,
the least recently used copies not in use are removed; only the user can access the folder. The locks are `flock`s,
which are released when their processes end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from llmbackend.engine.config import EngineConfig

from .model_manifest import ManifestFile, ModelManifest, manifest

log = logging.getLogger(__name__)

DIRECTORY: Final = "LLMBACKEND_MODEL_CACHE_DIR"
SIZE: Final = "LLMBACKEND_MODEL_CACHE_SIZE"
DEFAULT_SIZE_GIB: Final = 256.0
_CHECKSUMS: Final = ".checksums"
"""File in a copy: file name -> sha256."""
_UNFINISHED: Final = ".unfinished"
_USED: Final = ".used"
"""Lock of a copy's users; its modification time is that of the last use."""
_WRITING: Final = ".writing"
"""Lock of the process that is receiving a copy."""
_decode_checksums = msgspec.json.Decoder(dict[str, str]).decode

Fetch = Callable[[ManifestFile], Iterable[bytes]]
"""The content of a file, in order. Raises OSError."""
Connect = Callable[[ModelManifest], AbstractContextManager[Fetch]]
"""Connects to a machine that has the model. Raises OSError."""


class HeldModel(NamedTuple):
    """A copy that is retained while `descriptor` is open in any process."""

    folder: Path
    descriptor: int

    def close(self) -> None:
        os.close(self.descriptor)


class ModelCache:
    """May be used by any process of the user, and by any thread."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Raises OSError, also if other users own or can access the folder."""
        self._folder = folder
        self._limit_bytes = limit_bytes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            mode = f"{stat.S_IMODE(status.st_mode):o}"
            raise PermissionError(errno.EPERM, f"user {status.st_uid} owns it, mode {mode}; expected its user and 700")

    def hold(self, manifest: ModelManifest, connect: Connect) -> HeldModel:
        """Blocks until the copy is complete; connects only to receive it. Raises OSError."""
        name = re.sub(r"[^\w-]+", "_", Path(manifest.path).name)[:80] + f"-{manifest.key}"
        with self._locked():
            self._sweep()
            used, writing = self._open_lock(name + _USED), self._open_lock(name + _WRITING)
            fcntl.flock(used, fcntl.LOCK_SH)  # from now on the copy will not be removed
        try:
            fcntl.flock(writing, fcntl.LOCK_EX)
            if not self._is_whole(self._folder / name):
                self._receive(name, manifest, connect)
            os.utime(used)
        except BaseException:
            os.close(used)
            raise
        finally:
            os.close(writing)
        return HeldModel(self._folder / name, used)

    def _is_whole(self, copy: Path) -> bool:
        """Removes a damaged copy."""
        if not copy.exists():
            return False
        try:
            checksums = _decode_checksums((copy / _CHECKSUMS).read_bytes())
            damaged = [name for name, digest in checksums.items() if _digest_of(copy / name) != digest]
        except (OSError, msgspec.DecodeError) as error:
            damaged = [str(error)]
        if damaged:
            log.warning("the copy '%s' of a model is damaged; receiving it again: %s", copy, damaged[0])
            shutil.rmtree(copy)
        return not damaged

    def _receive(self, name: str, manifest: ModelManifest, connect: Connect) -> None:
        """The caller holds the writer's lock."""
        unfinished = self._folder / (name + _UNFINISHED)
        try:
            self._reserve(unfinished, manifest)
            with connect(manifest) as fetch:
                checksums = {file.name: _write(unfinished / file.name, file, fetch(file)) for file in manifest.files}
            if difference := manifest.difference(unfinished):
                raise OSError(errno.EIO, f"the received files are not those of the model: {difference}")
            (unfinished / _CHECKSUMS).write_bytes(msgspec.json.encode(checksums))
            _sync(unfinished / _CHECKSUMS)
            _sync(unfinished)
            unfinished.rename(self._folder / name)
            _sync(self._folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _reserve(self, unfinished: Path, manifest: ModelManifest) -> None:
        """Allocates the files, so that a full disk or cache is detected before anything is sent."""
        with self._locked():
            shutil.rmtree(unfinished, ignore_errors=True)
            self._evict(manifest.size_bytes)
            unfinished.mkdir(mode=0o700)
            for file in manifest.files:
                _reserve(unfinished / file.name, file.size_bytes)

    def _evict(self, size_bytes: int) -> None:
        """Evicts copies. The caller holds the cache's lock. Raises OSError."""
        folders = [path for path in self._folder.iterdir() if path.is_dir()]
        sizes = {path: sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in folders}
        copies = [path for path in folders if path.suffix != _UNFINISHED]
        for copy in sorted(copies, key=lambda path: path.with_suffix(_USED).stat().st_mtime_ns):
            if sum(sizes.values()) + size_bytes <= self._limit_bytes:
                return
            if self._remove_unused(copy):
                del sizes[copy]
        if sum(sizes.values()) + size_bytes > self._limit_bytes:
            limit, used = f"{SIZE} allows {self._limit_bytes} bytes", sum(sizes.values())
            raise OSError(errno.EDQUOT, f"a model of {size_bytes} bytes does not fit: {limit}, and {used} are in use")

    def _remove_unused(self, copy: Path) -> bool:
        with self._try_lock(copy.with_suffix(_USED)) as is_unused:
            if is_unused:
                shutil.rmtree(copy)
                for lock in (_USED, _WRITING):
                    copy.with_suffix(lock).unlink(missing_ok=True)
        return is_unused

    def _sweep(self) -> None:
        """Removes what killed writers have left."""
        for unfinished in self._folder.glob("*" + _UNFINISHED):
            with self._try_lock(unfinished.with_suffix(_WRITING)) as is_left:
                if is_left:
                    shutil.rmtree(unfinished)

    @contextlib.contextmanager
    def _try_lock(self, path: Path) -> Iterator[bool]:
        """Takes the lock if it is free; yields whether it was."""
        descriptor = self._open_lock(path.name)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_free = True
            except BlockingIOError:
                is_free = False
            yield is_free
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Held briefly, never while files are received. Locks of copies are opened and removed only by its holder."""
        descriptor = self._open_lock("lock")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _open_lock(self, name: str) -> int:
        return os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def machine_cache() -> ModelCache | None:
    """None if it is switched off. Raises OSError, and ValueError for a size that is not a number."""
    text = os.environ.get(SIZE, "") or str(DEFAULT_SIZE_GIB)
    try:
        limit_bytes = int(float(text) * 2**30)
    except (ValueError, OverflowError):
        raise ValueError(f"{SIZE} is '{text}', expected a number of GiB") from None
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.environ.get(DIRECTORY) or os.path.join(base, "llmbackend", "models")).expanduser()
    return ModelCache(folder, limit_bytes) if limit_bytes > 0 else None


def _reserve(path: Path, size_bytes: int) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if size_bytes:
            os.posix_fallocate(descriptor, 0, size_bytes)
    finally:
        os.close(descriptor)


def _write(path: Path, file: ManifestFile, content: Iterable[bytes]) -> str:
    """Returns the sha256 in hex."""
    digest = hashlib.sha256()
    with path.open("r+b") as written:
        for part in content:
            written.write(part)
            digest.update(part)
        if written.tell() != file.size_bytes:
            raise OSError(errno.EIO, f"{file.name} came with {written.tell()} bytes, expected {file.size_bytes}")
        written.flush()
        os.fsync(written.fileno())
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ModelFilesError(Exception):
    """The text says why a machine does not have a model's files."""


class LocalFiles(msgspec.Struct, frozen=True):
    """paths        folder that a configuration names -> folder with its files on this machine
    descriptors  keep the copies among them while open, see HeldModel
    """

    paths: dict[str, str]
    descriptors: tuple[int, ...]


def manifests(config: EngineConfig) -> tuple[ModelManifest, ...]:
    """The manifests of the folders that the configuration names by an absolute path; other names are hub ids, or not
    files. Raises ModelFilesError."""
    named = {"model": config.model} | {f"LoRA adapter '{name}'": path for name, path in config.lora_modules.items()}
    found = []
    for what, path in named.items():
        if os.path.isabs(path):
            try:
                found.append(manifest(Path(path)))
            except OSError as error:
                raise ModelFilesError(f"the {what} '{path}' cannot be read: {error.strerror}") from None
    return tuple(found)


def local_files(models: Sequence[ModelManifest], connect: Connect) -> LocalFiles:
    """Blocks while files are received. Raises ModelFilesError."""
    held: dict[str, HeldModel] = {}
    try:
        for model in models:
            if problem := _problem(model):
                held[model.path] = _copy(model, problem, connect)
    except BaseException:
        for copy in held.values():
            copy.close()
        raise
    paths = {path: str(copy.folder) for path, copy in held.items()}
    return LocalFiles(paths, tuple(copy.descriptor for copy in held.values()))


def _problem(model: ModelManifest) -> str:
    """Why this machine cannot use the model's own path; "" = it can."""
    try:
        return model.difference(Path(model.path))
    except OSError as error:
        return error.strerror or str(error)


def _copy(model: ModelManifest, problem: str, connect: Connect) -> HeldModel:
    """Raises ModelFilesError."""
    what = f"'{model.path}' cannot be used on this machine ({problem})"
    try:
        cache = machine_cache()
        if cache is None:
            raise ModelFilesError(
                f"{what}. Put the same files at the same path on every machine of the cluster, or set {SIZE} above 0 "
                "to have them sent"
            )
        held = cache.hold(model, connect)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ModelFilesError(f"{what}, and a copy cannot be kept: {reason}") from None
    log.info("%s: using its copy '%s'", what, held.folder)
    return held
