"""`make idle`: the CPU usage of a complete idle server.

Checks the rule that an idle server blocks. Independent of why CPU is used. Invariant: during the measurement every
protocol listens and the demo model's engine process is loaded.
"""

from __future__ import annotations

import asyncio
import time

from .resources import cpu_seconds
from .server import demo, running

LIMIT_PERCENT = 0.5
SETTLE_S = 3.0


async def run_idle(seconds: float) -> int:
    """Prints the percentage of one core, by process; 1 above LIMIT_PERCENT."""
    async with running(demo("demo")) as server:
        await asyncio.sleep(SETTLE_S)
        before, began_s = cpu_seconds(server.pid), time.monotonic()
        await asyncio.sleep(seconds)
        after, took_s = cpu_seconds(server.pid), time.monotonic() - began_s
        server.terminate()
        await server.exit_code()
    used = {name: after[name] - before.get(name, 0.0) for name in after}
    for name, cpu_s in used.items():
        print(f"{name}: {cpu_s:.2f} CPU s")
    percent = 100.0 * sum(used.values()) / took_s
    print(f"idle: {percent:.2f} % of a core over {took_s:.0f} s, limit {LIMIT_PERCENT} %")
    return 1 if percent > LIMIT_PERCENT else 0
