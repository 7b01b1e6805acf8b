"""What should be loaded: model directories, their configurations and the versions that their policy selects.

For: the server, which hands the answer to the life cycle. Does not know: backends, states of versions. Invariants: no
name and no path given by a client leaves the repository; what `poll` returns has been checked by every rule that
needs no backend.
Source: Triton's model repository manager (reference §1.6); golden transcripts 05 to 08, 57.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from .errors import ErrorCode, TritonError, internal, invalid_argument
from .load_parameters import FILE_PREFIX, OverrideError, check_load_parameters, check_model_name, write_files
from .messages import LoadParameters
from .model_config import CONFIG_FILE_NAME, fill_backend, parse_json, read_config, set_defaults
from .model_config_rules import validate_config

log = logging.getLogger(__name__)

LARGEST_VERSION = 2**63 - 1
Signature = tuple[tuple[str, int, int], ...]
"""(relative path, mtime ns, size) of every file of a model directory: equal signatures mean nothing changed."""


@dataclass(eq=False)
class ModelSpec:
    """One model as it should be loaded. `has_override` says that `config` came with the request and not from
    `directory`.
    """

    name: str
    directory: Path
    config: ModelConfig
    versions: tuple[int, ...]
    signature: Signature
    has_override: bool = False
    _temporary: weakref.finalize[Any, ModelSpec] | None = field(default=None, repr=False)

    def own(self, directory: Path) -> None:
        """Removes `directory` when nobody uses this specification any more."""
        self._temporary = weakref.finalize(self, shutil.rmtree, directory, True)


class ModelRepository:
    """Reads repositories. Owner of one temporary directory for models that came with their load request."""

    def __init__(self, roots: Sequence[Path], auto_complete_config: bool) -> None:
        self._roots = tuple(roots)
        self._auto_complete_config = auto_complete_config
        self._lock = threading.Lock()
        self._uploads: Path | None = None

    def check(self) -> None:
        """Raises TritonError INTERNAL when a repository is no directory."""
        for root in self._roots:
            if not root.is_dir():
                raise internal(f"failed to stat file {root}: a model repository must be a directory")

    def names(self) -> dict[str, int]:
        """Every model directory's name, sorted, with the number of repositories that have it."""
        counts: dict[str, int] = {}
        for root in self._roots:
            for entry in root.iterdir():
                if entry.is_dir() and not entry.name.startswith("."):
                    counts[entry.name] = counts.get(entry.name, 0) + 1
        return dict(sorted(counts.items()))

    def poll(self, name: str, parameters: LoadParameters | None = None) -> ModelSpec:
        """The model `name` as it stands on disk, or as `parameters` override it.

        Raises TritonError INVALID_ARG for a bad name, INTERNAL (Triton's text, the cause in the log) for anything else.
        """
        check_model_name(name)
        check_load_parameters(parameters or {})
        try:
            if parameters and any(key.startswith(FILE_PREFIX) for key in parameters):
                return self._poll_files(name, parameters)
            return self._poll_directory(name, parameters)
        except OverrideError:
            raise
        except (TritonError, OSError) as error:
            log.error("failed to poll model '%s': %s", name, error)
            if isinstance(error, TritonError) and error.code is ErrorCode.UNSUPPORTED:
                raise
            raise internal(f"failed to load '{name}', failed to poll from model repository") from None

    def _poll_directory(self, name: str, parameters: LoadParameters | None) -> ModelSpec:
        directory = self._find(name)
        signature = signature_of(directory)
        override = parameters.get("config") if parameters else None
        if override is not None:
            config = parse_json(override)
        elif (directory / CONFIG_FILE_NAME).is_file():
            config = read_config(directory / CONFIG_FILE_NAME)
        elif self._auto_complete_config:
            config = ModelConfig()
        else:
            raise invalid_argument(f"model configuration is not provided for model '{name}'")
        return _spec(name, directory, config, signature, has_override=override is not None)

    def _poll_files(self, name: str, parameters: LoadParameters) -> ModelSpec:
        """A model made of the request's files alone, in a directory that lives as long as the specification."""
        override = parameters.get("config")
        if override is None:
            raise invalid_argument(f"model '{name}': a 'file:' override needs a 'config' override with it")
        config = parse_json(override)
        root = Path(tempfile.mkdtemp(dir=self._upload_directory()))
        directory = root / name
        try:
            directory.mkdir()
            write_files(directory, parameters)
            spec = _spec(name, directory, config, (), has_override=True)
        except BaseException:
            shutil.rmtree(root, ignore_errors=True)
            raise
        spec.own(root)
        return spec

    def close(self) -> None:
        """Removes what is left of models that came with their load request."""
        with self._lock:
            directory, self._uploads = self._uploads, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    def _upload_directory(self) -> Path:
        with self._lock:
            if self._uploads is None:
                self._uploads = Path(tempfile.mkdtemp(prefix="llmbackend-models-"))
            return self._uploads

    def _find(self, name: str) -> Path:
        found = [root / name for root in self._roots if (root / name).is_dir()]
        if not found:
            raise invalid_argument(f"model '{name}' is in no model repository")
        if len(found) > 1:
            raise invalid_argument(f"model '{name}' appears in two or more repositories")
        return found[0]


def signature_of(directory: Path) -> Signature:
    """Files of bytecode caches do not count: loading a Python model writes them."""
    entries = []
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        if "__pycache__" in relative.parts or not path.is_file():
            continue
        stat = path.stat()
        entries.append((str(relative), stat.st_mtime_ns, stat.st_size))
    return tuple(entries)


def select_versions(config: ModelConfig, directory: Path) -> tuple[int, ...]:
    """The version directories that the policy selects, ascending. Names with a leading zero or that are no number are
    ignored with a warning."""
    available = []
    for entry in sorted(directory.iterdir()):
        if not entry.is_dir() or entry.name.startswith((".", "__")):
            continue
        is_number = entry.name.isascii() and entry.name.isdigit()
        if is_number and not entry.name.startswith("0") and int(entry.name) <= LARGEST_VERSION:
            available.append(int(entry.name))
        elif is_number and entry.name.startswith("0"):
            log.warning("ignore version directory '%s' which contains leading zeros in its directory name", entry.name)
        elif entry.name not in ("configs", "warmup", "initial_state"):
            log.warning("ignore version directory '%s' which fails to convert to integral number", entry.name)
    available.sort()
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


def _spec(name: str, directory: Path, config: ModelConfig, signature: Signature, has_override: bool) -> ModelSpec:
    if config.name and config.name != name:
        raise invalid_argument(
            f"unexpected directory name '{name}' for model '{config.name}', directory name must equal model name"
        )
    config.name = name
    fill_backend(config, directory)
    set_defaults(config)
    validate_config(config)
    return ModelSpec(name, directory, config, select_versions(config, directory), signature, has_override)
