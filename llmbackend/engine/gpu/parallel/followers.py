"""Rank 0's view of the processes of ranks 1 and up: forks or accepts them, sends them the same messages, and ends them
with the engine.

Used by the engine's process, which is rank 0; independent of torch. Invariants: local followers are forked before the
engine's process starts a thread or uses a device, so a fork takes milliseconds and shares the imports, and the kernel
ends them when the engine's process ends for any reason; followers started elsewhere end with their connection; a
follower lost during steps ends the engine's process, because the other ranks would wait for it forever, and the
supervisor of that process starts a new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import NoReturn

import msgspec

from ...config import EngineConfig
from ...errors import LOST_RANK_EXIT_CODE
from ...load_progress import report
from .links import Failed, FromFollower, Loaded, Message, RankListener, Stop

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 3.0
GRACE_S = 2.0
NOTICE_S = 0.5
"""A failed step is reported after this delay, so that a lost rank is detected and named first."""
_PR_SET_PDEATHSIG = 1

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromFollower).decode


@dataclass(frozen=True, slots=True)
class Follower:
    rank: int
    link: Connection
    pid: int | None = None
    """Of a forked process."""
    machine: str = ""
    """Of a process started elsewhere."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.machine}" if self.machine else f"rank {self.rank}"


class Followers:
    """Used by one thread, in addition to that of `watch`."""

    def __init__(self, followers: Sequence[Follower]) -> None:
        self._followers = tuple(followers)
        self._watcher: threading.Thread | None = None
        self._closing = threading.Event()

    def send(self, message: Message) -> None:
        data = _encode(message)
        for follower in self._followers:
            follower.link.send_bytes(data)

    def expect_loaded(self) -> None:
        """Waits until each follower has loaded its part. Raises ValueError with a follower's reason if one cannot."""
        for follower in self._followers:
            try:
                loaded = _decode(follower.link.recv_bytes())
            except (EOFError, OSError):
                raise ValueError(f"{follower.name} exited while loading the model") from None
            if loaded.error:
                raise ValueError(f"{follower.name}: {loaded.error}")

    def watch(self) -> None:
        """Makes this process end when a follower ends."""
        self._watcher = threading.Thread(target=self._await_end, name="llm-followers", daemon=True)
        self._watcher.start()

    def abandon_step(self, reason: str) -> NoReturn:
        """As `abandon`, unless the reason is the loss of a follower, which is detected within NOTICE_S."""
        time.sleep(NOTICE_S)
        self.abandon(reason)

    def abandon(self, reason: str) -> NoReturn:
        """Ends this process, and so the followers, immediately, because their devices may be waiting for each other."""
        logger.error("%s: this engine ends", reason)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(LOST_RANK_EXIT_CODE)

    def stop(self) -> None:
        """Tells the followers to end; returns at once."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self.send(Stop())

    def reap(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Waits for followers that were told to stop or are no longer needed; after timeout_s kills those that this
        process forked, and leaves the others."""
        self._closing.set()
        deadline_s = time.monotonic() + timeout_s
        for follower in self._followers:
            is_gone = _ends(follower.link, deadline_s)
            if follower.pid is not None:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    if not is_gone:
                        os.kill(follower.pid, signal.SIGKILL)
                    os.waitpid(follower.pid, 0)
            else:
                _shut_down(follower.link)
        if self._watcher is not None:
            self._watcher.join()
        for follower in self._followers:
            follower.link.close()

    def _await_end(self) -> None:
        """Ends this process when a follower ends. If the follower reports why it cannot start, rank 0 has GRACE_S
        seconds to fail with the same reason."""
        ready = wait([follower.link for follower in self._followers])
        if self._closing.is_set():
            return
        for follower in (follower for follower in self._followers if follower.link in ready):
            reason = f"{follower.name} was lost"
            with contextlib.suppress(EOFError, OSError):
                last = _decode(follower.link.recv_bytes())
                assert isinstance(last, Failed)
                reason = f"{follower.name}: {last.error}"
                if self._closing.wait(GRACE_S):
                    return
            self.abandon(reason)


def _ends(link: Connection, deadline_s: float) -> bool:
    """Whether the process at the other side ends in time. The link reads end of file once it is gone."""
    with contextlib.suppress(OSError):
        try:
            while link.poll(max(deadline_s - time.monotonic(), 0.0)):
                link.recv_bytes()
        except EOFError:
            return True
    return False


def _shut_down(link: Connection) -> None:
    """Wakes a thread that waits for the link. Closing it would not."""
    with socket.socket(fileno=os.dup(link.fileno())) as end, contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def fork_followers(size: int, run: Callable[[int, Connection], None], not_theirs: Sequence[int]) -> Followers:
    """Forks ranks 1 .. size - 1, each of which calls `run(rank, link)` and exits. not_theirs: descriptors that they
    close."""
    parent, followers = os.getpid(), list[Follower]()
    for rank in range(1, size):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _end_with(parent)
            ours.close()
            for descriptor in (*not_theirs, *(follower.link.fileno() for follower in followers)):
                os.close(descriptor)
            _run(rank, Connection(theirs.detach()), run)
        theirs.close()
        followers.append(Follower(rank, Connection(ours.detach()), pid))
    return Followers(followers)


def meet_followers(config: EngineConfig, listener: RankListener, fingerprint: str) -> Followers:
    """Waits for ranks started elsewhere, which connect once they have loaded their parts. Raises ValueError if one
    cannot take part, or does not connect within the load timeout."""
    met: dict[int, Follower] = {}
    deadline_s = time.monotonic() + config.load_timeout_s
    listener.listen()
    with contextlib.ExitStack() as on_failure:
        while missing := sorted(set(range(1, config.num_ranks)) - met.keys()):
            names = ", ".join(map(str, missing))
            report(f"waiting for rank {names}")
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise ValueError(f"rank {names} did not join within {config.load_timeout_s:g} s")
            if (come := listener.accept(left_s)) is None:
                continue
            on_failure.callback(come[0].close)
            follower = _welcome(*come, fingerprint)
            if follower is None:
                continue
            if follower.rank in missing:
                met[follower.rank] = follower
            else:
                logger.warning("%s joined a second time", follower.name)
                follower.link.close()
        on_failure.pop_all()
    return Followers([met[rank] for rank in sorted(met)])


def _welcome(link: Connection, address: str, fingerprint: str) -> Follower | None:
    """None = it disconnected. Raises ValueError."""
    try:
        loaded = _decode(link.recv_bytes())
    except (EOFError, OSError):
        return None
    assert isinstance(loaded, Loaded)
    follower = Follower(loaded.rank, link, machine=f"{loaded.machine} ({address})")
    if loaded.error:
        raise ValueError(f"{follower.name}: {loaded.error}")
    if loaded.fingerprint != fingerprint:
        raise ValueError(
            f"{follower.name} has release and arguments {loaded.fingerprint}, expected {fingerprint}, those of rank 0"
        )
    return follower


def _run(rank: int, link: Connection, run: Callable[[int, Connection], None]) -> NoReturn:
    """Exits without unwinding the parent's stack, flushing its buffers or closing its files."""
    try:
        run(rank, link)
    except BaseException:
        logger.exception("rank %d failed", rank)
        os._exit(1)
    os._exit(0)


def _end_with(parent: int) -> None:
    """The kernel ends this process when its parent ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "a follower cannot be bound to its engine")
    if os.getppid() != parent:  # it has already ended
        os._exit(1)
