"""The runner that a server's engine would have, in a process that embeds the engine: of packed weights from the cache.

For: benchmarks, which measure what is served. Does not know: requests. Invariant: a model that is not in the cache is
packed by a process of its own, whose libraries and memory end with it; what can not be packed, or has no cache, is
loaded as `make_runner` does.
"""

from __future__ import annotations

import logging
import subprocess
import sys

import msgspec

from .config import EngineConfig
from .runners import make_runner, shared_parts
from .shared_parts import SharedParts
from .step import Runner

logger = logging.getLogger(__name__)


def make_served_runner(config: EngineConfig) -> Runner:
    """Raises as `make_runner`."""
    parts = _looked_up(config)
    if parts.is_unpacked:
        command = [sys.executable, "-m", __name__, msgspec.json.encode(config).decode()]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            logger.warning("the process that packs the model ended with %d", done.returncode)
        parts = _looked_up(config)
    if parts.is_unpacked:
        return make_runner(config)
    made = parts.in_own_process(is_whole=False, lifeline_fd=-1)()
    assert not isinstance(made, msgspec.Struct), "it is packed"
    return made


def _looked_up(config: EngineConfig) -> SharedParts:
    parts = shared_parts(config)
    parts.before_fork(is_whole=False)
    return parts


def main() -> None:
    """In the other process."""
    parts = _looked_up(msgspec.json.decode(sys.argv[1], type=EngineConfig))
    if parts.is_unpacked:
        parts.in_own_process(is_whole=False, lifeline_fd=-1)()
        parts.publish()


if __name__ == "__main__":
    main()
