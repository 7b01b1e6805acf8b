"""Whether an ensemble can serve with its composing models as they are now.

For: model loading, before an ensemble is loaded or loaded again. Does not know: repositories, orders. Invariant: it
says what a client can act on, with the name of the model at fault, in Triton's words.
Source: CheckNode and ConnectDependencyGraph in Triton's model_repository_manager.cc.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.config.ensemble_rules import composing_models
from llmbackend.core.errors import TritonError
from llmbackend.core.repository.model_names import ModelIdentifier
from llmbackend.core.repository.model_repository import ModelSpec

from .ensemble_agreement import check_agreement
from .model_lifecycle import ModelLifecycle
from .model_versions import ModelState


class EnsembleFitness:
    """`missing` are models that no repository has; `invalid` are ensembles that can not serve, and `failed` models
    whose last load failed, with the reasons."""

    def __init__(
        self,
        lifecycle: ModelLifecycle,
        missing: Collection[str],
        invalid: Mapping[str, str],
        failed: Mapping[str, str],
    ) -> None:
        self._lifecycle = lifecycle
        self._missing = missing
        self._invalid = invalid
        self._failed = failed

    def why_unfit(self, spec: ModelSpec) -> str:
        """The reason, or "" when it can serve; then its configuration says whether it is decoupled."""
        parts = composing_models(spec.config)
        for part in parts:
            if part in self._missing and not self._ready_versions(part):
                return f"ensemble {spec.key} contains models that are not available or ambiguous: {part}"
        for part, versions in parts.items():
            fault = self._fault_of(part, versions)
            if fault:
                return f"ensemble '{spec.key}' depends on '{part}' {fault}"
        try:
            configs: dict[str, ModelConfig] = {
                part: self._lifecycle.get(ModelIdentifier(part)).config for part in parts
            }
            is_decoupled = check_agreement(spec.config, configs)
        except TritonError as error:
            return error.message
        spec.config.model_transaction_policy.decoupled = is_decoupled
        return ""

    def _fault_of(self, part: str, versions: Collection[int]) -> str:
        if part in self._invalid:
            return f"which is not valid. Model '{part}' failed with error: {self._invalid[part]}"
        ready = self._ready_versions(part)
        if not ready and part in self._failed:
            return f"which has no loaded version. Model '{part}' loading failed with error: {self._failed[part]}"
        if not ready:
            return "which has no loaded version."
        absent = [version for version in sorted(versions) if version != -1 and version not in ready]
        return f"whose required version {absent[-1]} is not loaded." if absent else ""

    def _ready_versions(self, name: str) -> list[int]:
        versions = self._lifecycle.versions(name)
        return [number for number, (state, _) in versions.items() if state is ModelState.READY]
