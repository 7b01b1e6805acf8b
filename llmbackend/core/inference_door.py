"""The door for inference: requests in, and what is known of them until they end.

For: frontends, through InferenceServer. Does not know: wire protocols, where models come from. Invariants: a request
that is refused raises here and its callback is never called; no request is accepted unless the server is READY, but for
sequences that run and for the requests of models while it exits.
Source: TRITONSERVER_ServerInferAsync (reference §1.1, §2.10).
"""

from __future__ import annotations

from .errors import TritonError
from .messages import InferenceHandle, InferenceRequest
from .models.model import LoadedModel
from .server_parts import ServerParts
from .tenants import Tenant


class InferenceDoor(ServerParts):
    def infer_async(self, request: InferenceRequest) -> InferenceHandle:
        """Validates and enqueues. Raises TritonError when refused synchronously (then the callback is never called).
        While the server exits, sequences that run may go on."""
        if not (self.is_exiting and self._continues_sequence(request)):
            self._check_serving()
        if request.shared_inputs:
            request = self._shared_memory.with_inputs(request)
        if request.output_places:
            return self._shared_memory.lend(request, self._infer)
        return self._infer(request)

    def acquire_model(self, name: str, version: int = -1) -> LoadedModel:
        """A READY model for one inner request, also while the server stops (see ModelHost)."""
        return self._lifecycle.acquire(self._loader.names.key(name), version)

    def cancel_requests(
        self, model_name: str, version: int = -1, request_id: str = "", by: Tenant | None = None
    ) -> int:
        """Asks every live request of the model with that client id to stop; how many there were. Version -1 = every
        version, also those that only finish what they have. The empty id matches nothing. `by`: only requests that this
        tenant may end count; None = all.

        Raises TritonError as `infer_async` does for a model or version that is unknown and has no request left.
        """
        models = [
            model
            for model in self._lifecycle.live_models()
            if model_name in (model.name, model.key) and version in (-1, model.version)
        ]
        if len({model.key for model in models}) != 1:  # none, or of several namespaces
            key = self._model(model_name, version).key
            models = [model for model in models if model.key == key]
        channels = [
            channel
            for model in models
            for channel in model.live.with_id(request_id)
            if not channel.is_final and (by is None or by.may_end(channel.tenant))
        ]
        for channel in channels:
            channel.cancel()
        return len(channels)

    def _infer(self, request: InferenceRequest) -> InferenceHandle:
        return self.acquire_model(request.model_name, request.model_version).infer(request)

    def _continues_sequence(self, request: InferenceRequest) -> bool:
        try:
            sequences = self._model(request.model_name, request.model_version).sequences
        except TritonError:
            return False
        return sequences is not None and sequences.continues(request.correlation_id, request.flags, request.tenant)
