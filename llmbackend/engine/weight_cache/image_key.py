"""What a packed model depends on, as one key: an image with the same key gives the same tokens.

For: the cache. Does not know: files of images. Invariants: costs some milliseconds and imports neither torch nor
transformers; whatever changes what packing, the check of the model or the verification of its program would give is in
the key: the checkpoint's files (size, times, inode, header), its config, the code that packs, its libraries, the
kernels, this processor, and the engine arguments that packing reads.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

import llmbackend

from ..config import EngineConfig
from ..errors import CheckpointError
from ..kernels import library
from ..model.checkpoint_files import MAX_HEADER_BYTES, weight_files
from .image_file import FORMAT

_LIBRARIES: Final = ("torch", "transformers", "safetensors", "numpy")
_ARGUMENTS: Final = ("dtype", "quantization", "max_model_len", "load_format", "seed", "trust_remote_code", "kernels",
                     "block_size")  # fmt: skip
"""Engine arguments that change what is packed, or whether a program can run it."""
_CODE: Final = ("attention", "cpu", "kernels", "model", "weight_cache")
"""Packages of the engine whose code packs, checks and verifies."""
_OFFLINE: Final = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE: Final = ("1", "ON", "YES", "TRUE")
"""As huggingface_hub reads its variables."""
_CONFIGS: Final = ("config.json", "generation_config.json")


class ImageKey(msgspec.Struct, frozen=True):
    """model: the folder's name, for people; digest: of everything that the image depends on, in hex;
    checkpoint_bytes: of the files with weights."""

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
    stated = _fields(configs["config.json"])
    if config.trust_remote_code and "auto_map" in stated:
        raise NoKeyError("the checkpoint brings its own code")
    weights = weight_files(directory, str(stated.get("transformers_weights") or ""))
    depends_on = (
        FORMAT,
        configs,
        [(path.name, _stamp(path), _header_digest(path)) for path in weights],
        [getattr(config, name) for name in _ARGUMENTS],
        _this_program(),
        _this_machine(),
    )
    named = config.model if not Path(config.model).is_dir() else directory.resolve().name
    name = re.sub(r"[^\w.-]+", "_", named)[:80] or "model"
    digest = hashlib.sha256(msgspec.msgpack.encode(depends_on)).hexdigest()[:40]
    return ImageKey(name, digest, sum(path.stat().st_size for path in weights))


def _directory(model: str) -> Path:
    """The checkpoint's folder; of a hub id its snapshot, where huggingface_hub may not look for a newer one. Raises
    NoKeyError."""
    if Path(model).is_dir():
        return Path(model)
    if next(filter(None, map(os.environ.get, _OFFLINE)), "").upper() not in _TRUE:
        raise NoKeyError(
            "the model is not a folder: a hub id may refer to another revision at any time, unless HF_HUB_OFFLINE=1"
        )
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
    repository = hub / f"models--{model.replace('/', '--')}"
    try:
        return repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except (OSError, UnicodeError) as error:
        raise NoKeyError(f"'{model}' has no snapshot in {hub}: {error}") from None


def _contents(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _fields(config_json: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(config_json, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CheckpointError(f"its config.json is not a JSON object: {error}") from None


def _stamp(path: Path) -> tuple[int, ...]:
    """A file that was replaced has another one, even where the size and the time of the last change are kept: both
    the inode and the time at which these were set change."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _header_digest(path: Path) -> str:
    with path.open("rb") as file:
        length = file.read(8)
        size_bytes = min(int.from_bytes(length, "little"), MAX_HEADER_BYTES)
        return hashlib.sha256(length + file.read(size_bytes)).hexdigest()


def _this_program() -> tuple[Any, ...]:
    engine = Path(__file__).parent.parent
    sources = sorted(path for package in _CODE for path in (engine / package).glob("*.py"))
    code = [(str(path.relative_to(engine)), path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    return llmbackend.__version__, sys.version, [_version(name) for name in _LIBRARIES], code


def _version(package: str) -> str:
    """Of an installed package, which is not imported: the name of its folder of metadata, and when it was installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return f"no {package}"
    place = Path(next(iter(spec.submodule_search_locations)))
    installed = sorted(place.parent.glob(f"{package}-*.dist-info"))
    # Of the package's own folder the time would change with the first import, which writes bytecode there.
    return f"{place} {[(path.name, path.stat().st_mtime_ns) for path in installed]}"


def _this_machine() -> tuple[Any, ...]:
    built = sorted(Path(library.__file__).parent.glob("_*.so"))
    kernels = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in built]
    return platform.machine(), _processor(), library.available(), kernels


def _processor() -> str:
    """Its name and what it can execute, by the kernel's first entry."""
    try:
        with Path("/proc/cpuinfo").open("rb") as file:
            entry = file.read(16384).partition(b"\n\n")[0].decode(errors="replace")
    except OSError:
        return os.uname().version
    kept = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in entry.splitlines() if line.startswith(kept))
