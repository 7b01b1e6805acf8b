"""An engine core at the end of a socket: one message in, one message out, per step.

For: the engine's process and the inline thread, which run the same loop. Does not know: which of the two it is in.
Invariant: it sends EngineStarted messages first, the last of which says how loading ended, then one StepResult per
step; it blocks on the socket while there is nothing to compute, and only looks into it, without waiting, between the
steps of a busy engine; each time that work ends it checks that nothing was left behind.
"""

from __future__ import annotations

import logging

import msgspec
import zmq

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore, make_runner
from llmbackend.engine.fault_injection import Faults, FaultyLink, Link
from llmbackend.engine.gpu.parallel.followers import Followers
from llmbackend.engine.infer_request import EngineInput, EngineStarted
from llmbackend.engine.load_progress import LoadProgress, reporting_to

from .shortage import is_shortage

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode_input = msgspec.msgpack.Decoder(EngineInput).decode


def load(config: EngineConfig, socket: Link, followers: Followers | None = None) -> EngineCore | None:
    """Loads the model and reports it, or reports in one line why it cannot be loaded and returns None. followers: the
    other ranks of an engine over several devices."""

    def tell(progress: LoadProgress) -> None:
        socket.send(_encode(EngineStarted(progress=progress)))

    try:
        with reporting_to(tell):
            core = EngineCore(config, make_runner(config, followers))
    except Exception as error:
        text = str(error)
        if not isinstance(error, ValueError | OSError | RuntimeError | ImportError):
            logger.exception("loading the model failed in an unexpected way")
            text = f"{type(error).__name__}: {error}"
        socket.send(_encode(EngineStarted(error=text or type(error).__name__, is_shortage=is_shortage(error))))
        return None
    socket.send(_encode(EngineStarted(info=core.info)))
    return core


def run(core: EngineCore, socket: Link, fault_directory: str) -> None:
    """Steps until the shutdown message, and then closes the core."""
    link = FaultyLink(socket, Faults(fault_directory)) if fault_directory else socket
    try:
        while _take_inputs(core, link):
            link.send(_encode(core.step()))
            if not core.has_work and (breach := core.check_idle()):
                link.send(_encode(breach))
    finally:
        core.close()


def _take_inputs(core: EngineCore, link: Link) -> bool:
    """Applies all messages that are there; waits for one when the core has nothing to do. False = shut down."""
    while True:
        try:
            message = _decode_input(link.recv(zmq.NOBLOCK if core.has_work else 0))
        except zmq.Again:
            return True
        if message.shutdown:
            return False
        for request in message.add:
            core.add(request)
        for request_id in message.abort:
            core.abort(request_id)
