"""What is served: models' metadata, configurations, statistics and readiness, and the index of the repositories.

For: frontends, through InferenceServer. Does not know: wire protocols, requests. Invariant: it changes nothing; a name
that several models share is refused as Triton refuses it. Source: Triton's in-process API (reference §1.1, §1.6).
"""

from __future__ import annotations

from collections.abc import Mapping

from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import ModelStatistics

from llmbackend import __version__

from .descriptions import EXTENSIONS
from .errors import TritonError, invalid_argument
from .lifecycle.model_versions import UNLOADED, ModelState
from .messages import ModelIndex, ModelMetadata, ServerMetadata
from .repository.model_names import ModelIdentifier
from .repository.model_repository import DUPLICATE
from .server_parts import ServerParts, ServerState


class ServedModels(ServerParts):
    def is_ready(self) -> bool:
        """READY; with strict readiness also every known version READY or unloaded, and every instance ready."""
        if self._state is not ServerState.READY:
            return False
        if not self._options.strict_readiness:
            return True
        for key in self._lifecycle.names():
            versions = self._versions(key)
            if not versions:
                return False
            for state, reason in versions.values():
                if state is not ModelState.READY and (state, reason) != (ModelState.UNAVAILABLE, UNLOADED):
                    return False
        return True

    def model_is_ready(self, name: str, version: int = -1) -> bool:
        """False also for a model that is unknown or not loaded. Answered within seconds, as `is_ready` is."""
        try:
            return not self._model(name, version).not_ready_reason()
        except TritonError:
            return False

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata(self._options.server_id, __version__, EXTENSIONS)

    def model_metadata(self, name: str, version: int = -1) -> ModelMetadata:
        model = self._model(name, version)
        versions = [model] if version >= 0 else self._lifecycle.ready_models(model.key)
        return model.description.metadata(each.version for each in versions)

    def model_parameters(self, name: str, version: int = -1) -> Mapping[str, str]:
        """The string values of the configuration's `parameters`."""
        return self._model(name, version).description.parameters

    def model_config(self, name: str, version: int = -1) -> ModelConfig:
        """A copy, which takes time: requests are served with `model_metadata`, `model_parameters`, `is_decoupled`."""
        return self._model(name, version).config

    def is_decoupled(self, name: str, version: int = -1) -> bool:
        """As `model_config` says, without a copy of it: asked with every request."""
        return self._model(name, version).answers_decoupled

    def model_statistics(self, name: str = "", version: int = -1) -> list[ModelStatistics]:
        """Of READY versions. Raises TritonError INVALID_ARG for a named model or version that is not READY."""
        keys = self._loader.names.keys(name) if name else [None]
        models = self._lifecycle.ready_models(keys[0]) if len(keys) == 1 else []
        if name and not models:
            raise invalid_argument(f"requested model '{name}' is not available")
        if name and version >= 0:
            models = [model for model in models if model.version == version]
            if not models:
                raise invalid_argument(f"requested model version is not available for model '{name}'")
        return [model.statistics.snapshot(model.name, model.version) for model in models]

    def repository_index(self, ready_only: bool = False) -> list[ModelIndex]:
        """Every model of the repositories with the state of its known versions, sorted by name."""
        rows: list[ModelIndex] = []
        for key, sources in self._repository.listing().items():
            name, versions = sources[0].name, self._versions(key)
            if len(sources) > 1:
                rows.append(ModelIndex(name, "", ModelState.UNAVAILABLE.value, DUPLICATE))
                continue
            if not versions:
                rows.append(ModelIndex(name))
            for number, (state, reason) in versions.items():
                rows.append(ModelIndex(name, str(number), state.value, reason))
        return [row for row in rows if not ready_only or row.state == ModelState.READY.value]

    def _versions(self, key: str) -> dict[int, tuple[ModelState, str]]:
        """State and reason of each known version; one whose backend says that it is not ready is UNAVAILABLE."""
        versions = self._lifecycle.versions(key)
        for number, (state, _) in versions.items():
            if state is ModelState.READY and (reason := self._not_ready_reason(ModelIdentifier(key), number)):
                versions[number] = (ModelState.UNAVAILABLE, reason)
        return versions

    def _not_ready_reason(self, key: ModelIdentifier, version: int) -> str:
        try:
            return self._lifecycle.get(key, version).not_ready_reason()
        except TritonError as error:
            return error.message  # unloaded since
