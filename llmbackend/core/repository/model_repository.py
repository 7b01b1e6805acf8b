"""What should be loaded: model directories and their configurations, after the repository agents have had their say.

For: model loading, which hands the answer to the life cycle. Does not know: backends, states of versions, what is
loaded.
Invariants: no name and no path given by a client leaves the repository; what `poll` returns has been checked by every
rule that needs no backend, but for models with agents, which are checked when those have been asked.
Source: Triton's model repository manager (reference §1.6); golden transcripts 05 to 08, 57.
"""

from __future__ import annotations

import logging
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

from llmbackend.core.config.backend_rules import fill_backend
from llmbackend.core.config.model_config import CONFIG_FILE_NAME, parse_json, read_config, set_defaults
from llmbackend.core.config.model_config_rules import validate_config
from llmbackend.core.errors import ErrorCode, TritonError, internal, invalid_argument
from llmbackend.core.messages import LoadParameters

from .agent_chain import AgentChain
from .load_parameters import FILE_PREFIX, OverrideError, check_load_parameters, check_model_name, write_files
from .model_files import ModelSource, Signature, config_path, select_versions, signature_of
from .model_names import SEPARATOR, ModelIdentifier, identifier
from .repository_agents import AgentManager

log = logging.getLogger(__name__)

DUPLICATE = "model appears in two or more repositories"


@dataclass(eq=False)
class ModelSpec:
    """One model as it should be loaded. `directory` is where its versions are, `home` where the repository has it: the
    same, unless an agent moved it. `has_override` says that `config` came with the request and not from `home`;
    `config_file` is the configuration's place in it. Without a signature the model came with its load request.
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
    agents: AgentChain | None = None
    _temporary: weakref.finalize[Any, ModelSpec] | None = field(default=None, repr=False)

    @property
    def key(self) -> ModelIdentifier:
        return identifier(self.namespace, self.name)

    @property
    def has_agents(self) -> bool:
        """Whether repository agents must be asked before it is loaded; until then `versions` are not known."""
        return bool(self.config.HasField("model_repository_agents"))

    def own(self, directory: Path) -> None:
        """Removes `directory` when nobody uses this specification any more."""
        self._temporary = weakref.finalize(self, shutil.rmtree, directory, True)


class ModelRepository:
    """Reads repositories. Owner of one temporary directory for models that came with their load request."""

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
        self._uploads: Path | None = None

    def check(self) -> None:
        """Raises TritonError INTERNAL when a repository is no directory, or can not be read."""
        for root in self._roots:
            try:
                if not root.is_dir():
                    raise internal(f"failed to stat file {root}: a model repository must be a directory")
                next(root.iterdir(), None)
            except OSError as error:
                raise internal(f"failed to read model repository {root}: {error.strerror}") from error

    def listing(self) -> dict[str, list[ModelSource]]:
        """The directories of every model by its key, sorted. More than one: the model is in several repositories, and
        may not be loaded. Raises OSError when a repository can not be read."""
        found: dict[str, list[ModelSource]] = {}
        for root in self._roots:
            for entry in root.iterdir():
                if entry.is_dir() and not entry.name.startswith("."):
                    source = self._source(root, entry.name)
                    found.setdefault(source.key, []).append(source)
        return dict(sorted(found.items()))

    def signature(self, source: ModelSource) -> Signature:
        """Raises TritonError INTERNAL when the directory can not be read."""
        with polling(source.key, source.name):
            return signature_of(source.directory)

    def poll(self, name: str, parameters: LoadParameters | None = None) -> dict[str, ModelSpec | TritonError]:
        """The models of that name (or key) by key, as they stand on disk or as `parameters` override them: one, or with
        namespacing one for each repository that has it; or why one can not be used.

        Errors are INVALID_ARG for a bad name or override, INTERNAL (Triton's text, the cause in the log) for anything
        else."""
        try:
            check_load_parameters(parameters or {})
            if is_upload(parameters):
                check_model_name(name)
                return {name: self._upload(name, parameters or {})}
            sources = self._find(name)
        except TritonError as error:
            return {name: error}
        return {source.key: self._read_or_error(source, parameters) for source in sources}

    def ask_agents(self, spec: ModelSpec) -> None:
        """For a model that names repository agents, and is to be loaded: they may refuse it or move it elsewhere, and
        only then are its configuration and versions settled. From then on `spec.agents` has to be told how it ends.

        Raises TritonError INTERNAL (Triton's text, the cause in the log)."""
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
        """Removes what is left of models that came with their load request."""
        with self._lock:
            directory, self._uploads = self._uploads, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    # --- inside -----------------------------------------------------------------------------------------------------

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
        self._name_parts(spec)
        if not spec.has_agents:
            _normalise(spec)
        return spec

    def _name_parts(self, spec: ModelSpec) -> None:
        """With namespacing an ensemble means the models of its own repository, else the only ones that there are."""
        for step in spec.config.ensemble_scheduling.step if self._is_namespacing else ():
            homes = [root for root in self._roots if (root / step.model_name).is_dir()]
            if Path(spec.namespace) in homes:
                homes = [Path(spec.namespace)]
            if len(homes) == 1:
                step.model_name = identifier(str(homes[0]), step.model_name)

    def _config(self, name: str, path: Path) -> ModelConfig:
        if path.is_file():
            return read_config(path)
        if self._auto_complete_config:
            return ModelConfig()
        raise invalid_argument(f"model configuration is not provided for model '{name}'")

    def _upload(self, name: str, parameters: LoadParameters) -> ModelSpec:
        """A model made of the request's files alone, in a directory that lives as long as the specification."""
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
                shutil.rmtree(root, ignore_errors=True)  # now: a traceback may keep `spec` for long
                raise
            return spec

    def _upload_directory(self) -> Path:
        with self._lock:
            if self._uploads is None:
                self._uploads = Path(tempfile.mkdtemp(prefix="llmbackend-models-"))
            return self._uploads


def is_upload(parameters: LoadParameters | None) -> bool:
    """Whether a load request brings the model's files."""
    return any(key.startswith(FILE_PREFIX) for key in parameters or {})


@contextmanager
def polling(key: str, name: str | None = None) -> Iterator[None]:
    """What goes wrong inside becomes INTERNAL with Triton's text, its cause goes to the log. Errors of a client's
    override, and refusals of what this host does not serve, come out as they are."""
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
