"""`python -m llmbackend.engine.ranks.rank_process`: a rank of an engine on several machines, which reads a RankOrder as
JSON from the first line of standard input and exits with rank 0 or with its standard input."""

from __future__ import annotations

import logging
import os
import sys
import threading

import msgspec

from ..start import lean_imports
from .rank_order import RankOrder

logger = logging.getLogger(__name__)


def main() -> None:
    """Exit code 0: rank 0 told it to end; 1: it can not take part."""
    try:
        order = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankOrder)
    except (msgspec.DecodeError, ValueError) as error:
        sys.exit(f"the order of a rank, the first line of standard input, is invalid: {error}")
    logging.basicConfig(level=logging.INFO, format=f"rank {order.rank} %(process)d %(levelname)s %(message)s")
    threading.Thread(target=_end_with_input, name="stdin", daemon=True).start()
    lean_imports.import_for(order.config.model)
    from ..gpu.parallel.follow import follow_order

    try:
        follow_order(order)
    except (OSError, ValueError) as error:
        logger.error("%s", error)
        sys.exit(1)


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
