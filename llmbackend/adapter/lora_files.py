"""Copies of LoRA adapters' files, which engines read: later changes to the originals have no effect.

For: LoraRegistry. Does not know: what is in the files, engines. Invariants: nothing outside the operator's folder is
read, whatever links lie in it; a copy never changes, so that an engine that starts later computes the same; `remove`
takes no lock and waits for no disk, because it is called by finalizers, on any thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, Final

from llmbackend.core.backend_api import ErrorCode, TritonError, invalid_argument, unavailable
from llmbackend.fork_server.temporary_folders import OwnedFolder

WEIGHTS: Final = "adapter_model.safetensors"
FILES: Final = {"adapter_config.json": 1 << 20, WEIGHTS: 4 << 30}
"""What PEFT writes for an adapter, and how many bytes of it are taken."""
_MAX_HEADER_BYTES: Final = 16 << 20
_MAX_RANK: Final = 512
"""The largest max_lora_rank that vLLM takes."""
_MAX_FEATURES: Final = 1 << 18
_ELEMENT_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class AdapterCopies:
    """Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._root: OwnedFolder | None = None
        self._is_closed = False
        self._removed: SimpleQueue[str | None] = SimpleQueue()
        """`put` can be called again within itself, as a finalizer may."""
        self._remover = threading.Thread(target=self._remove_all, name="lora-copies", daemon=True)

    def copy(self, folder: str, path: str) -> str:
        """Copies the adapter at `path` below `folder`; the copy's folder. Raises TritonError."""
        with self._lock:
            if self._is_closed:
                raise unavailable("the model was unloaded")
            if self._root is None:
                self._root = OwnedFolder("lora")
                self._remover.start()
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
            if self._is_closed:  # meanwhile: `close` may have come before a file was made
                shutil.rmtree(self._root.path, ignore_errors=True)
        return str(target)

    def remove(self, copy: str) -> None:
        """Soon. Any thread."""
        self._removed.put(copy)

    def close(self) -> None:
        """A copy that is being made is removed at its end."""
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
    """`path`, which may be absolute, as one below `folder`. Raises TritonError INVALID_ARG for one that is not."""
    inside = os.path.relpath(path, folder) if os.path.isabs(path) else path
    parts = inside.split("/")
    if "\0" in path or ".." in parts or not any(part not in ("", ".") for part in parts):
        text = f"'lora_path' is '{path[:200]}', expected a folder below the server's LoRA folder"
        raise invalid_argument(text, param="lora_path")
    return "/".join(part for part in parts if part not in ("", "."))


@contextlib.contextmanager
def _opened_below(folder: str, path: str) -> Iterator[int]:
    """A descriptor of the folder `path`, none of whose parts below `folder` is a link."""
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
    """Raises ValueError unless the header describes the whole file, and only matrices as large as an adapter's: before
    gigabytes are copied. Source: the format of safetensors."""
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
    if isinstance(error, NotADirectoryError) or error.errno == 40:  # ELOOP: a link
        text = "expected a folder of plain files, without symbolic links"
        return TritonError(f"'lora_path' is '{path}', {text}", ErrorCode.INVALID_ARG, "lora_path")
    return TritonError(
        f"'lora_path' is '{path}', which cannot be read: {error.strerror}", ErrorCode.INVALID_ARG, "lora_path"
    )
