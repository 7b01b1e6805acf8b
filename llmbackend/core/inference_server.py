"""The one door that frontends use.

For: frontends and the command line. Does not know: wire protocols, LLMs. Owner of the server's state and of every part
of the host; this file is its life, what it is asked for stands in the doors it is made of. Invariants: no request is
accepted unless the server is READY; after `stop` returned True no model, backend or thread of the host is left.
Source: Triton's in-process API and server.cc (reference §1.1, §1.6, §2.10, §2.11).
"""

from __future__ import annotations

import logging
import time

from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

from .conservation import breaches_of
from .control_door import ControlDoor
from .errors import TritonError, unavailable
from .inference_door import InferenceDoor
from .lifecycle.draining import cut, wait_until_drained
from .lifecycle.load_errors import StartupError
from .lifecycle.model_lifecycle import STOPPING
from .memory.shared_memory import SharedMemory
from .messages import ServerOptions
from .served_models import ServedModels
from .server_parts import ServerState
from .startup_tables import log_tables

log = logging.getLogger(__name__)

UNLOAD_GRACE_S = 8.0
"""What unloading gets at the least, however long requests took: an engine that hangs is killed after 5 s."""


class InferenceServer(InferenceDoor, ControlDoor, ServedModels):
    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options, self)

    @property
    def metrics_registry(self) -> CollectorRegistry:
        return self._registry

    @property
    def shared_memory(self) -> SharedMemory:
        return self._shared_memory

    def metric_samples(self, name: str) -> list[Sample]:
        """What backends report now in the family of that name; [] for one that nobody has made."""
        return self._families.samples(name)

    def start(self) -> None:
        """Loads the startup models; blocks until they are READY or failed.

        Raises StartupError when a startup model failed and options.exit_on_error, another TritonError when the server
        itself can not start; it is stopped then.
        """
        self._state = ServerState.INITIALIZING
        try:
            self._services.start()
            self.tracing.start()
            self._repository.check()
            names = self._loader.startup_models()
        except TritonError:
            self._fail_to_start(timeout_s=0.0)
            raise
        errors = self._loader.load_together(dict.fromkeys(names))
        if self.is_exiting:
            raise unavailable(STOPPING)
        for error in errors.values():
            log.error("%s", error)
        self._log_tables()
        if errors and self._options.exit_on_error:
            self._fail_to_start(timeout_s=30.0)
            raise StartupError(errors)
        with self._state_lock:
            if not self.is_exiting:
                self._state = ServerState.READY
        if self._options.model_control_mode == "poll" and self._options.repository_poll_secs:
            self._poller.start()

    def stop(self, timeout_s: float) -> bool:
        """Refuses new work, waits for in-flight requests, cuts off those that run longer, unloads every model and
        finalises backends. Any thread; may be called while `start` still loads, and again.

        False = something was cut off, or a model did not end; then backends that are left are not finalised.
        """
        with self._state_lock:
            self._state = ServerState.EXITING
        self._poller.stop()
        self._lifecycle.refuse_loads()
        self._control.shutdown(wait=False)
        deadline_s = time.monotonic() + timeout_s
        log.info("Waiting for in-flight requests to complete.")
        is_drained = wait_until_drained(self._lifecycle.live_models, deadline_s)
        if is_drained:
            log.info("All models are stopped, unloading models")
        else:
            log.error("Exit timeout expired. Exiting immediately.")
            cut(self._lifecycle.live_models())
        is_unloaded = self._lifecycle.close(max(deadline_s - time.monotonic(), UNLOAD_GRACE_S))
        self._repository.close()
        self._shared_memory.close()
        self.tracing.close()
        if not is_unloaded:
            left = {what: count for what, count in self._lifecycle.left_behind().items() if count}
            log.error("Unloading did not end: %s", ", ".join(f"{count} {what}" for what, count in left.items()))
            return False
        self._poller.join()
        self._backends.close()
        self._services.stop()
        return is_drained

    def is_live(self) -> bool:
        return self._state in (ServerState.READY, ServerState.EXITING)

    def check(self) -> list[str]:
        """What is left behind, in words, on a server where no request runs and nothing is loaded or unloaded; empty
        when all is well. Each model version checks itself, too, whenever it becomes idle."""
        found = []
        models = self._lifecycle.live_models()
        for model in models:
            left = {"in-flight inferences": model.in_flight.count, **model.left_behind()}
            found += breaches_of(f"model '{model.name}' version {model.version}", left)
        timers = max(len(self._services.timer) - len(models), 0)  # a queue may keep one
        left = {
            **self._loader.left_behind(),
            **self._shared_memory.left_behind(),
            **self._services.rate_limiter.left_behind(),
            "actions for its reaper": self._services.reaper.backlog,
            "traces that are not complete": self.tracing.open_count,
        }
        return found + breaches_of("the server", {**left, "timers without a model": timers})

    def _fail_to_start(self, timeout_s: float) -> None:
        self.stop(timeout_s)
        self._state = ServerState.FAILED_TO_INITIALIZE

    def _log_tables(self) -> None:
        """What was loaded, as Triton shows it at the end of its start."""
        states = {key: self._lifecycle.versions(key) for key in self._lifecycle.names()}
        log_tables(self._loader.agents.table(), self._backends.table(), states)
