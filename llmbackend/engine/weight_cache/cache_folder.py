"""The folder of images: whose it is, what lies in it, and how much of it.

For: the cache. Does not know: what an image holds. Invariants: a folder that others own or may write to is not used;
names in it are opened without following links; an image appears by a rename, complete and on the disk; a file that is
being written is locked by its writer, so that one whose writer was killed is known, and removed by the next process
that opens the folder; the least recently used images go when the folder grows beyond its limit. Removing a file that
others read is harmless: they hold its descriptor.
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
    """Raises FolderRefusedError where the user has no home."""
    named = config.weight_cache_dir
    return Path(named).expanduser() if named else cache_directory("weights", DIRECTORY)


def cache_directory(name: str, variable: str) -> Path:
    """Of this program's cache: what the environment's variable says, else `name` in the user's cache. Raises
    FolderRefusedError where the user has no home."""
    if named := os.environ.get(variable, ""):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    path = Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "llmbackend", name)
    if not path.is_absolute():
        raise FolderRefusedError("this user has no home directory")
    return path


def usable_directory(config: EngineConfig) -> Path | None:
    """The folder, created and checked, for other files that starts keep; None where it is not used."""
    try:
        if not (limit_bytes := limit_bytes_of(config)):
            return None
        directory = directory_of(config)
        CacheFolder(directory, limit_bytes).close()
        return directory
    except (OSError, FolderRefusedError):
        return None


def limit_bytes_of(config: EngineConfig) -> int:
    """0: no cache. Raises FolderRefusedError for a variable that holds no number."""
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
        """Makes the folder where it is missing, and removes what killed writers left. Raises OSError or
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
        """Of the same folder, with a descriptor of its own. Raises OSError."""
        folder = CacheFolder.__new__(CacheFolder)
        folder._limit_bytes, folder._fd = self._limit_bytes, os.dup(self._fd)
        return folder

    def close(self) -> None:
        os.close(self._fd)

    def open_image(self, name: str) -> int | None:
        """A descriptor, read-only, of an image, which counts as used now; None: there is none. Raises OSError, or
        FolderRefusedError for a file of another owner."""
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
        """Descriptor and name of a file that only its holder finishes. Raises OSError."""
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
        """Raises OSError when the disk has no room, or the folder must not hold so much."""
        if size_bytes > self._limit_bytes:
            raise OSError(errno.EDQUOT, f"{size_bytes} bytes are more than the cache may hold ({self._limit_bytes})")
        self._evict(self._limit_bytes - size_bytes)
        os.posix_fallocate(descriptor, 0, size_bytes)

    def publish(self, descriptor: int, unfinished: str, name: str) -> None:
        """The file becomes the image of that name, once it is on the disk. Raises OSError."""
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
        """Removes the oldest files of a kind, until so many are left."""
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
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer lives
                    os.unlink(name, dir_fd=self._fd)
                finally:
                    os.close(descriptor)

    def _evict(self, limit_bytes: int) -> None:
        """Removes images, the least recently used first, until the others have at most so many bytes."""
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
