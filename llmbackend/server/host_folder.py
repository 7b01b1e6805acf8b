"""The folder in which a host and its frontend processes meet: made, or taken over from the host before.

For: the serve process, and the launcher of a cluster. Does not know: what is said over its sockets. Invariant: only the
user of the server may enter it.
"""

from __future__ import annotations

from llmbackend.frontends.shared_counts import SharedCounts

from .frontend_settings import HostFolder
from .process_end import temporary_directory
from .settings import ServerSettings


def open_host_folder(settings: ServerSettings) -> tuple[HostFolder, SharedCounts]:
    """A host that is the next one of its folder begins with no counts of its own. Raises OSError."""
    folder = HostFolder(settings.host_folder or temporary_directory("host"))
    folder.metrics.mkdir(exist_ok=True)
    if not folder.counts.exists():
        return folder, SharedCounts.create(folder.counts, settings.frontend_processes + 1)
    shared = SharedCounts(folder.counts, 0)
    shared.forget(0)
    return folder, shared
