"""The nursery's process and the engines it forks.

`python -m llmbackend.engine.process.engine_process CONTROL_FD CONFIG_JSON`.

For: Nursery, which starts it, and ProcessTransport, which speaks with the engine. Does not know: the host, beyond its
sockets. Invariants: an engine never outlives its host: the lifeline is a socket pair whose other end only the host
holds, so its end of file means that the host is gone, however it went; the nursery ends at the end of file of its
control socket. Signals for the host (SIGINT, SIGTERM, SIGHUP to the group) are ignored: the host decides.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection

import msgspec
import zmq

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.gpu.parallel.followers import Followers, fork_followers

from . import lean_imports
from .engine_loop import load, run

LINGER_MS = 1000
ENDPOINT_BYTES = 4096


def main(arguments: list[str]) -> None:
    """Forks an engine for each message, one after the other, and tells its process id and then its exit status; minus
    an errno instead of both when there is no engine."""
    control_fd, config_json = arguments
    config = msgspec.json.decode(config_json, type=EngineConfig)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(control_fd))
    control.set_inheritable(False)
    _import_all_of(config.model)
    while True:
        endpoint, descriptors, _, _ = socket.recv_fds(control, ENDPOINT_BYTES, 2)
        if not endpoint:
            return
        try:
            pid = os.fork() if len(descriptors) == 2 else -errno.EMFILE  # what can not be opened here is left out
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
        if pid == 0:
            control.close()
            _run_engine(config, endpoint.decode(), *descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        _send(control, pid)
        if pid > 0:
            _send(control, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _import_all_of(model: str) -> None:
    """Whatever cannot be imported is missed by the engine again, which says so."""
    if model == "mock":
        return
    with contextlib.suppress(Exception):
        lean_imports.import_for(model)
        from llmbackend.engine import model_runner  # noqa: F401

    gc.collect()
    gc.freeze()  # the collector of an engine must not touch, and so copy, what is shared


def _send(control: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the host is gone; the next message says so
        control.send(str(number).encode())


def _run_engine(config: EngineConfig, endpoint: str, lifeline_fd: int, output_fd: int) -> None:
    for standard in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(output_fd, standard)
    os.close(output_fd)
    followers = _fork_followers(config, lifeline_fd) if config.tensor_parallel_size > 1 else None
    _end_with_host(lifeline_fd)
    logging.basicConfig(level=logging.INFO, format="engine %(process)d %(levelname)s %(message)s")
    with zmq.Context() as context, context.socket(zmq.PAIR) as link:
        link.set_hwm(0)
        link.linger = LINGER_MS
        link.connect(endpoint)
        core = load(config, link, followers)
        if core is not None:
            gc.collect()
            gc.freeze()  # what loading made stays; the collector need not walk over it again
            run(core, link, config.fault_directory)


def _fork_followers(config: EngineConfig, lifeline_fd: int) -> Followers:
    def run(rank: int, link: Connection) -> None:
        from llmbackend.engine.gpu.parallel.start import follow

        logging.basicConfig(level=logging.INFO, format=f"rank {rank} %(process)d %(levelname)s %(message)s")
        follow(config, rank, link)

    return fork_followers(config.tensor_parallel_size, run, [lifeline_fd])


def _end_with_host(lifeline_fd: int) -> None:
    os.set_inheritable(lifeline_fd, False)
    lifeline = socket.socket(fileno=lifeline_fd)

    def watch() -> None:
        lifeline.recv(1)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])
