"""The image of one engine's model: found in the cache, or about to be written. Start here.

Used by the process that forks engines (`CachedModel`) and by the one that packs the model (`Draft.write`). Independent
of how a model is packed or computed. Invariants: importing this module imports neither torch nor transformers; a
failing cache never fails a start: a warning says why, and the model is packed again; if nothing can be written to disk,
packed weights are passed on in memory. The image's key (`ImageKey`) covers everything that affects packing, the check
of the model and the verification of its program; computing it takes a few milliseconds.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.util
import logging
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

import llmbackend
from llmbackend.gguf.files import stamp

from ..config import EngineConfig
from ..cpu.packed_decoder import Memories, PackedDecoder, PackedModel
from ..cpu.packed_parts import Bytes
from ..cpu_threads import usable_cpus
from ..errors import CheckpointError
from ..kernels import library
from ..model.checkpoint_files import MAX_HEADER_BYTES, are_gguf, config_fields, weight_files
from .cache_folder import CacheFolder, FolderRefusedError, directory_of, limit_bytes_of
from .image_file import (
    FORMAT,
    ImageDamagedError,
    ImageFile,
    Prefault,
    image_bytes,
    new_resident,
    write_image,
    write_tables,
)

logger = logging.getLogger(__name__)

_IN_MEMORY: Final = "weights"
"""The key of an image that exists only in memory, and is read by the process whose child wrote it."""
NewMemory = Callable[[int], Bytes]
"""Allocates this many bytes, as `KernelLibrary.memory` does: on huge pages, aligned, zeroed."""
_SHARES: Final = {None: 0.95, "int8": 0.45, "int4": 0.25}
"""By quantisation: estimated resident memory as a fraction of the checkpoint's size in 16 bits, slightly too low. The
loader refuses other quantisations."""
_decode = msgspec.msgpack.Decoder(PackedDecoder).decode


class CachedModel:
    """Access to one model's image. Made anew for each start, because the checkpoint may have been replaced."""

    def __init__(self, config: EngineConfig) -> None:
        """Takes a few milliseconds; never raises for a faulty cache or checkpoint."""
        self.directory = ""
        self.key = ""
        """A digest of what the image depends on; "" if it cannot be stored."""
        self.why_not = ""
        """Why the image cannot be stored on disk; "" = it can."""
        self._folder: CacheFolder | None = None
        self._name = ""
        self._resident_bytes = 0
        try:
            self._open(config)
        except (NoKeyError, CheckpointError) as error:
            self.why_not = str(error)
        except (OSError, FolderRefusedError) as error:
            self.why_not = f"the weight cache '{self.directory}' is not used: {error}"
            logger.warning("%s", self.why_not)

    def _open(self, config: EngineConfig) -> None:
        limit_bytes = limit_bytes_of(config)
        if not limit_bytes:
            raise NoKeyError("the weight cache is off")
        key = key_of(config)
        directory = directory_of(config)
        self.directory = str(directory)
        self._folder = CacheFolder(directory, limit_bytes)
        self.key, self._name = key.digest, key.file_name
        if config.dtype == "auto":
            self._resident_bytes = int(key.checkpoint_bytes * _SHARES.get(config.quantization, 0))

    def read(self, new_memory: NewMemory, num_threads: int) -> PackedModel | None:
        """The packed model, if an intact image of it exists; its reader threads have ended. Raises MemoryError."""
        image = self._find()
        if image is None:
            return None
        try:
            return _read(image, new_memory, num_threads)
        except ImageDamagedError as error:
            self._discard(str(error))
        except OSError as error:
            logger.warning("the weight cache '%s' is not read: %s", self.directory, str(error))
        finally:
            image.close()
        return None

    def has_image(self) -> bool:
        """Whether an image of the model exists; it may still prove damaged when read."""
        image = self._find()
        if image is not None:
            image.close()
        return image is not None

    def draft(self) -> Draft:
        """A draft of the image for this process or a child to write. Raises OSError if there is not even memory for
        it."""
        return Draft(self.key, self._folder and self._folder.copy(), self._name, self._resident_bytes)

    def close(self) -> None:
        """Drafts, and what was read, stay."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _find(self) -> ImageFile | None:
        if self._folder is None:
            return None
        try:
            descriptor = self._folder.open_image(self._name)
        except (OSError, FolderRefusedError) as error:
            logger.warning("the weight cache '%s' is not read: %s", self.directory, str(error))
            return None
        if descriptor is None:
            return None
        try:
            return ImageFile(descriptor, self.key)
        except ImageDamagedError as error:
            os.close(descriptor)
            self._discard(str(error))
        return None

    def _discard(self, reason: str) -> None:
        if self._folder is not None:
            path = os.path.join(self.directory, self._name)
            logger.warning("the packed weights '%s' are removed and created again: %s", path, reason)
            self._folder.remove(self._name)


class Draft:
    """An image being written, by this process or by a child that inherited it. The process that made it removes it on
    exit unless it was published."""

    def __init__(self, key: str, folder: CacheFolder | None, name: str, expected_bytes: int = 0) -> None:
        """Owns the folder. expected_bytes: approximate resident memory; 0 = unknown."""
        self._key, self._name = key, name
        self._folder = folder
        self._file, self._unfinished = -1, ""
        self._in_place: Bytes | None = None
        self._tables: Bytes | None = None
        self._expected_bytes = expected_bytes
        self._prefault: Prefault | None = None
        self._has_failed = False
        self._memory = os.memfd_create("llmbackend-weights", os.MFD_CLOEXEC)
        if folder is not None:
            try:
                self._file, self._unfinished = folder.new_file()
            except OSError as error:
                self._give_up(error)
        atexit.register(self._clear, os.getpid())

    def prefault(self) -> None:
        """Starts allocating, on a thread, the memory that `new_memory` will probably need."""
        if self._expected_bytes and (memory := self.new_memory(self._expected_bytes)) is not None:
            self._prefault = Prefault(memory)

    def new_memory(self, size_bytes: int) -> Bytes | None:
        """Memory in the image's file, so that a packed model need not be copied afterwards; None if that costs more
        than a copy. Discards earlier contents, so only one process may use it at a time."""
        self._in_place = self._tables = None
        if self._folder is None or not self._is_unpublished():
            return None
        try:
            if self._prefault is None:
                os.ftruncate(self._file, 0)
            else:
                self._prefault.stop()
                self._prefault = None
            self._folder.reserve(self._file, image_bytes(size_bytes, 0, 0))
            self._in_place = new_resident(self._file, size_bytes)
        except OSError as error:
            self._give_up(error)
        return self._in_place

    def write_tables(self, resident: Bytes, tables: Sequence[tuple[int, Bytes]], size_bytes: int) -> Bytes | None:
        """Writes sparsely read arrays, by their offsets, after `resident`, which is the used part of `new_memory`, and
        returns them as mapped memory; None = the caller allocates its own."""
        if self._folder is None or not size_bytes or not self._has(self._in_place, resident):
            return None
        try:
            self._folder.reserve(self._file, image_bytes(len(resident), size_bytes, 0))
            self._tables = write_tables(self._file, len(resident), tables, size_bytes, usable_cpus())
        except OSError as error:
            self._give_up(error)
        return self._tables

    def write(self, packed: PackedModel, num_threads: int) -> None:
        """Writes to the file, or to memory if the file cannot be written. Raises OSError if neither has space."""
        description = msgspec.msgpack.encode(packed.decoder)
        resident, mapped = packed.memories.resident, packed.memories.mapped
        parts = (description, resident, mapped, num_threads)
        has_resident, has_mapped = self._has(self._in_place, resident), self._has(self._tables, mapped)
        if self._folder is not None and self._is_unpublished():
            try:
                self._folder.reserve(self._file, image_bytes(len(resident), len(mapped), len(description)))
                write_image(self._file, self._key, *parts, has_resident=has_resident, has_mapped=has_mapped)
                return
            except OSError as error:
                self._give_up(error)
        write_image(self._memory, _IN_MEMORY, *parts)
        self.abandon()

    def _is_unpublished(self) -> bool:
        """Others may have mapped a published image, so it is never written to again."""
        if self._folder is None or self._file < 0 or self._has_failed:
            return False
        return self._folder.holds(self._file, self._unfinished)

    def _give_up(self, error: OSError) -> None:
        """This process stops writing to the file."""
        self._has_failed = True
        logger.warning("packed weights are not cached: %s", str(error))

    @staticmethod
    def _has(ours: Bytes | None, memory: Bytes) -> bool:
        return ours is not None and np.shares_memory(ours, memory)

    def abandon(self) -> None:
        """The file is not needed; its pages stay for whoever maps them."""
        if self._prefault is not None:
            self._prefault.stop()
            self._prefault = None
        if self._in_place is None and self._folder is not None and self._folder.holds(self._file, self._unfinished):
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)  # its descriptors may stay open for long
        if self._folder is not None and self._unfinished:
            self._folder.remove(self._unfinished)

    def read(self, new_memory: NewMemory, num_threads: int) -> PackedModel | None:
        """What was written, even before it is published; None = nothing was, or the writer was killed. Raises
        MemoryError."""
        for descriptor, key in self._places():
            try:
                image = ImageFile(descriptor, key)
                packed = _read(image, new_memory, num_threads)
            except ImageDamagedError as error:
                logger.info("packed weights were not finished: %s", str(error))
                continue
            if descriptor == self._memory:
                image.release_resident()
            return packed
        return None

    def is_written(self) -> bool:
        """Whether a process has completed it, according to its header."""
        for descriptor, key in self._places():
            with contextlib.suppress(ImageDamagedError):
                ImageFile(descriptor, key)
                return True
        return False

    def _places(self) -> Iterator[tuple[int, str]]:
        for descriptor, key in ((self._file, self._key), (self._memory, _IN_MEMORY)):
            if descriptor >= 0 and os.fstat(descriptor).st_size:
                yield descriptor, key

    def publish(self) -> None:
        """Makes what was written the model's image in the cache, once it is on disk, which may take seconds. No effect
        if it is in memory, or was published by another process."""
        if self._folder is None or self._file < 0 or not os.fstat(self._file).st_size:
            return
        try:
            self._folder.publish(self._file, self._unfinished, self._name)
        except FileNotFoundError:
            logger.debug("the image %s was published before", self._name)
        except OSError as error:
            logger.warning("packed weights are not cached: %s", str(error))

    def _clear(self, pid: int) -> None:
        """When the process that made the draft exits: its children have ended by then."""
        if os.getpid() == pid:
            self.abandon()

    def close(self) -> None:
        atexit.unregister(self._clear)
        os.close(self._memory)
        if self._folder is not None:
            if self._file >= 0:
                self._folder.remove(self._unfinished)
                os.close(self._file)
            self._folder.close()
            self._folder = None


def _read(image: ImageFile, new_memory: NewMemory, num_threads: int) -> PackedModel:
    """Raises ImageDamagedError or MemoryError. Every location in the description lies within its memory."""
    description, resident, mapped = image.read(new_memory, num_threads)
    memories = Memories(resident, mapped, is_file=True)
    try:
        decoder = _decode(description)
        decoder.check(memories)
    except (ValueError, UnicodeError, RecursionError, OverflowError) as error:
        raise ImageDamagedError(f"its description is broken: {error}") from None
    return PackedModel(decoder, memories)


_LIBRARIES: Final = ("torch", "transformers", "safetensors", "numpy", "gguf")
_ARGUMENTS: Final = ("dtype", "quantization", "max_model_len", "load_format", "seed", "trust_remote_code", "kernels",
                     "block_size")  # fmt: skip
"""Engine arguments that affect what is packed, or whether a program can run it."""
_CODE: Final = ("attention", "cpu", "gpu/ops", "gpu/weights", "kernels", "model", "weight_cache")
"""Packages of the engine whose code packs, checks and verifies, besides what reads GGUF files."""
_OFFLINE: Final = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE: Final = ("1", "ON", "YES", "TRUE")
"""As huggingface_hub parses its variables."""
_CONFIGS: Final = ("config.json", "generation_config.json")


class ImageKey(msgspec.Struct, frozen=True):
    """model: the folder's name, for people; digest: of everything that the image depends on, in hex; checkpoint_bytes:
    size of the weight files; 0 if these are packed more tightly than in memory."""

    model: str
    digest: str
    checkpoint_bytes: int

    @property
    def file_name(self) -> str:
        return f"{self.model}-{self.digest}.image"


class NoKeyError(Exception):
    """Why this model has no image in the cache."""


def key_of(config: EngineConfig) -> ImageKey:
    """Raises NoKeyError, OSError or CheckpointError."""
    if config.load_format == "dummy":
        raise NoKeyError("load_format is 'dummy'")
    directory = _directory(config.model)
    configs = {name: _contents(directory / name) for name in _CONFIGS}
    stated = config_fields(configs["config.json"])
    if config.trust_remote_code and "auto_map" in stated:
        raise NoKeyError("the checkpoint brings its own code")
    weights = weight_files(directory)
    depends_on = (
        FORMAT,
        configs,
        [(path.name, stamp(path), "" if are_gguf(weights) else _header_digest(path)) for path in weights],
        [getattr(config, name) for name in _ARGUMENTS],
        _this_program(),
        _this_machine(),
    )
    named = config.model if not Path(config.model).is_dir() else directory.resolve().name
    name = re.sub(r"[^\w.-]+", "_", named)[:80] or "model"
    digest = hashlib.sha256(msgspec.msgpack.encode(depends_on)).hexdigest()[:40]
    size_bytes = 0 if are_gguf(weights) else sum(path.stat().st_size for path in weights)
    return ImageKey(name, digest, size_bytes)


def _directory(model: str) -> Path:
    """The checkpoint's folder; for a hub id its snapshot, if huggingface_hub may not look for a newer one. Raises
    NoKeyError."""
    if Path(model).is_dir():
        return Path(model)
    if not is_offline():
        raise NoKeyError(
            "the model is not a folder: a hub id may refer to another revision at any time, unless HF_HUB_OFFLINE=1"
        )
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    hub = Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))
    repository = hub / f"models--{model.replace('/', '--')}"
    try:
        return repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except (OSError, UnicodeError) as error:
        raise NoKeyError(f"'{model}' has no snapshot in {hub}: {error}") from None


def is_offline() -> bool:
    """Whether the environment currently forbids downloads."""
    return next(filter(None, map(os.environ.get, _OFFLINE)), "").upper() in _TRUE


def _contents(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _header_digest(path: Path) -> str:
    with path.open("rb") as file:
        length = file.read(8)
        size_bytes = min(int.from_bytes(length, "little"), MAX_HEADER_BYTES)
        return hashlib.sha256(length + file.read(size_bytes)).hexdigest()


def _this_program() -> tuple[Any, ...]:
    engine = Path(__file__).parent.parent
    sources = sorted(path for package in _CODE for path in (engine / package).glob("*.py"))
    sources += sorted((engine.parent / "gguf").glob("*.py"))
    code = [(str(path.relative_to(engine.parent)), path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    return llmbackend.__version__, sys.version, [_version(name) for name in _LIBRARIES], code


def _version(package: str) -> str:
    """The version of an installed package, without importing it: the name of its metadata folder, and when it was
    installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return f"no {package}"
    place = Path(next(iter(spec.submodule_search_locations)))
    installed = sorted(place.parent.glob(f"{package}-*.dist-info"))
    # The time of the package's own folder would change with the first import, which writes bytecode there.
    return f"{place} {[(path.name, path.stat().st_mtime_ns) for path in installed]}"


def _this_machine() -> tuple[Any, ...]:
    built = sorted(Path(library.__file__).parent.glob("_*.so"))
    kernels = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in built]
    return platform.machine(), _processor(), library.available(), kernels


def _processor() -> str:
    """The processor's name and features, from the first entry of /proc/cpuinfo."""
    try:
        with Path("/proc/cpuinfo").open("rb") as file:
            entry = file.read(16384).partition(b"\n\n")[0].decode(errors="replace")
    except OSError:
        return os.uname().version
    kept = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in entry.splitlines() if line.startswith(kept))
