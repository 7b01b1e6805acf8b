"""Each server in turns: started, under one load after the other, ended.

Used by the command line. Independent of how a load is made and what the figures mean. Invariants: one server runs at a
time, with the load generator on the same cores; a figure is on disk as soon as it is measured, and is not measured
again on the same machine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmbackend.server.process_memory import tree_pss_mb
from tests.helpers.ports import free_port

from ..environments import Environments
from ..models import Models
from ..suite import Results, environ_of
from .contenders import CONTENDERS, MODELS, Contender, Kind, ServedModel
from .loads import MAIN_LOADS, OTHER_LOADS, Load, measure

START_TIMEOUT_S = 600.0
LOAD_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Campaign:
    """In order of importance: of each round first the main loads for all models, kinds and servers. until_s: monotonic;
    no load begins after it."""

    environments: Environments
    results: Results
    models: Sequence[str]
    kinds: Sequence[Kind]
    servers: Sequence[str]
    loads: Sequence[str]
    rounds: int
    until_s: float

    def run(self) -> None:
        models = [model for model in MODELS if model.name in self.models]
        contenders = [contender for contender in CONTENDERS if contender.name in self.servers]
        for round_number, loads in itertools.product(range(self.rounds), (MAIN_LOADS, OTHER_LOADS)):
            for model, kind, contender in itertools.product(models, self.kinds, contenders):
                if kind in contender.kinds(model):
                    self._measure(contender, model, kind, loads, round_number)

    def _measure(
        self, contender: Contender, model: ServedModel, kind: Kind, loads: Sequence[Load], round_number: int
    ) -> None:
        """What is missing of these loads, with one start of the server."""
        place = {"model": model.name, "weights": kind, "server": contender.name}
        key = place | {"round": round_number}
        missing = [load for load in loads if load.name in self.loads and not self.results.has(**key, load=load.name)]
        missing = [load for load in missing if not self.results.failed(**place, load=load.name)]
        if not missing or time.monotonic() > self.until_s:
            return
        key |= {"version": contender.version}
        try:
            path = self._models.path(model.name + contender.files[kind])
            with self._server(contender, path, kind) as server:
                for load in missing:
                    if time.monotonic() < self.until_s:
                        self._add(key | {"load": load.name}, self._under(load, server, model, round_number))
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            self._add(key | {"load": missing[0].name}, {"error": str(error)})

    def _under(self, load: Load, server: Server, model: ServedModel, round_number: int) -> dict[str, Any]:
        count, tokenizer = load.count(model.requests_divisor), self._models.tokenizer(model.name)
        try:
            figures = measure(self.environments, load, count, round_number, server.url, tokenizer, LOAD_TIMEOUT_S)
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            return {"error": str(error)}
        return figures | {"ready_s": server.ready_s, "pss_mb": round(sum(tree_pss_mb(server.pid).values()))}

    @property
    def _models(self) -> Models:
        return Models(self.environments)

    def _add(self, key: dict[str, Any], figures: dict[str, Any]) -> None:
        self.results.add({**key, **figures, "time": round(time.time())})
        shown = (
            figures.get("error")
            or f"{figures['output_tokens_per_s']:.0f} tokens/s, TTFT {figures['ttft_p50_ms']:.0f} ms"
        )
        print(time.strftime("%H:%M:%S"), *key.values(), shown, flush=True)

    @contextlib.contextmanager
    def _server(self, contender: Contender, path: Path, kind: Kind) -> Iterator[Server]:
        """One that answers; ended with all its processes."""
        port = free_port()
        environ = os.environ | environ_of(self.environments, contender.environment)
        began_s = time.monotonic()
        with (self.environments.logs / f"server-{contender.name}.log").open("wb") as log:
            command = contender.words(self.environments, path, port, kind)
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
        server = Server(f"http://127.0.0.1:{port}", process.pid)
        try:
            _wait_until_ready(server.url, process)
            yield Server(server.url, process.pid, round(time.monotonic() - began_s, 1))
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass(frozen=True)
class Server:
    """ready_s: from its start until it names its models."""

    url: str
    pid: int
    ready_s: float = 0.0


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the server is not ready after {START_TIMEOUT_S:.0f} s")
