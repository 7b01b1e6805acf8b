"""Faults of an engine, and their expected effects.

Used by the rounds. Independent of streams. Invariant: `inject` returns when the fault has happened, with the engine
processes that existed before.
Source of the file names: llmbackend/testing/faults.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .server import ServerUnderTest

COMMIT_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Injected:
    """engines: the processes before the fault. at_s: when it happened, monotonic seconds."""

    engines: Sequence[int]
    at_s: float


class Fault(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def ends_engine(self) -> bool:
        """Whether a new engine process must follow."""
        ...

    async def inject(self, server: ServerUnderTest, model: str, rng: random.Random) -> Injected: ...


@dataclass(frozen=True)
class Signal:
    """A signal to one engine process: SIGKILL is death from outside, SIGSTOP a hang."""

    number: signal.Signals
    ends_engine: bool = True

    @property
    def name(self) -> str:
        return self.number.name

    async def inject(self, server: ServerUnderTest, model: str, rng: random.Random) -> Injected:
        await server.engine_pid(model)
        engines = server.engine_pids(model)
        os.kill(rng.choice(engines), self.number)
        return Injected(engines, time.monotonic())


@dataclass(frozen=True)
class KillWithForkServer:
    """SIGKILL to an engine and to the process from which the next one would be forked, in either order."""

    name: str = "SIGKILL of engine and fork server"
    ends_engine: bool = True

    async def inject(self, server: ServerUnderTest, model: str, rng: random.Random) -> Injected:
        await server.engine_pid(model)
        engines = server.engine_pids(model)
        both = [engines[-1], *server.fork_server_pids(model)[-1:]]
        for pid in rng.sample(both, len(both)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return Injected(engines, time.monotonic())


@dataclass(frozen=True)
class InStep:
    """A fault that the engine commits by itself at its next step with work."""

    name: str
    ends_engine: bool

    async def inject(self, server: ServerUnderTest, model: str, rng: random.Random) -> Injected:
        """Raises TimeoutError when no step takes the fault."""
        await server.engine_pid(model)
        engines = server.engine_pids(model)
        path = server.fault_directory(model) / self.name
        path.touch()
        async with asyncio.timeout(COMMIT_TIMEOUT_S):
            while path.exists():
                await asyncio.sleep(0.005)
        return Injected(engines, time.monotonic())


KILL = Signal(signal.SIGKILL)
KILL_WITH_FORK_SERVER = KillWithForkServer()
STOP = Signal(signal.SIGSTOP)
HANG = InStep("hang", ends_engine=True)
EXCEPTION = InStep("exception", ends_engine=False)
ESCAPE = InStep("escape", ends_engine=True)
SEGFAULT = InStep("segfault", ends_engine=True)
EXIT = InStep("exit", ends_engine=True)
OUT_OF_MEMORY = InStep("out-of-memory", ends_engine=False)
NAN_LOGITS = InStep("nan-logits", ends_engine=False)
MALFORMED = InStep("malformed", ends_engine=True)
