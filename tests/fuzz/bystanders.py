"""Streams of well-behaved clients beside the fuzzing: they must get what they get on a quiet server.

For: `make fuzz`. Does not know: what is fuzzed. Invariant: each stream that began is compared, token by token, with the
same request's answer before the fuzzing began.
"""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

from tests.chaos.judge import judge
from tests.chaos.load import Clients, Load, undisturbed
from tests.chaos.specs import Lengths, make_specs

from .tally import Finding, Tally
from .victim import BYSTANDER_MODEL, Victim

CONCURRENCY = 4
_SPECS = 48


class Bystanders:
    """`with Bystanders(victim, seed) as tally:` keeps streams running on a thread; leaving it judges them."""

    def __init__(self, victim: Victim, seed: int) -> None:
        self.tally = Tally("streams beside")
        self._victim = victim
        self._specs = make_specs(seed, _SPECS, BYSTANDER_MODEL, Lengths(output_tokens=(20, 60)))
        self._expected_known = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="bystanders")

    def __enter__(self) -> Tally:
        self._thread.start()
        while not self._expected_known.wait(0.1) and self._thread.is_alive():
            pass
        return self.tally

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    async def _run(self) -> None:
        async with Clients(self._victim.address.http, self._victim.address.grpc) as clients:
            expected = await undisturbed(clients, self._specs, concurrency=8)
            self._expected_known.set()
            async with Load(clients, self._specs, CONCURRENCY) as load:
                while not self._over.is_set():
                    await asyncio.sleep(0.1)
            for run in load.runs:
                self.tally.inputs += 1
                verdict = judge(expected[run.spec], run.outcome)
                if not verdict.is_clean:
                    self.tally.add(Finding("violation", verdict.reason), run.spec)
