"""Served engines as child processes on loopback, a locator that knows them, and a relay that can cut a connection.

Used by tests of hosts that share engines. Independent of what is computed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.process.served.locating import EngineAddress
from llmbackend.engine.process.served.served_order import ServedEngineNews, ServedEngineOrder

END_TIMEOUT_S = 30.0


class ServedEngine:
    """One keeper with its engine."""

    def __init__(self, config: EngineConfig, secrets_folder: Path, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llmbackend.engine.process.served.served_engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        order = ServedEngineOrder(config=config, secrets_folder=str(secrets_folder), **options)
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")
        self.process.stdin.flush()
        self.news = self.read_news()

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(f"tcp://127.0.0.1:{self.news.port}", self.news.incarnation, "test")

    def read_news(self) -> ServedEngineNews:
        """Of the next process of the engine."""
        assert self.process.stdout is not None
        return msgspec.json.decode(self.process.stdout.readline(), type=ServedEngineNews)

    def kill(self) -> ServedEngineNews:
        """Kills the engine's process; the next one's."""
        os.kill(self.news.pid, signal.SIGKILL)
        self.news = self.read_news()
        return self.news

    def leave(self) -> None:
        """As a parent that ends."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self) -> None:
        self.leave()
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(END_TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


class FixedLocator:
    """Says what the test says. See EngineLocator."""

    def __init__(self, *addresses: EngineAddress | None) -> None:
        self.addresses = list(addresses)
        self.released: list[int] = []
        self.num_asked = 0
        self._callback: Callable[[], None] = lambda: None

    def locate(self, index: int, config: EngineConfig) -> EngineAddress | None:
        self.num_asked += 1
        return self.addresses[index]

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def release(self, index: int, config: EngineConfig) -> None:
        self.released.append(index)

    def move(self, index: int, address: EngineAddress | None) -> None:
        self.addresses[index] = address
        self._callback()


class Relay:
    """Passes TCP connections on to an engine, until it is cut: then it keeps them open and is silent."""

    def __init__(self, address: EngineAddress) -> None:
        host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = EngineAddress(
            f"tcp://127.0.0.1:{self._listener.getsockname()[1]}", address.incarnation, address.node
        )
        self.is_cut = False
        self._wake, self._woken = socket.socketpair()
        self._ends: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._wake.close()
        self._thread.join(END_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            ends = () if self.is_cut else tuple(self._ends)
            ready, _, _ = select.select([self._listener, self._woken, *ends], [], [], 0.02)
            if self._woken in ready:
                break
            for one in ready:
                if one is self._listener:
                    self._accept()
                elif not self.is_cut and one in self._ends:
                    self._pass_on(one)
        for one in (self._listener, self._woken, *self._ends):
            one.close()

    def _accept(self) -> None:
        ours, _ = self._listener.accept()
        theirs = socket.create_connection(self._target)
        self._ends[ours], self._ends[theirs] = theirs, ours

    def _pass_on(self, source: socket.socket) -> None:
        target = self._ends[source]
        try:
            if data := source.recv(1 << 16):
                target.sendall(data)
                return
        except OSError:
            pass
        for one in (source, target):
            del self._ends[one]
            one.close()
