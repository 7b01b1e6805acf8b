"""The door for control: models are loaded and unloaded on request.

For: frontends and models, through InferenceServer. Does not know: how a model is loaded. Invariant: refused unless the
model control mode is `explicit` and the server is READY. Source: Triton's model repository extension (reference §1.6).
"""

from __future__ import annotations

from concurrent.futures import Future

from .errors import unavailable
from .lifecycle.model_lifecycle import STOPPING
from .messages import LoadParameters
from .server_parts import ServerParts

EXPLICIT_ONLY = "explicit model load / unload is not allowed if polling is enabled"


class ControlDoor(ServerParts):
    def load_model(self, name: str, parameters: LoadParameters | None = None) -> None:
        """Loads or reloads; blocks until done. A loaded model whose files did not change is left alone.

        Raises TritonError: UNAVAILABLE in mode none, INTERNAL when it can not be polled, INVALID_ARG when it fails.
        """
        self._check_explicit()
        self._loader.load(name, parameters)

    def start_load(self, name: str, parameters: LoadParameters | None = None) -> Future[None]:
        """`load_model` on a thread for loads: however long it takes, it takes no thread that other calls wait for."""
        self._check_explicit()
        try:
            return self._control.submit(self.load_model, name, parameters)
        except RuntimeError:  # stopped since
            raise unavailable(STOPPING) from None

    def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Begins to unload, with the ensembles that are made of it; requests in flight run to their end. With
        `unload_dependents` also what an ensemble is made of, as far as nobody else needs it."""
        self._check_explicit()
        self._loader.unload(name, unload_dependents)

    def _check_explicit(self) -> None:
        if self._options.model_control_mode != "explicit":
            raise unavailable(EXPLICIT_ONLY)
        self._check_serving()
