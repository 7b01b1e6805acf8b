"""Which files make up a GGUF model: a file, its parts, or the contents of a directory; and their combined header.

Invariant: the fields are those of the first part, the tensors those of all parts, and no part is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from .errors import GgufError, short
from .header import MAGIC, Header, read_header

SUFFIX: Final = ".gguf"
_PART: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_PROJECTOR: Final = "mmproj"
"""Prefix of files with the vision part of a model."""
MAX_PARTS: Final = 1000
_NUM_PARTS, _NUM_TENSORS = "split.count", "split.tensors.count"


def is_gguf(path: Path) -> bool:
    """Whether this is a GGUF file, by its first bytes; a link in a hub's cache may point to any name."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def model_name(path: Path) -> str:
    """The file's name without suffix and part number."""
    match = _PART.fullmatch(path.name)
    return match.group(1) if match else path.name.removesuffix(SUFFIX)


def file_in(directory: Path) -> Path | None:
    """The GGUF model of a directory, or its first part; None if it has none, or has safetensors. Raises GgufError if
    there are several models."""
    try:
        names = sorted(path.name for path in directory.iterdir() if path.suffix in (SUFFIX, ".safetensors"))
    except OSError:
        return None
    if any(not name.endswith(SUFFIX) for name in names):
        return None
    models: dict[str, Path] = {}
    for name in names:
        if not name.startswith(_PROJECTOR):
            models.setdefault(model_name(Path(name)), directory / name)
    if len(models) > 1:
        shown = ", ".join(path.name for path in list(models.values())[:5])
        raise GgufError(f"it contains {len(models)} GGUF models, expected 1; name one of its files: {shown}")
    return next(iter(models.values()), None)


def parts_of(path: Path) -> list[Path]:
    """All files of the model to which `path` belongs. Raises GgufError naming missing ones."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match.group(1), int(match.group(3))
    if not 1 <= count <= MAX_PARTS:
        raise GgufError(f"its name states {count} parts, expected 1 to {MAX_PARTS}")
    parts = [path.with_name(f"{stem}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise GgufError(f"it is one of {count} parts, of which are missing: {', '.join(missing[:3])}{more}")
    return parts


def files_in(directory: Path) -> list[Path]:
    """All files of the directory's GGUF model; [] if `file_in` returns None. Raises GgufError."""
    path = file_in(directory)
    return [] if path is None else parts_of(path)


def read_parts(files: Sequence[Path]) -> Header:
    """Raises GgufError naming the file, or OSError."""
    headers = [read_header(path) for path in files]
    first = headers[0]
    count = first.fields.get(_NUM_PARTS, 1)
    if count != len(files) and (count, len(files)) != (0, 1):
        raise GgufError(
            f"{files[0].name}: its field '{_NUM_PARTS}' is {short(repr(count))}, but there are {len(files)} files"
        )
    tensors = dict(first.tensors)
    for path, header in zip(files[1:], headers[1:], strict=True):
        if twice := _first(tensors.keys() & header.tensors.keys()):
            raise GgufError(f"{path.name}: its tensor '{short(twice)}' is also in another part")
        tensors |= header.tensors
    stated = first.fields.get(_NUM_TENSORS, len(tensors))
    if stated != len(tensors):
        raise GgufError(
            f"{files[0].name}: its field '{_NUM_TENSORS}' is {short(repr(stated))}, but its parts have {len(tensors)}"
        )
    return Header(first.fields, tensors)


def stamp(path: Path) -> tuple[int, ...]:
    """Identifies the version of a file. A replaced file has another stamp even if size and modification time were
    preserved, because inode and change time differ. Raises OSError."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _first(names: Iterable[str]) -> str:
    return min(names, default="")
