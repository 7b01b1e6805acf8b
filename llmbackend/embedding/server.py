"""Server: `llmbackend serve` as an object.

For programs, notebooks and tests that need a server's protocols. The server is a child process: it neither competes for
the program's interpreter lock nor handles its signals, and neither crashes with the other. Invariants: an existing
Server is ready; after `close`, or however the program ends, no process is left.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from llmbackend.server.process import READY_DESCRIPTOR

STOP_GRACE_S: Final = 15.0
"""How long a server may take to end after its exit timeout."""
_TAIL_BYTES: Final = 4000
_MAX_LINE_BYTES: Final = 65536


class Server:
    """A running server on free ports of the loopback interface; a context manager."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        model_repository: str | Path | None = None,
        demo: bool = False,
        address: str = "127.0.0.1",
        http_port: int = 0,
        grpc_port: int | None = 0,
        metrics_port: int | None = 0,
        arguments: Sequence[str] = (),
        log_file: str | Path | None = None,
        start_timeout_s: float = 600.0,
        stop_timeout_s: int = 30,
    ) -> None:
        """Starts the server; returns once its models are loaded and its ports listen.

        model             a checkpoint's directory, a GGUF file or a hub id, served without a repository
        model_repository  a folder of models in Triton's layout
        demo              whether to serve the bundled demo model
        address           of all endpoints
        http_port         0 = any free port, also for the two below
        grpc_port         None = no gRPC
        metrics_port      None = no metrics endpoint
        arguments         further flags of `llmbackend serve`: ("--dtype=bfloat16", "--max-model-len=4096")
        log_file          file to which the server's output is appended; None = a temporary file
        start_timeout_s   time limit for the start
        stop_timeout_s    time limit for running requests in `close`

        Raises RuntimeError with the end of the server's log if it does not start.
        """
        self._stop_timeout_s = stop_timeout_s
        self._log: IO[bytes] = tempfile.TemporaryFile("a+b") if log_file is None else open(log_file, "a+b")  # noqa: SIM115
        flags = [] if model is None else [f"--model={model}"]
        flags += [] if model_repository is None else [f"--model-repository={model_repository}"]
        flags += ["--demo"] * demo
        flags += _port_flags(address, http_port, grpc_port, metrics_port)
        flags += [f"--exit-timeout-secs={stop_timeout_s}", *arguments]
        ready, told = os.pipe()
        try:
            self._process = _start(flags, self._log, told)
        finally:
            os.close(told)
        try:
            self._urls = self._wait_until_ready(ready, start_timeout_s)
        except BaseException:
            self._kill()
            raise
        finally:
            os.close(ready)

    @property
    def http_url(self) -> str:
        """Like http://127.0.0.1:8000; the OpenAI API is under /v1."""
        return self._urls["http"]

    @property
    def grpc_url(self) -> str:
        """Like 127.0.0.1:8001, for tritonclient. Raises KeyError without gRPC."""
        return self._urls["grpc"]

    @property
    def metrics_url(self) -> str:
        """Raises KeyError without a metrics port."""
        return self._urls["metrics"]

    @property
    def exit_code(self) -> int | None:
        """None while the server runs."""
        return self._process.poll()

    def close(self) -> int:
        """Waits for running requests, stops the server and returns its exit code; 0 = clean. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(self._stop_timeout_s + STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._release()
        return self._process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_until_ready(self, ready: int, timeout_s: float) -> Mapping[str, str]:
        deadline_s = time.monotonic() + timeout_s
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(ready, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if (left_s := deadline_s - time.monotonic()) <= 0:
                    raise RuntimeError(f"the server was not ready after {timeout_s:g} s{self._log_tail()}")
                if not selector.select(left_s):
                    continue
                part = os.read(ready, _MAX_LINE_BYTES)
                line += part
                if not part:
                    code = self._process.wait()
                    raise RuntimeError(f"the server did not start: exit code {code}{self._log_tail()}")
        urls: dict[str, str] = json.loads(line)
        return urls

    def _log_tail(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _TAIL_BYTES))
        text = self._log.read().decode(errors="replace").strip()
        return f"; the end of its log:\n{text}" if text else ""

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._release()

    def _release(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._log.close()


def _start(flags: Sequence[str], log: IO[bytes], told: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"{__package__}.server_process", *flags]
    settings: Any = {"stdout": log, "stderr": log, "pass_fds": (told,), "start_new_session": True}
    environment = {**os.environ, READY_DESCRIPTOR: str(told)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, **settings)


def _port_flags(address: str, http: int, grpc: int | None, metrics: int | None) -> list[str]:
    flags = []
    for name, port in (("http", http), ("grpc", grpc), ("metrics", metrics)):
        flags += [f"--allow-{name}=false"] if port is None else [f"--{name}-address={address}", f"--{name}-port={port}"]
    return flags
