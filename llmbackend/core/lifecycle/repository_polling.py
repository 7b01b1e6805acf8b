"""Model control mode `poll`: loads, reloads and unloads what changed in the repositories.

For: the server. Does not know: how a model is loaded. Invariants: one poll at a time; a change that cannot be loaded is
tried again at the next poll, as in Triton; a repository that cannot be read changes nothing (Triton unloads its
models). Source: PollAndUpdate in Triton's core; golden transcript 56.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmbackend.core.errors import TritonError
from llmbackend.core.repository.model_files import ModelSource

from .model_loading import ModelLoader

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs between the repositories and what serves."""

    load: Sequence[str]
    """Names of models that are new or have changed."""
    link: Sequence[str]
    """Keys of ensembles whose steps now mean models of other namespaces."""
    unload: Sequence[str]
    """Keys of models that are gone, or are now in several repositories."""


def find_changes(loader: ModelLoader) -> Changes:
    """Raises OSError when a repository cannot be read."""
    listing = loader.repository.listing()
    single = {key: sources[0] for key, sources in listing.items() if len(sources) == 1}
    for key, sources in listing.items():
        if len(sources) > 1:
            log.error("failed to poll model '%s': not unique across all model repositories", key)
    gone = [key for key in loader.names.known() if key not in single]
    return Changes(_changed(loader, single), [key for key in single if not loader.is_linked(key)], gone)


def _changed(loader: ModelLoader, sources: Mapping[str, ModelSource]) -> list[str]:
    names: dict[str, None] = {}
    for source in sources.values():
        try:
            if not loader.is_current(source):
                names[source.name] = None
        except TritonError:
            log.debug("model '%s' cannot be read; it is read again at the next poll", source.key)
    return list(names)


class RepositoryPoller:
    """Polls on a thread of its own, since a load may take minutes."""

    def __init__(self, loader: ModelLoader, interval_s: float) -> None:
        self._loader = loader
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="repository-poll", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Begins no further poll. One that is under way ends with its loads."""
        self._stopped.set()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def poll(self) -> None:
        """Loads and unloads until what serves agrees with the repositories. Logs errors."""
        try:
            changes = find_changes(self._loader)
        except OSError as error:
            log.error("failed to poll model repository '%s': %s", error.filename, error.strerror)
            return
        # Before the models that they have used go, so that they serve throughout.
        self._loader.load_together(dict.fromkeys(changes.link))
        for key in changes.unload:
            self._loader.unload_key(key)
        for failure in self._loader.load_together(dict.fromkeys(changes.load)).values():
            if not self._stopped.is_set():
                log.error("%s", failure)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self.poll()
            except Exception:
                log.exception("polling the model repositories failed")
