"""Model names and model files: directories, change detection, versions.

Source: ModelTimestamp and VersionsToLoad in Triton's core.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NewType

from tritonclient.grpc.model_config_pb2 import ModelConfig

from ..config.model_config import CONFIG_FILE_NAME
from ..errors import invalid_argument, not_found, shown_name

log = logging.getLogger(__name__)

SEPARATOR = "::"
ModelIdentifier = NewType("ModelIdentifier", str)
"""The key of a model, unique in the server; a type of its own, because a client's name is not a key."""


def identifier(namespace: str, name: str) -> ModelIdentifier:
    return ModelIdentifier(f"{namespace}{SEPARATOR}{name}" if namespace else name)


class ModelNames:
    """Maps names to the keys of models that were read and not unloaded. Thread-safe.

    With namespacing, several models may have the same name. Triton's protocols cannot express a namespace, so such a
    name can be listed, loaded and unloaded, but not used for inference. Ensembles may use keys instead of names. A
    model may have additional names (`served_names`) for inference, except those that are another model's own name.
    """

    def __init__(self, is_namespacing: bool) -> None:
        self.is_namespacing = is_namespacing
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}
        self._keys: dict[str, set[str]] = {}
        self._served: dict[str, ModelIdentifier] = {}

    def add(self, name: str, key: ModelIdentifier) -> bool:
        """Returns whether the model is new."""
        with self._lock:
            is_new = key not in self._names
            self._names[key] = name
            self._keys.setdefault(name, set()).add(key)
            return is_new

    def serve_as(self, key: ModelIdentifier, served_names: Sequence[str]) -> None:
        """Replaces the model's additional names, unless it has been discarded. A name that several models claim belongs
        to the first."""
        with self._lock:
            name = self._names.get(key)
            if name is None:
                return
            self._forget_served(key)
            for served in served_names:
                if self._served.setdefault(served, key) != key:
                    log.warning("model '%s' is not served as '%s': '%s' is", name, served, self._served[served])

    def discard(self, key: str) -> None:
        with self._lock:
            name = self._names.pop(key, None)
            if name is not None:
                self._keys[name].discard(key)  # the empty set remains, because the name is known
                self._forget_served(key)

    def _forget_served(self, key: str) -> None:
        self._served = {served: other for served, other in self._served.items() if other != key}

    def known(self) -> list[str]:
        with self._lock:
            return sorted(self._names)

    def served_names(self, key: str) -> list[str]:
        with self._lock:
            return [served for served, other in self._served.items() if other == key]

    def plain(self, key: str) -> str:
        """The name part of a key."""
        return key.rpartition(SEPARATOR)[2] if self.is_namespacing else key

    def namespace(self, key: str) -> str:
        """The namespace part of a key; "" without namespacing."""
        return key.rpartition(SEPARATOR)[0] if self.is_namespacing else ""

    def keys(self, name: str) -> list[ModelIdentifier]:
        """The models with this name or key."""
        with self._lock:
            if name in self._served and name not in self._names and not self._keys.get(name):
                return [self._served[name]]
            if not self.is_namespacing:
                return [ModelIdentifier(name)]
            keys = {name} if name in self._names else self._keys.get(name, ())
            return [ModelIdentifier(key) for key in sorted(keys)]

    def key(self, name: str) -> ModelIdentifier:
        """The only model with this name or key. Raises TritonError with Triton's texts: INVALID_ARG for no model or
        several, NOT_FOUND for an unloaded one."""
        if not self.is_namespacing and not self._served:
            return ModelIdentifier(name)
        keys = self.keys(name)
        if not keys and name in self._keys:
            raise not_found(f"Identifier of model '{name}' is not found in global map")
        if not keys:
            raise invalid_argument(f"Request for unknown model: '{shown_name(name)}' is not found")
        if len(keys) > 1:
            raise invalid_argument(
                f"There are {len(keys)} identifiers of model '{shown_name(name)}' in global map, model namespace must "
                f"be provided to resolve ambiguity."
            )
        return keys[0]


MAX_VERSION = 2**63 - 1
CONFIG_DIRECTORY = "configs"
NOT_VERSIONS = (CONFIG_DIRECTORY, "warmup", "initial_state")
"""Directories that are not versions."""

Signature = tuple[tuple[str, int, int], ...]
"""(relative path, mtime ns, size) of every file and directory of a model. If equal, a load would read the same."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's directory in a repository. namespace: "" without namespacing."""

    name: str
    directory: Path
    namespace: str = ""

    @property
    def key(self) -> ModelIdentifier:
        return identifier(self.namespace, self.name)


def config_path(directory: Path, config_name: str) -> Path:
    """The model's `configs/<config_name>.pbtxt` if it exists, else its config.pbtxt."""
    if config_name:
        custom = directory / CONFIG_DIRECTORY / f"{config_name}.pbtxt"
        if custom.is_file():
            return custom
    return directory / CONFIG_FILE_NAME


def signature_of(directory: Path) -> Signature:
    """Follows symbolic links, because a version's directory may be one. Ignores bytecode caches, which loading a Python
    model may write, and directory times, which they change."""
    return tuple(_entries(directory, "", ()))


def _entries(directory: Path, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, int, int]]:
    """prefix: before each path. above: the directories that lead here, because a link may lead back to one of them."""
    stat = directory.stat()
    identity = (stat.st_dev, stat.st_ino)
    if identity in above:
        return
    try:
        paths = sorted(directory.iterdir())
    except PermissionError:  # such as lost+found: no part of the model
        return
    for path in paths:
        relative = f"{prefix}{path.name}"
        if path.name == "__pycache__":
            continue
        if path.is_dir():
            yield f"{relative}/", 0, 0
            yield from _entries(path, f"{relative}/", (*above, identity))
        else:
            stat = path.stat()
            yield relative, stat.st_mtime_ns, stat.st_size


def is_version_affected(old: Signature, new: Signature, version: int, config: str) -> bool:
    """Whether a changed file can affect this version: it is in the version's directory, or outside all versions and not
    the configuration (`config`, relative to the model's directory)."""
    config_entry = PurePath(config).parts[0]
    return _affecting(old, version, config_entry) != _affecting(new, version, config_entry)


def _affecting(signature: Signature, version: int, config_entry: str) -> list[tuple[str, int, int]]:
    kept = []
    for entry in signature:
        top = PurePath(entry[0]).parts[0]
        if top == str(version) or (top != config_entry and not top.isdigit()):
            kept.append(entry)
    return kept


def select_versions(config: ModelConfig, directory: Path) -> tuple[int, ...]:
    """The versions selected by the policy, ascending. Directories with other names are ignored with a WARNING."""
    available = sorted(_version_directories(directory))
    policy = config.version_policy
    if policy.HasField("all"):
        return tuple(available)
    if policy.HasField("specific"):
        wanted = set(policy.specific.versions)
        for missing in sorted(wanted.difference(available)):
            log.error(
                "version %d is specified for model '%s', but the version directory is not present", missing, config.name
            )
        return tuple(version for version in available if version in wanted)
    return tuple(available[-policy.latest.num_versions :])


def _version_directories(directory: Path) -> list[int]:
    available = []
    for entry in sorted(directory.iterdir()):
        if not entry.is_dir() or entry.name.startswith((".", "__")):
            continue
        is_number = entry.name.isascii() and entry.name.isdigit()
        if is_number and not entry.name.startswith("0") and int(entry.name) <= MAX_VERSION:
            available.append(int(entry.name))
        elif is_number and entry.name.startswith("0"):
            log.warning("ignore version directory '%s' which contains leading zeros in its directory name", entry.name)
        elif entry.name not in NOT_VERSIONS:
            log.warning("ignore version directory '%s' which fails to convert to integral number", entry.name)
    return available
