"""The folder of images: its ownership, its files and its size limit.

Used by the cache; independent of what an image contains. Invariants: a folder that others own or may write to is not
used; files in it are opened without following links; an image appears by a rename, complete and on disk; a file being
written is locked by its writer, so the file of a killed writer is recognised and removed by the next process that opens
the folder; the least recently used images are removed when the folder exceeds its limit. Removing a file that others
read is harmless, because they hold its descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from ..config import EngineConfig

DIRECTORY: Final = "LLMBACKEND_WEIGHT_CACHE_DIR"
SIZE: Final = "LLMBACKEND_WEIGHT_CACHE_SIZE"
DEFAULT_SIZE_GIB: Final = 32.0
_IMAGE: Final = ".image"
_UNFINISHED: Final = ".unfinished"


class FolderRefusedError(Exception):
    """Why a folder is not used."""


def directory_of(config: EngineConfig) -> Path:
    """Raises FolderRefusedError if it is in a home directory that is unknown."""
    named = config.weight_cache_dir
    return _expanded(named) if named else cache_directory("weights", DIRECTORY)


def cache_directory(name: str, variable: str) -> Path:
    """A cache directory of this program: the value of the environment variable, else `name` in the user's cache. Raises
    FolderRefusedError if it is in a home directory that is unknown."""
    if named := os.environ.get(variable, ""):
        return _expanded(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    path = Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "llmbackend", name)
    if not path.is_absolute():
        raise FolderRefusedError("this user has no home directory")
    return path


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise FolderRefusedError(f"the home directory of '{path}' is unknown") from None


def usable_directory(config: EngineConfig) -> Path | None:
    """The folder, created and checked, for other files that starts keep; None if it is not used."""
    try:
        if not (limit_bytes := limit_bytes_of(config)):
            return None
        directory = directory_of(config)
        CacheFolder(directory, limit_bytes).close()
        return directory
    except (OSError, FolderRefusedError):
        return None


def limit_bytes_of(config: EngineConfig) -> int:
    """0 = no cache. Raises FolderRefusedError if the variable is not a number."""
    size_gib = config.weight_cache_size
    if size_gib is None:
        text = os.environ.get(SIZE, "") or str(DEFAULT_SIZE_GIB)
        try:
            size_gib = float(text)
            return max(int(size_gib * 2**30), 0)
        except (ValueError, OverflowError):
            raise FolderRefusedError(f"{SIZE} is '{text}', expected a number of GiB") from None
    return int(size_gib * 2**30)


class CacheFolder:
    def __init__(self, path: Path, limit_bytes: int) -> None:
        """Creates the folder if it is missing, and removes what killed writers left. Raises OSError or
        FolderRefusedError."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._limit_bytes = limit_bytes
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._check()
            self._sweep()
        except BaseException:
            self.close()
            raise

    def copy(self) -> CacheFolder:
        """The same folder with a new descriptor. Raises OSError."""
        folder = CacheFolder.__new__(CacheFolder)
        folder._limit_bytes, folder._fd = self._limit_bytes, os.dup(self._fd)
        return folder

    def close(self) -> None:
        os.close(self._fd)

    def open_image(self, name: str) -> int | None:
        """A read-only descriptor of an image, which now counts as used; None = there is none. Raises OSError, or
        FolderRefusedError if the file has another owner."""
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022 or not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise FolderRefusedError(f"another user owns or may write {name}")
        with contextlib.suppress(OSError):  # a read-only file system
            os.utime(descriptor)
        return descriptor

    def new_file(self) -> tuple[int, str]:
        """Descriptor and name of a new file, locked by its holder. Raises OSError."""
        name = f"{os.getpid()}-{secrets.token_hex(8)}{_UNFINISHED}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(name, flags, 0o600, dir_fd=self._fd)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a file system without locks
            os.close(descriptor)
            self.remove(name)
            raise
        return descriptor, name

    def reserve(self, descriptor: int, size_bytes: int) -> None:
        """Raises OSError if the disk lacks space, or the folder's limit does not allow this much."""
        if size_bytes > self._limit_bytes:
            raise OSError(errno.EDQUOT, f"{size_bytes} bytes are more than the cache may hold ({self._limit_bytes})")
        self._evict(self._limit_bytes - size_bytes)
        os.posix_fallocate(descriptor, 0, size_bytes)

    def publish(self, descriptor: int, unfinished: str, name: str) -> None:
        """Makes the file the image with that name, once it is on disk. Raises OSError."""
        os.fsync(descriptor)
        os.rename(unfinished, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        os.fsync(self._fd)

    def holds(self, descriptor: int, name: str) -> bool:
        """Whether the file has this name."""
        try:
            return os.path.samestat(os.stat(name, dir_fd=self._fd, follow_symlinks=False), os.fstat(descriptor))
        except OSError:
            return False

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._fd)

    def keep_newest(self, ending: str, count: int) -> None:
        """Removes the oldest files of a kind until only `count` are left."""
        found = []
        for name in self._names(ending):
            with contextlib.suppress(OSError):
                found.append((os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mtime_ns, name))
        for _, name in sorted(found)[: max(len(found) - count, 0)]:
            self.remove(name)

    def _check(self) -> None:
        status = os.fstat(self._fd)
        if status.st_uid != os.geteuid():
            raise FolderRefusedError(f"it belongs to user {status.st_uid}, expected {os.geteuid()}")
        if status.st_mode & 0o022:
            raise FolderRefusedError(f"others can write to it (mode {stat.S_IMODE(status.st_mode):o}), expected 700")

    def _sweep(self) -> None:
        for name in self._names(_UNFINISHED):
            with contextlib.suppress(OSError):
                descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._fd)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer is alive
                    os.unlink(name, dir_fd=self._fd)
                finally:
                    os.close(descriptor)

    def _evict(self, limit_bytes: int) -> None:
        """Removes the least recently used images until the others fit the limit."""
        images = []
        for name in self._names(_IMAGE):
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                images.append((status.st_mtime_ns, status.st_size, name))
        total_bytes = sum(size_bytes for _, size_bytes, _ in images)
        for _, size_bytes, name in sorted(images):
            if total_bytes <= limit_bytes:
                return
            self.remove(name)
            total_bytes -= size_bytes

    def _names(self, ending: str) -> list[str]:
        return [name for name in os.listdir(self._fd) if name.endswith(ending)]
