"""An engine core behind a socket, one message in and one out per step, and the process that runs it.

Used by the engine's process, which its fork server makes with `prepare`, and by the inline thread. Of the host it knows
only the sockets. Invariants: it first sends EngineStarted messages, the last of which says how loading ended, then one
StepResult per step if a model was loaded; it blocks on the socket while there is nothing to compute, and polls it
between the steps of a busy engine; when work has ended and no message follows within QUIET_MS, it checks that no row or
block is lost. An engine's process never outlives its host, even without its fork server: the lifeline is a socket pair
whose other end only the host holds, so end of file on it means that the host has ended.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Final, Protocol

import msgspec
import zmq

from llmbackend.fork_server.process_resources import process_age_s
from llmbackend.testing.faults import Faults, FaultyLink, Link

from ..config import EngineConfig
from ..engine_core import EngineCore
from ..errors import is_shortage
from ..load_progress import LoadProgress, Start, StartPart, collecting, reporting_to
from ..messages import EngineInput, EngineStarted, ModelPrepared
from ..rank_order import RankMeeting
from ..step import Runner
from .engine_link import EngineOrder

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode_input = msgspec.msgpack.Decoder(EngineInput).decode
_decode_order = msgspec.json.Decoder(EngineOrder).decode

LINGER_MS = 1000
QUIET_MS: Final = 100
"""How long an engine waits for a message before it checks itself. The check takes time in proportion to the number of
blocks, so it must not delay the next request."""


class EngineParts(Protocol):
    """What the engines of one config share through their fork server."""

    def before_fork(self, is_whole: bool) -> None:
        """Prepares what the next engine will share. Never raises: what fails here fails again in the engine."""

    def in_own_process(
        self, is_whole: bool, lifeline_fd: int, meeting: RankMeeting | None = None
    ) -> Callable[[], Runner | ModelPrepared]:
        """Called in an engine's process before it has threads: returns what makes its runner, or prepares the model for
        the next one. meeting: as in EngineOrder. Raises ValueError, OSError or RuntimeError with a message for the
        user."""


def load(
    config: EngineConfig,
    make_runner: Callable[[], Runner | ModelPrepared],
    send: Callable[[bytes], object],
    before: Start | None = None,
) -> EngineCore | None:
    """Loads the model and reports it. Returns None if it cannot be loaded, after reporting why in one line, or if it
    was prepared for the next engine.

    before: the parts of this start done by other processes.
    """

    def tell(progress: LoadProgress) -> None:
        send(_encode(EngineStarted(progress=progress)))

    try:
        with reporting_to(tell), collecting() as start:
            runner = make_runner()
            core = None if isinstance(runner, ModelPrepared) else EngineCore(config, runner)
    except Exception as error:
        text = str(error)
        if not isinstance(error, ValueError | OSError | RuntimeError | ImportError):
            logger.exception("unexpected error while loading the model")
            text = f"{type(error).__name__}: {error}"
        send(_encode(EngineStarted(error=text or type(error).__name__, is_shortage=is_shortage(error))))
        return None
    if before is not None:
        start.begin(before)
    if core is None:
        send(_encode(EngineStarted(prepared=ModelPrepared(start.notes, start.parts))))
        return None
    info = msgspec.structs.replace(core.info, paths=start.notes, parts=start.parts)
    send(_encode(EngineStarted(info=info)))
    return core


def run(core: EngineCore, link: Link, fault_directory: str) -> None:
    """Steps until the shutdown message, then closes the core."""
    if fault_directory:
        link = FaultyLink(link, Faults(fault_directory))
    try:
        while _take_inputs(core, link):
            link.send(_encode(core.step()))
            if not core.has_work and not link.poll(QUIET_MS) and (breach := core.check_idle()):
                link.send(_encode(breach))
    finally:
        core.close()


def _take_inputs(core: EngineCore, link: Link) -> bool:
    """Applies all messages so far; waits for one if the core has nothing to do. False = shut down."""
    while True:
        try:
            message = _decode_input(link.recv(zmq.NOBLOCK if core.has_work else 0))
        except zmq.Again:
            return True
        if message.shutdown:
            return False
        if message.watch is not None:
            core.watch(message.watch)
        if message.prefixes is not None:
            core.prefixes.publish(message.prefixes)
        if message.vocabulary is not None:
            core.set_vocabulary(message.vocabulary)
        for adapter in message.load:
            core.adapters.load(adapter)
        for request in message.add:
            core.add(request)
        for request_id in message.abort:
            core.abort(request_id)
        for name in message.drop:
            core.adapters.drop(name)


class EngineProgram:
    """What the fork server of one config runs, and what its children do."""

    def __init__(self, config: EngineConfig, runners: str) -> None:
        self._config = config
        self._parts: EngineParts = importlib.import_module(runners).shared_parts(config)
        self._before = Start((StartPart("fork server", process_age_s()),))
        self._is_first = True

    def before_fork(self, order: bytes) -> None:
        """What is done now counts as part of that engine's start; for the first engine, so does what was done
        before."""
        with collecting() as start:
            self._parts.before_fork(_decode_order(order).is_whole)
        if self._is_first:
            start.begin(self._before)
        self._before, self._is_first = start, False

    def __call__(self, order: bytes, *descriptors: int) -> None:
        """Runs an engine. descriptors: the lifeline."""
        (lifeline_fd,) = descriptors
        engine = _decode_order(order)
        make_runner = self._parts.in_own_process(engine.is_whole, lifeline_fd, engine.meeting)
        end_with_host(lifeline_fd)
        logging.basicConfig(level=logging.INFO, format="engine %(process)d %(levelname)s %(message)s")
        with zmq.Context() as context, context.socket(zmq.PAIR) as link:
            link.set_hwm(0)
            link.linger = LINGER_MS
            link.connect(engine.endpoint)
            core = load(self._config, make_runner, link.send, self._before)
            if core is not None:
                gc.collect()
                gc.freeze()  # objects from loading are permanent; the collector need not scan them again
                run(core, link, self._config.fault_directory)
        if core is None:
            end_at_once()


def prepare(runners: str, config_json: str) -> EngineProgram:
    """Called in the fork server. runners: the name of a module like engine/make_runner.py."""
    return EngineProgram(msgspec.json.decode(config_json, type=EngineConfig), runners)


def end_at_once() -> None:
    """Ends this process without tearing down what the load has made, because the next process waits for its end."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def end_with_host(lifeline_fd: int) -> None:
    """Ends this process when the other end of its lifeline is closed."""
    os.set_inheritable(lifeline_fd, False)
    lifeline = socket.socket(fileno=lifeline_fd)

    def watch() -> None:
        lifeline.recv(1)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
