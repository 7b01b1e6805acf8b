"""All links of a cluster that can be cut, in a separate process, so that a round's clients cannot delay a link.

Used by clusters. Independent of the traffic. Invariant: a command has taken effect when its function returns. `python
-m trials.chaos.cluster.links` is that process: one line of JSON per command, one per reply.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

from .relay import Relay


class Links:
    """Used on one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __spec__.name), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    async def lead(self, name: str, port: int) -> int:
        """Makes a link, or leads it to another port from now on; its own port."""
        return int(await self._do("lead", name, port))

    async def cut(self, name: str) -> None:
        await self._do("cut", name)

    async def heal(self, name: str) -> None:
        await self._do("heal", name)

    async def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()

    async def _do(self, *command: Any) -> Any:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        async with self._lock:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            return json.loads(await self._process.stdout.readline())


class _Served:
    """In the process of the links."""

    def __init__(self) -> None:
        self._relays: dict[str, Relay] = {}
        self._ports: dict[str, int] = {}

    async def do(self, what: str, name: str, port: int = 0) -> int:
        if what == "lead":
            self._ports[name] = port
            if name not in self._relays:
                self._relays[name] = Relay(name, lambda: ("127.0.0.1", self._ports[name]))
                await self._relays[name].start()
            return self._relays[name].port
        relay = self._relays[name]
        if what == "cut":
            relay.cut()
        else:
            relay.heal()
        return 0


async def _serve() -> None:
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    served = _Served()
    async for line in commands:
        print(json.dumps(await served.do(*json.loads(line))), flush=True)


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve())
