"""ModelRepository: model directories, their configurations, and the overrides in load requests.

Invariants: no name or path from a client leads out of the repository or the model's directory; a specification from
`poll` (with repository agents, from `ask_agents`) satisfies all rules that do not depend on the backend. Source:
Triton's ModelRepositoryManager; golden transcripts 05 to 08, 57.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.fork_server.process_resources import OwnedFolder

from ..config.model_config import CONFIG_FILE_NAME, fill_backend, parse_json, read_config, set_defaults
from ..config.model_config_rules import validate_config
from ..errors import ErrorCode, OverrideError, TritonError, internal, invalid_argument
from ..json_text import json_depth
from ..messages import LoadParameters
from .model_files import (
    SEPARATOR,
    ModelIdentifier,
    ModelSource,
    Signature,
    config_path,
    identifier,
    select_versions,
    signature_of,
)
from .repository_agents import AgentChain, AgentManager

log = logging.getLogger(__name__)

FILE_PREFIX = "file:"
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 1024
MAX_CONFIG_BYTES = 1 << 20
MAX_JSON_DEPTH = 100
_SHOWN_CHARACTERS = 100
DUPLICATE = "model appears in two or more repositories"


@dataclass(eq=False)
class ModelSpec:
    """One model to load.

    directory: contains the versions: `home` unless a repository agent has moved the model
    home: its directory in the repository
    versions: those selected by the policy, ascending
    signature: of `home`; () if the model's files came with the load request
    has_override: whether `config` came with the load request
    namespace: the repository's path with --model-namespacing, else ""
    config_file: path of the configuration file, relative to `home`
    step_names: with namespacing, the model names in an ensemble's configuration; `config` contains their keys instead
    agents: the repository agents to notify of the end of the load
    """

    name: str
    directory: Path
    home: Path
    config: ModelConfig
    versions: tuple[int, ...] = ()
    signature: Signature = ()
    has_override: bool = False
    namespace: str = ""
    config_file: str = CONFIG_FILE_NAME
    step_names: tuple[str, ...] = ()
    agents: AgentChain | None = None
    _temporary: weakref.finalize[Any, ModelSpec] | None = field(default=None, repr=False)

    @property
    def key(self) -> ModelIdentifier:
        return identifier(self.namespace, self.name)

    @property
    def has_agents(self) -> bool:
        """If True, `versions` are known only after `ask_agents`."""
        return bool(self.config.model_repository_agents.agents)

    def own(self, directory: Path) -> None:
        """Removes `directory` when this object is garbage-collected."""
        self._temporary = weakref.finalize(self, shutil.rmtree, directory, True)


class ModelRepository:
    """Reads repositories. Owns a temporary directory for models whose files came with the load request."""

    def __init__(
        self,
        roots: Sequence[Path],
        auto_complete_config: bool,
        agents: AgentManager | None = None,
        config_name: str = "",
        is_namespacing: bool = False,
    ) -> None:
        self._roots = tuple(dict.fromkeys(roots))
        self._auto_complete_config = auto_complete_config
        self._agents = AgentManager(None) if agents is None else agents
        self._config_name = config_name
        self._is_namespacing = is_namespacing
        self._lock = threading.Lock()
        self._uploads: OwnedFolder | None = None

    def exclude_unreadable(self) -> list[TritonError]:
        """Ignores the repositories that cannot be read from now on. Returns an INTERNAL error for each of them."""
        errors = {root: error for root in self._roots if (error := _why_unreadable(root)) is not None}
        self._roots = tuple(root for root in self._roots if root not in errors)
        return list(errors.values())

    def listing(self) -> dict[str, list[ModelSource]]:
        """The directories of all models by key, sorted. A model with several directories must not be loaded. Raises
        OSError if a repository cannot be read."""
        found: dict[str, list[ModelSource]] = {}
        for root in self._roots:
            for entry in root.iterdir():
                if entry.is_dir() and not entry.name.startswith("."):
                    source = self._source(root, entry.name)
                    found.setdefault(source.key, []).append(source)
        return dict(sorted(found.items()))

    def is_linked(self, spec: ModelSpec) -> bool:
        """Whether the steps of an ensemble still refer to the same models as when `spec` was read."""
        links = [self._composing_key(spec.namespace, name) for name in spec.step_names]
        return not links or links == [step.model_name for step in spec.config.ensemble_scheduling.step]

    def signature(self, source: ModelSource) -> Signature:
        """Raises TritonError INTERNAL if the directory cannot be read."""
        with polling(source.key, source.name):
            return signature_of(source.directory)

    def poll(self, name: str, parameters: LoadParameters | None = None) -> dict[str, ModelSpec | TritonError]:
        """The models with that name (or key) by key, with the overrides in `parameters`; with namespacing, one per
        repository that has the name. An unusable model is replaced by an error: INVALID_ARG for an invalid name or
        override, else INTERNAL with Triton's text (and the cause is logged)."""
        try:
            check_load_parameters(name, parameters or {})
            if any(key.startswith(FILE_PREFIX) for key in parameters or {}):  # the model's files
                check_model_name(name)
                return {name: self._upload(name, parameters or {})}
            sources = self._find(name)
        except TritonError as error:
            return {name: error}
        return {source.key: self._read_or_error(source, parameters) for source in sources}

    def ask_agents(self, spec: ModelSpec) -> None:
        """Asks a model's repository agents, which may refuse the load or move the model, and completes `spec`. The
        caller must notify `spec.agents` when the load has ended. Raises TritonError INTERNAL with Triton's text (and
        the cause is logged)."""
        if not spec.has_agents:
            return
        with polling(spec.key, spec.name):
            agents = self._agents.load(spec.config, spec.home, self._config_name)
            try:
                spec.directory = agents.location
                _normalise(spec)
            except BaseException:
                agents.close()
                raise
            spec.agents = agents

    def close(self) -> None:
        """Removes the files that came with load requests."""
        with self._lock:
            folder, self._uploads = self._uploads, None
        if folder is not None:
            folder.remove()

    # --- reading ----------------------------------------------------------------------------------------------------

    def _source(self, root: Path, name: str) -> ModelSource:
        return ModelSource(name, root / name, str(root) if self._is_namespacing else "")

    def _find(self, key: str) -> list[ModelSource]:
        namespace, _, name = key.rpartition(SEPARATOR) if self._is_namespacing else ("", "", key)
        check_model_name(name)
        roots = [root for root in self._roots if namespace in ("", str(root))]
        with polling(name):
            found = [self._source(root, name) for root in roots if (root / name).is_dir()]
            if not found:
                raise invalid_argument(f"model '{name}' is in no model repository")
            if len(found) > 1 and not self._is_namespacing:
                raise invalid_argument(f"model '{name}': {DUPLICATE}")
            return found

    def _read_or_error(self, source: ModelSource, parameters: LoadParameters | None) -> ModelSpec | TritonError:
        try:
            with polling(source.key, source.name):
                return self._read(source, (parameters or {}).get("config"))
        except TritonError as error:
            return error

    def _read(self, source: ModelSource, override: str | bytes | None) -> ModelSpec:
        signature = signature_of(source.directory)
        path = config_path(source.directory, self._config_name)
        config = self._config(source.name, path) if override is None else parse_json(override)
        spec = ModelSpec(
            name=source.name,
            namespace=source.namespace,
            directory=source.directory,
            home=source.directory,
            config=config,
            config_file=str(path.relative_to(source.directory)),
            signature=signature,
            has_override=override is not None,
        )
        self._resolve_steps(spec)
        if not spec.has_agents:
            _normalise(spec)
        return spec

    def _resolve_steps(self, spec: ModelSpec) -> None:
        """With namespacing, replaces the model names in steps by the models' keys."""
        if self._is_namespacing:
            spec.step_names = tuple(step.model_name for step in spec.config.ensemble_scheduling.step)
            for step in spec.config.ensemble_scheduling.step:
                step.model_name = self._composing_key(spec.namespace, step.model_name)

    def _composing_key(self, namespace: str, name: str) -> str:
        """The key of a composing model of an ensemble in `namespace`: the model in the same repository, else the only
        one with that name; if there are none or several, the name itself."""
        homes = [root for root in self._roots if (root / name).is_dir()]
        if Path(namespace) in homes:
            homes = [Path(namespace)]
        return identifier(str(homes[0]), name) if len(homes) == 1 else name

    def _config(self, name: str, path: Path) -> ModelConfig:
        if path.is_file():
            return read_config(path)
        if self._auto_complete_config:
            return ModelConfig()
        raise invalid_argument(f"model configuration is not provided for model '{name}'")

    def _upload(self, name: str, parameters: LoadParameters) -> ModelSpec:
        """A model that consists only of the request's files, in a directory that exists as long as the
        specification."""
        with polling(name):
            override = parameters.get("config")
            if override is None:
                raise invalid_argument("Load parameter 'config' must be specified for model file override")
            root = Path(tempfile.mkdtemp(dir=self._upload_directory()))
            directory = root / name
            spec = ModelSpec(name, directory, directory, parse_json(override), has_override=True)
            spec.own(root)
            try:
                directory.mkdir()
                write_files(directory, parameters)
                if not spec.has_agents:
                    _normalise(spec)
            except BaseException:
                shutil.rmtree(root, ignore_errors=True)  # immediately, because a traceback may keep `spec` alive
                raise
            return spec

    def _upload_directory(self) -> Path:
        with self._lock:
            if self._uploads is None:
                self._uploads = OwnedFolder("models")
            return self._uploads.path


@contextmanager
def polling(key: str, name: str | None = None) -> Iterator[None]:
    """Converts errors, except OverrideError and UNSUPPORTED, to INTERNAL with Triton's text, and logs the cause."""
    try:
        yield
    except OverrideError:
        raise
    except (TritonError, OSError) as error:
        log.error("Poll failed for model directory '%s': %s", key, error)
        if isinstance(error, TritonError) and error.code is ErrorCode.UNSUPPORTED:
            raise
        raise internal(f"failed to load '{name or key}', failed to poll from model repository") from error


def _normalise(spec: ModelSpec) -> None:
    config = spec.config
    if config.name and config.name != spec.name:
        raise invalid_argument(
            f"unexpected directory name '{spec.name}' for model '{config.name}', directory name must equal model name"
        )
    config.name = spec.name
    fill_backend(config, spec.directory)
    set_defaults(config)
    validate_config(config)
    spec.versions = select_versions(config, spec.directory)


def check_model_name(name: str) -> None:
    """Raises TritonError INVALID_ARG for a name that leads out of the repository or cannot be a directory name."""
    if not name:
        raise invalid_argument("model name must not be empty")
    if "/" in name or "\\" in name or name in (".", ".."):
        raise invalid_argument(f"invalid model name '{_shown(name)}': must not contain path traversal characters")
    if not name.isprintable():
        raise invalid_argument(f"invalid model name {_shown(name)!a}: must not contain unprintable characters")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise invalid_argument(f"invalid model name '{_shown(name)}': longer than {MAX_NAME_BYTES} bytes")


def check_load_parameters(name: str, parameters: LoadParameters) -> None:
    """Raises OverrideError: INVALID_ARG for a configuration that is too large or too deeply nested; INTERNAL, as Triton
    does, for a file outside the model."""
    config = parameters.get("config", "")
    if len(config) > MAX_CONFIG_BYTES:
        raise OverrideError(f"Invalid config override: larger than {MAX_CONFIG_BYTES} bytes")
    if json_depth(config) > MAX_JSON_DEPTH:
        raise OverrideError(
            f"Invalid config override: JSON nesting depth exceeds maximum allowed limit ({MAX_JSON_DEPTH})"
        )
    for key in parameters:
        if key.startswith(FILE_PREFIX):
            _check_path(name, _relative(key))


def write_files(directory: Path, parameters: LoadParameters) -> None:
    """Writes each `file:` parameter (already checked by `check_load_parameters`) into `directory`, which is named like
    the model. Raises OverrideError INTERNAL for a file that cannot be written, such as one below another file."""
    for key, content in parameters.items():
        if not key.startswith(FILE_PREFIX):
            continue
        relative = _relative(key)
        target = directory / relative
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.encode() if isinstance(content, str) else content)
        except (OSError, ValueError) as error:
            cause = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else type(error).__name__
            raise _bad_file(directory.name, f"'{_shown(relative)}' cannot be written: {cause}") from None


def _relative(key: str) -> str:
    """The path relative to the model's directory; as in Triton, it may begin with a slash."""
    return key.removeprefix(FILE_PREFIX).lstrip("/")


def _bad_file(name: str, what: str) -> OverrideError:
    text = f"failed to load '{_shown(name)}', failed to poll from model repository: file override path {what}"
    return OverrideError(text, ErrorCode.INTERNAL)


def _check_path(name: str, relative: str) -> None:
    path = Path(relative)
    if ".." in path.parts or "\\" in relative or not path.parts:
        raise _bad_file(name, f"'{_shown(relative)}' must stay inside the model directory")
    if not relative.isprintable():
        raise _bad_file(name, f"{_shown(relative)!a} must not contain unprintable characters")
    longest_part_bytes = max(len(part.encode()) for part in path.parts)
    if longest_part_bytes > MAX_NAME_BYTES or len(relative.encode()) > MAX_PATH_BYTES:
        raise _bad_file(name, f"'{_shown(relative)}' is too long")


def _shown(text: str) -> str:
    """A client's text for an error, shortened."""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _why_unreadable(root: Path) -> TritonError | None:
    try:
        if not root.is_dir():
            return internal(f"failed to stat file {root}: a model repository must be a directory")
        next(root.iterdir(), None)
    except OSError as error:
        return internal(f"failed to read model repository {root}: {error.strerror}")
    return None
