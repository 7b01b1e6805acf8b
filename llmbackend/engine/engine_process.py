"""The engine's own process: `python -m llmbackend.engine.engine_process CONFIG_JSON ENDPOINT LIFELINE_FD`.

For: ProcessTransport, which starts it. Does not know: the host, beyond one socket and one lifeline. Invariant: it never
outlives its host: the lifeline is a socket pair whose other end only the host holds, so its end of file means that the
host is gone, however it went. Signals that stop the host (SIGINT, SIGTERM to the group) are ignored: the host decides.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading

import msgspec
import zmq

from .config import EngineConfig
from .engine_loop import load, run

LINGER_MS = 1000


def main(arguments: list[str]) -> None:
    config_json, endpoint, lifeline_fd = arguments
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _end_with_host(int(lifeline_fd))
    logging.basicConfig(level=logging.INFO, format="engine %(process)d %(levelname)s %(message)s")
    config = msgspec.json.decode(config_json, type=EngineConfig)
    with zmq.Context() as context, context.socket(zmq.PAIR) as link:
        link.set_hwm(0)
        link.linger = LINGER_MS
        link.connect(endpoint)
        core = load(config, link)
        if core is not None:
            gc.collect()
            gc.freeze()  # what loading made stays; the collector need not walk over it again
            run(core, link, config.fault_directory)


def _end_with_host(lifeline_fd: int) -> None:
    os.set_inheritable(lifeline_fd, False)
    lifeline = socket.socket(fileno=lifeline_fd)

    def watch() -> None:
        lifeline.recv(1)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])
