"""A server, its clients, and the undisturbed result of each request on it.

Used by the rounds. Independent of faults. Invariants: expectations come from this very server before anything is done
to it; every stream that a round started is judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from .agents.api_requests import API_PROTOCOLS
from .agents.api_validity import api_validity
from .agents.validity import validity
from .faults import Fault, Injected
from .judge import judge, judge_prefix
from .load import Arrivals, Clients, Load, Run, undisturbed
from .outcome import Outcome
from .server import ModelSetup, ServerUnderTest, running
from .specs import StreamSpec
from .table import Row

RECOVERY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Stage:
    server: ServerUnderTest
    clients: Clients
    expected: dict[StreamSpec, Outcome]

    def specs(self, model: str) -> list[StreamSpec]:
        return [spec for spec in self.expected if spec.model == model]

    def load(self, model: str, concurrency: int = 40) -> Load:
        return Load(self.clients, self.specs(model), concurrency)

    def judge(self, row: Row, runs: Iterable[Run], may_fail: int = 0) -> None:
        """Judges every stream; as many as `may_fail` may have ended with an error (what came must be right)."""
        for run in runs:
            row.streams += 1
            spec, seen = run.spec, run.outcome
            name = f"{spec.protocol} stream {spec.index} of {spec.model}"
            if run.abandoned or (seen.error is not None and may_fail > 0):
                may_fail -= not run.abandoned
                row.otherwise += 1
                row.add(judge_prefix(self.expected[spec], seen), name=name)
                continue
            verdict = judge(self.expected[spec], seen)
            row.completed += verdict.is_clean
            row.add(verdict, name=name)
            if spec.protocol in ("agent", "resumed_agent"):
                row.add_validity(validity(spec, seen), name=name)
            elif spec.protocol in API_PROTOCOLS:
                row.add_validity(api_validity(spec, seen), name=name)

    async def check_idle(self, row: Row, model: str) -> None:
        """All requests gone and all blocks back."""
        if reason := await self.server.still_busy(model):
            row.problems.append(reason)

    async def recovery_s(self, row: Row, model: str, fault: Fault, injected: Injected, arrivals: Arrivals) -> None:
        """Notes the time from the fault to the first token that comes after it: from the new engine where the fault
        ends one, since tokens of the old one may still be under way."""
        try:
            since_s = injected.at_s
            if fault.ends_engine:
                await self.server.engine_pids_other_than(injected.engines, model, RECOVERY_TIMEOUT_S)
                since_s = time.monotonic()
            first_s = await _first_after(arrivals, since_s)
        except TimeoutError:
            row.problems.append(f"no token within {RECOVERY_TIMEOUT_S:g} s of fault {row.injected}")
            return
        row.recoveries_s.append(first_s - injected.at_s)


async def _first_after(arrivals: Arrivals, when_s: float) -> float:
    async with asyncio.timeout(RECOVERY_TIMEOUT_S):
        while (first_s := arrivals.first_after(when_s)) is None:
            await asyncio.sleep(0.005)
    return first_s


@contextlib.asynccontextmanager
async def open_stage(
    models: Sequence[ModelSetup],
    specs: Sequence[StreamSpec],
    arguments: Sequence[str] = (),
    has_system_faults: bool = False,
    memory_mib: int = 0,
) -> AsyncIterator[Stage]:
    """memory_mib, has_system_faults: as those of `running`."""
    async with (
        running(*models, arguments=arguments, has_system_faults=has_system_faults, memory_mib=memory_mib) as server,
        Clients(server.address.http, server.address.grpc) as clients,
    ):
        yield Stage(server, clients, await undisturbed(clients, specs))
        if server.is_running:
            server.remember_processes()
            server.terminate()
            code = await server.exit_code()
            if code != 0:
                raise RuntimeError(f"the server ended with exit code {code}, expected 0")
        if left := await server.processes_left():
            raise RuntimeError(f"processes outlived the server: {left}")
