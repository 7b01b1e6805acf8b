"""The same load over the network: 32 streaming clients against our server and the peers' servers.

For: the command line, after the engines alone were measured. Does not know: protocols; standard load generators speak
them: `vllm bench serve` (OpenAI completions over server-sent events) for all servers, perf_analyzer (gRPC stream) for
ours, since only Triton's protocol has one. Invariants: servers run one at a time, beside their load generator on the
same cores; our engine alone, with as many rows as there are clients, is measured in the same round.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .entries import ENTRIES, OURS, Entry
from .environments import Environments
from .models import Models
from .report import best_entries
from .suite import Results, environ_of, run_process
from .workloads import workload

CLIENTS = 32
PROMPT_TOKENS, OUTPUT_TOKENS, REQUESTS = 32, 128, 64
MIN_COMPLETED = 0.9
"""A server that fails more of its requests than this leaves has no figure; the tokens of failed ones do not count."""
START_TIMEOUT_S = 600.0
SERVED_NAME = "bench"


@dataclass(frozen=True)
class Place:
    """Where a server listens, and the checkpoint whose tokenizer the load generator uses."""

    http_port: int
    grpc_port: int
    checkpoint: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"


@dataclass(frozen=True)
class ServerSuite:
    environments: Environments
    results: Results
    models: tuple[str, ...]
    rounds: int
    timeout_s: float

    def run(self) -> None:
        for round_number in range(self.rounds):
            for model in self.models:
                for entry in self._entries(model):
                    self._measure(entry, model, round_number)

    def _entries(self, model: str) -> list[Entry]:
        """The form of each engine with a server that was fastest offline."""
        best = best_entries(self.results.lines, model, "W1")
        return [ENTRIES[name] for (engine, _), name in sorted(best.items()) if engine in _COMMANDS]

    def _measure(self, entry: Entry, model: str, round_number: int) -> None:
        key = {"entry": entry.name, "model": model, "round": round_number}
        loads = {"server HTTP": self._load_http}
        if entry.engine == OURS:
            self._offline(entry, model, key)
            loads["server gRPC"] = self._load_grpc
        missing = {name: load for name, load in loads.items() if not self.results.has(**key, workload=name)}
        if not missing:
            return
        try:
            with self._server(entry, model) as place:
                for name, load in missing.items():
                    self._record(key, name, lambda load=load: load(place))  # type: ignore[misc]
        except (OSError, RuntimeError) as error:
            for name in missing:
                self._record(key, name, _raising(error))

    def _offline(self, entry: Entry, model: str, key: dict[str, Any]) -> None:
        name = f"offline, {CLIENTS} rows"
        if not self.results.has(**key, workload=name):
            self._record(key, name, lambda: self._engine_alone(entry, model))

    def _record(self, key: dict[str, Any], name: str, measure: Callable[[], dict[str, Any]]) -> None:
        try:
            figures = measure()
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            figures = {"error": str(error)}
        self.results.add({**figures, **key, "workload": name, "time": time.time()})
        shown = figures.get("error") or f"{figures['output_tokens_per_s']:.1f} output tokens/s"
        print(
            f"{time.strftime('%H:%M:%S')} {name} round {key['round']} {key['entry']} on {key['model']}: {shown}",
            flush=True,
        )

    def _engine_alone(self, entry: Entry, model: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as directory:
            output = Path(directory) / "results"
            command = [str(self.environments.python("ours")), "-m", "benchmarks.drivers.llmbackend_bench"]
            command += ["--model", str(Models(self.environments).path(model)), "--json", str(output)]
            command += [*entry.options, "--max-num-seqs", str(CLIENTS)]
            _run(command, environ_of(self.environments, "ours"), self.environments.logs / "offline.log", self.timeout_s)
            figures: dict[str, Any] = json.loads(output.read_text())
        return figures

    @contextlib.contextmanager
    def _server(self, entry: Entry, model: str) -> Iterator[Place]:
        """A server that answers; killed with all its processes at the end."""
        models = Models(self.environments)
        place = Place(_free_port(), _free_port(), models.path(model))
        scratch = Path(tempfile.mkdtemp(prefix="llmbackend-bench-"))
        command = _COMMANDS[entry.engine](
            self.environments, entry, models.path(entry.model.format(model)), place, scratch
        )
        environ = os.environ | environ_of(self.environments, entry.environment)
        with (self.environments.logs / f"server-{entry.name}.log").open("wb") as log:
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_until_ready(place, process)
            yield place
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(scratch)

    def _load_http(self, place: Place) -> dict[str, Any]:
        """`vllm bench serve`, whose own warm-up requests come first."""
        with tempfile.TemporaryDirectory() as directory:
            command = [str(self.environments.folder("vllm") / "bin" / "vllm"), "bench", "serve", "--backend", "openai"]
            command += ["--base-url", place.url, "--endpoint", "/v1/completions", "--model", SERVED_NAME]
            command += ["--tokenizer", str(place.checkpoint), "--dataset-name", "random", "--seed", "0"]
            command += ["--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)]
            command += ["--num-prompts", str(REQUESTS), "--max-concurrency", str(CLIENTS), "--num-warmups", "8"]
            command += ["--ignore-eos", "--temperature", "0", "--disable-tqdm"]
            # llama.cpp's server closes idle connections while clients use them: a new connection for each request.
            command += ["--header", "Connection=close"]
            command += [
                "--save-result",
                "--save-detailed",
                "--result-dir",
                directory,
                "--result-filename",
                "result.json",
            ]
            environ = environ_of(self.environments, "ours")
            _run(command, environ, self.environments.logs / "load-http.log", self.timeout_s)
            found = json.loads((Path(directory) / "result.json").read_text())
        errors = [error.strip().splitlines()[-1][:300] for error in found["errors"] if error]
        if found["completed"] < MIN_COMPLETED * REQUESTS:
            raise RuntimeError(f"{found['completed']} of {REQUESTS} requests completed: {errors[:1]}")
        return {
            "completed": found["completed"],
            "request_errors": errors,
            "output_tokens": found["total_output_tokens"],
            "wall_s": found["duration"],
            "output_tokens_per_s": found["output_throughput"],
            "ttft_p50_ms": found["median_ttft_ms"],
            "ttft_p99_ms": found["p99_ttft_ms"],
            "itl_p50_ms": found["median_itl_ms"],
            "itl_p99_ms": found["p99_itl_ms"],
        }

    def _load_grpc(self, place: Place) -> dict[str, Any]:
        """perf_analyzer over one bidirectional stream per client; a response is a token."""
        program, library_path = self.environments.perf_analyzer()
        with tempfile.TemporaryDirectory() as directory:
            data, profile = Path(directory) / "input.json", Path(directory) / "profile.json"
            data.write_text(json.dumps({"data": _grpc_inputs()}))
            command = [str(program), "-m", SERVED_NAME, "-u", f"127.0.0.1:{place.grpc_port}", "-i", "grpc"]
            command += ["--streaming", "--async", "--input-data", str(data), "--request-count", str(REQUESTS)]
            command += ["--concurrency-range", str(CLIENTS), "--profile-export-file", str(profile), "-s", "999"]
            environ = {"LD_LIBRARY_PATH": library_path}
            _run(command, environ, self.environments.logs / "load-grpc.log", self.timeout_s)
            requests = json.loads(profile.read_text())["experiments"][0]["requests"]
        return _grpc_figures(requests)


def _grpc_inputs() -> list[dict[str, Any]]:
    sampling = json.dumps({"max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True})
    return [
        {
            "input_ids": {"content": request.prompt, "shape": [len(request.prompt)]},
            "stream": [True],
            "sampling_parameters": [sampling],
        }
        for request in workload("W1")
    ]


def _grpc_figures(requests: list[dict[str, Any]]) -> dict[str, Any]:
    """From each request's start and its responses' times, in ns."""
    requests = [request for request in requests if request["response_timestamps"]]
    wall_s = (max(r["response_timestamps"][-1] for r in requests) - min(r["timestamp"] for r in requests)) / 1e9
    first_ms = sorted((r["response_timestamps"][0] - r["timestamp"]) / 1e6 for r in requests)
    tokens = OUTPUT_TOKENS * len(requests)
    return {
        "output_tokens": tokens,
        "responses": sum(len(r["response_timestamps"]) for r in requests),
        "wall_s": wall_s,
        "output_tokens_per_s": tokens / wall_s,
        "ttft_p50_ms": first_ms[len(first_ms) // 2],
        "ttft_p99_ms": first_ms[-1],
    }


def _our_server(environments: Environments, entry: Entry, model: Path, place: Place, scratch: Path) -> list[str]:
    """A repository whose model.json has the entry's options."""
    words = entry.options[1:]
    arguments = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }
    version = scratch / SERVED_NAME / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps({"model": str(model), **arguments}))
    (version.parent / "config.pbtxt").write_text('backend: "llm"\n')
    ports = {"http": place.http_port, "grpc": place.grpc_port, "metrics": 0}
    flags = [flag for name, port in ports.items() for flag in (f"--{name}-address=127.0.0.1", f"--{name}-port={port}")]
    return [
        str(environments.python("ours")),
        "-m",
        "llmbackend.cli",
        "serve",
        "--model-repository",
        str(scratch),
        *flags,
    ]


def _vllm_server(environments: Environments, entry: Entry, model: Path, place: Place, scratch: Path) -> list[str]:
    command = [str(environments.folder("vllm") / "bin" / "vllm"), "serve", str(model), *entry.options]
    command += ["--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(place.http_port)]
    return [*command, "--max-model-len", "2048", "--max-num-seqs", "64"]


def _llama_server(environments: Environments, entry: Entry, model: Path, place: Place, scratch: Path) -> list[str]:
    command = [str(environments.llama_cpp_binaries / "llama-server"), "-m", str(model), "--alias", SERVED_NAME]
    command += ["--host", "127.0.0.1", "--port", str(place.http_port), "--parallel", str(CLIENTS)]
    threads = str(os.cpu_count() or 1)
    return [*command, "-c", str(CLIENTS * 256), "-t", threads, "-tb", threads, "--no-kv-unified"]


_COMMANDS: dict[str, Callable[[Environments, Entry, Path, Place, Path], list[str]]] = {
    OURS: _our_server,
    "vLLM": _vllm_server,
    "llama.cpp": _llama_server,
}


def _wait_until_ready(place: Place, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        with contextlib.suppress(OSError):
            body = json.dumps({"model": SERVED_NAME, "prompt": "x", "max_tokens": 1}).encode()
            request = urllib.request.Request(f"{place.url}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                if response.status == 200:
                    return
        time.sleep(0.5)
    raise RuntimeError(f"the server is not ready after {START_TIMEOUT_S:.0f} s")


def _run(command: list[str], environ: dict[str, str], log: Path, timeout_s: float) -> None:
    if error := run_process(command, os.environ | environ, log, timeout_s):
        raise RuntimeError(error)


def _raising(error: Exception) -> Callable[[], dict[str, Any]]:
    def measure() -> dict[str, Any]:
        raise error

    return measure


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
