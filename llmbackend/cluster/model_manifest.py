"""ModelManifest: a summary of a model's folder in a few kilobytes, so that machines can compare their files.

Used by agents, engines' actors and the model cache. Independent of Ray and caches. Invariants: large files are only
sampled; only files that an engine reads are listed; names stay inside the folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from llmbackend.engine.errors import CheckpointError
from llmbackend.engine.model.checkpoint_files import weight_files

_WEIGHTS: Final = ".safetensors"
_OTHERS: Final = frozenset({".json", ".txt", ".model", ".py", ".jinja", ".tiktoken"})
_BLOCK_BYTES: Final = 1 << 16
_NUM_BLOCKS: Final = 32
"""Evenly spaced blocks of a large file that its digest covers."""


class ManifestFile(msgspec.Struct, frozen=True):
    """name      relative to the folder
    size_bytes
    mtime_ns  time of the last change; copies may differ
    digest    sha256 of the file, or of parts of a large one, in hex
    """

    name: str
    size_bytes: int
    mtime_ns: int
    digest: str

    def __post_init__(self) -> None:
        path = PurePosixPath(self.name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(f"'name' is '{self.name}', expected a path inside the model's folder")


class ModelManifest(msgspec.Struct, frozen=True):
    """path: the folder as the engine's configuration names it."""

    path: str
    files: tuple[ManifestFile, ...]

    @property
    def key(self) -> str:
        """A hexadecimal key that depends on the content of the files."""
        return hashlib.sha256(msgspec.msgpack.encode(self.files)).hexdigest()[:40]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def difference(self, folder: Path) -> str:
        """How the files in `folder` differ from these; "" = not at all. Raises OSError."""
        here, there = (
            {file.name: (file.size_bytes, file.digest) for file in m.files} for m in (manifest(folder), self)
        )
        names = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
        return f"{', '.join(names[:3])} {'differs' if len(names) == 1 else 'differ'}" if names else ""


def manifest(folder: Path) -> ModelManifest:
    """Raises OSError."""
    names = sorted({path.relative_to(folder).as_posix() for path in _files(folder)})
    return ModelManifest(str(folder), tuple(_describe(folder, name) for name in names))


def _files(folder: Path) -> Iterator[Path]:
    found = [path for path in folder.iterdir() if path.is_file()]
    yield from (path for path in found if path.suffix in _OTHERS)
    try:
        yield from weight_files(folder)
    except CheckpointError:  # an adapter, or a name that config.json gives
        yield from (path for path in found if path.suffix == _WEIGHTS)


def _describe(folder: Path, name: str) -> ManifestFile:
    with (folder / name).open("rb") as file:
        status = (folder / name).stat()
        digest, last = hashlib.sha256(), max(status.st_size - _BLOCK_BYTES, 0)
        if status.st_size <= _NUM_BLOCKS * _BLOCK_BYTES:
            digest.update(file.read())
        else:
            for i in range(_NUM_BLOCKS):
                file.seek(last * i // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return ManifestFile(name, status.st_size, status.st_mtime_ns, digest.hexdigest())
