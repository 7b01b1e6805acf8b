"""The files of a model: where its directory is, what has changed in it, which versions it has.

For: the repository, which reads models, and the life cycle, which asks what a change affects. Does not know: what a
configuration means beyond its version policy. Invariant: equal signatures mean that nothing changed that a load would
read. Source: ModelTimestamp and VersionsToLoad in Triton's core.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path, PurePath

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.config.model_config import CONFIG_FILE_NAME

from .model_names import ModelIdentifier, identifier

log = logging.getLogger(__name__)

MAX_VERSION = 2**63 - 1
CONFIG_DIRECTORY = "configs"
NOT_VERSIONS = (CONFIG_DIRECTORY, "warmup", "initial_state")
"""Directories beside the versions that have a meaning of their own."""

Signature = tuple[tuple[str, int, int], ...]
"""(relative path, mtime ns, size) of every file and directory of a model."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's directory in a repository. `namespace` is "" unless the same name may stand for several models."""

    name: str
    directory: Path
    namespace: str = ""

    @property
    def key(self) -> ModelIdentifier:
        """Unique in the server."""
        return identifier(self.namespace, self.name)


def config_path(directory: Path, config_name: str) -> Path:
    """`configs/<config_name>.pbtxt` of a model that has it, else its config.pbtxt."""
    if config_name:
        custom = directory / CONFIG_DIRECTORY / f"{config_name}.pbtxt"
        if custom.is_file():
            return custom
    return directory / CONFIG_FILE_NAME


def signature_of(directory: Path) -> Signature:
    """Of all files and directories below. Bytecode caches, which loading a Python model writes, do not count; of a
    directory only its existence does, because they change its time."""
    entries = []
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        if "__pycache__" in relative.parts:
            continue
        if path.is_dir():
            entries.append((f"{relative}/", 0, 0))
        else:
            stat = path.stat()
            entries.append((str(relative), stat.st_mtime_ns, stat.st_size))
    return tuple(entries)


def is_version_affected(old: Signature, new: Signature, version: int, config: str) -> bool:
    """Whether a difference can affect this version: in its directory, or beside the versions. The configuration
    (`config`, relative to the model's directory) and other versions do not count."""
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
    """The version directories that the policy selects, ascending. Names that are not a number or have a leading zero
    are ignored with a warning."""
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
