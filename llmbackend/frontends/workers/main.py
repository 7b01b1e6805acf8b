"""A worker process: `python -m llmbackend.frontends.workers.main DESCRIPTOR`.

For: WorkerProcess, which starts it. Does not know: protocols; it calls the functions that it is sent. Invariants: it
ends when its server does, however that ends; when memory is short it is the process that the kernel kills (a body of
64 MiB that is all brackets takes 2 GiB when it is parsed; a limit of address space does not help, since orjson reserves
8 GiB and uses little).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, Final

from llmbackend.core.errors import TritonError, internal, unavailable

from .frames import receive, to_server

_NICENESS: Final = 10
"""Streams have priority: what is parsed here may take seconds anyway."""
_OOM_SCORE: Final = "1000"


def main(descriptor: int) -> None:
    """Serves calls over the socket `descriptor` until the server closes it."""
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    with contextlib.suppress(EOFError, OSError), socket.socket(fileno=descriptor) as server:
        while True:
            _answer(server)


def _answer(server: socket.socket) -> None:
    function, arguments = receive(server)
    result: Any
    try:
        is_good, result = True, function(*arguments)
    except TritonError as error:
        is_good, result = False, TritonError(error.message, error.code)
    except MemoryError:
        is_good, result = False, unavailable("the request takes more memory to be decoded than the server has for it")
    except Exception:
        traceback.print_exc()
        is_good, result = False, internal("internal error, see the server's log")
    to_server(server, (is_good, result))


if __name__ == "__main__":
    main(int(sys.argv[1]))
