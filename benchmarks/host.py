"""The cost of the host itself, compared with NVIDIA's C++ server on the same models: `python -m benchmarks.host`.

For docs/benchmarks_host.md. Independent of LLMs; its models are an identity model and one that only streams.
The client for single requests is a loop of raw connections (HTTP) or perf_analyzer (gRPC), for streamed responses a raw
gRPC stream.
Invariants: both servers are measured in turns within one run, one under load at a time; CPU time is that of a server's
whole process tree, without the client's.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.helpers.server_process import start_server, stop_server
from trials.live.real_triton import RealTriton

from .environments import Environments
from .unary_client import http_latencies_s

ROOT = Path(__file__).resolve().parent.parent
CONCURRENCIES = (1, 8, 32, 64)
STREAMED_RESPONSES = 4000
WINDOW_MS = 1500
WARMUP_S = 0.3
UNSTABLE_PERCENT = "999"
"""How far windows may be apart: rounds and medians take care of that here."""
COMPILED = "llmbackend, compiled backend"
"""Has no model that streams."""
COMPILED_IDENTITY = ROOT / "tests" / "core" / "c_api" / "backends" / "identity.cpp"
FLAGS = ("--model-control-mode=explicit", "--load-model=*")

IDENTITY_CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
IDENTITY_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", data)]) for data in inputs]
"""
BURST_CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
BURST_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = np.array([b" token"], dtype=object)
            for _ in range(int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", text)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ECHO_BACKEND = """
import time
from llmbackend.core.backend_api import ResponseFlag, Tensor

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    start = time.monotonic_ns()
    for request in requests:
        if "COUNT" in request.inputs:
            count, text = int(request.inputs["COUNT"].data[0]), Tensor.text("TEXT", b" token")
            for _ in range(count):
                response = request.new_response()
                response.add_output(text)
                response.send()
            request.response_factory().send_flags(ResponseFlag.FINAL)
        else:
            x = request.inputs["INPUT0"]
            response = request.new_response()
            response.add_output(Tensor("OUTPUT0", x.datatype, x.shape, x.data))
            response.send(ResponseFlag.FINAL)
        end = time.monotonic_ns()
        instance.report_statistics(request, True, start, start, end, end)
        request.release()
    instance.report_batch_statistics(len(requests), start, start, end, end)
"""
"""The same without the python backend: what the host costs by itself."""


@dataclass(frozen=True)
class Target:
    name: str
    http: str
    grpc: str
    process: psutil.Process

    def cpu_s(self) -> float:
        tree = [self.process, *self.process.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in tree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--triton", type=Path, default=ROOT / "build" / "real-triton")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    environments = Environments(arguments.scratch)
    environments.install("perf_analyzer")
    triton = RealTriton(arguments.triton)
    triton.install()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        scratch = Path(directory)
        targets = [stack.enter_context(open_()) for open_ in _servers(triton, scratch)]
        lines = list(_measure(targets, environments, scratch, arguments.rounds))
    if arguments.json:
        arguments.json.write_text(json.dumps(lines, indent=1))
    _print_table(lines)


def _servers(triton: RealTriton, scratch: Path) -> list[Callable[[], Any]]:
    python_models = scratch / "python"
    _write_models(python_models, "")
    own_models = scratch / "own"
    _write_models(own_models, "echo")
    backend = scratch / "backends" / "echo" / "backend.py"
    backend.parent.mkdir(parents=True)
    backend.write_text(ECHO_BACKEND)
    compiled_models = scratch / "compiled"
    _write_model(compiled_models, "identity", IDENTITY_CONFIG.replace('"python"', '"identity"'))
    compiled = backend.parent.parent / "identity" / "libtriton_identity.so"
    compiled.parent.mkdir()
    command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"]
    subprocess.run([*command, str(COMPILED_IDENTITY), "-o", str(compiled)], check=True)
    backends = f"--backend-directory={backend.parent.parent}"
    return [
        lambda: _real(triton, python_models, scratch / "triton.log"),
        lambda: _ours("llmbackend, python backend", python_models),
        lambda: _ours("llmbackend, host alone", own_models, backends),
        lambda: _ours(COMPILED, compiled_models, backends),
    ]


def _write_models(repository: Path, backend: str) -> None:
    for name, config, code in (("identity", IDENTITY_CONFIG, IDENTITY_MODEL), ("burst", BURST_CONFIG, BURST_MODEL)):
        _write_model(repository, name, config.replace('"python"', f'"{backend}"') if backend else config)
        if not backend:
            (repository / name / "1" / "model.py").write_text(code)


def _write_model(repository: Path, name: str, config: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)


@contextmanager
def _real(triton: RealTriton, repository: Path, log: Path) -> Iterator[Target]:
    with triton.running(repository, *FLAGS, log=log) as running:
        yield Target("Triton, python backend", running.http, running.grpc, psutil.Process(running.process.pid))


@contextmanager
def _ours(name: str, repository: Path, *flags: str) -> Iterator[Target]:
    with open(os.devnull, "w") as log:
        server = start_server("--model-repository", str(repository), *FLAGS, *flags, log=log)
    try:
        yield Target(name, server.http, server.grpc, psutil.Process(server.process.pid))
    finally:
        stop_server(server)


def _measure(targets: list[Target], environments: Environments, scratch: Path, rounds: int) -> Iterator[dict[str, Any]]:
    for round_number in range(rounds):
        for protocol in ("http", "grpc"):
            for concurrency in CONCURRENCIES:
                for target in targets:
                    if protocol == "http":
                        measured = _http_requests(target, concurrency)
                    else:
                        measured = _grpc_requests(target, environments, concurrency, scratch / "report.csv")
                    what = f"{protocol} {concurrency}"
                    yield {"server": target.name, "what": what, "round": round_number, **measured}
        for what, stream in (("gRPC stream", _grpc_stream), ("generate_stream", _event_stream)):
            for target in targets:
                if target.name != COMPILED:
                    yield {"server": target.name, "what": what, "round": round_number, **_streamed(target, stream)}


def _http_requests(target: Target, connections: int) -> dict[str, float]:
    duration_s = WINDOW_MS / 1000
    asyncio.run(http_latencies_s(target.http, "identity", connections, WARMUP_S))
    cpu_s = target.cpu_s()
    latencies_s = asyncio.run(http_latencies_s(target.http, "identity", connections, duration_s))
    count = len(latencies_s)
    return {
        "per_s": count / duration_s,
        "p50_us": 1e6 * latencies_s[count // 2],
        "p99_us": 1e6 * latencies_s[count * 99 // 100],
        "server_cpu_us": 1e6 * (target.cpu_s() - cpu_s) / count,
    }


def _grpc_requests(target: Target, environments: Environments, concurrency: int, report: Path) -> dict[str, float]:
    program, libraries = environments.perf_analyzer()
    command = [program, "-m", "identity", "-u", target.grpc, "-i", "grpc", "--concurrency-range", str(concurrency)]
    command += ["--measurement-interval", str(WINDOW_MS), "--max-trials", "3", "-s", UNSTABLE_PERCENT, "-f", report]
    start_s, cpu_s = time.monotonic(), target.cpu_s()
    environ = os.environ | {"LD_LIBRARY_PATH": libraries}
    done = subprocess.run([str(word) for word in command], env=environ, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"perf_analyzer ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
    cores = (target.cpu_s() - cpu_s) / (time.monotonic() - start_s)
    with report.open() as file:
        row = next(csv.DictReader(file))
    return {
        "per_s": float(row["Inferences/Second"]),
        "p50_us": float(row["p50 latency"]),
        "p99_us": float(row["p99 latency"]),
        "server_cpu_us": 1e6 * cores / float(row["Inferences/Second"]),
    }


def _streamed(target: Target, stream: Callable[[Target], int]) -> dict[str, float]:
    stream(target)
    start_s, cpu_s = time.monotonic(), target.cpu_s()
    count = sum(stream(target) for _ in range(3))
    wall_s = time.monotonic() - start_s
    return {"per_s": count / wall_s, "server_cpu_us": 1e6 * (target.cpu_s() - cpu_s) / count}


def _grpc_stream(target: Target) -> int:
    request = service_pb2.ModelInferRequest(model_name="burst")
    request.inputs.add(name="COUNT", datatype="INT32", shape=[1]).contents.int_contents.append(STREAMED_RESPONSES)
    with grpc.insecure_channel(target.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        count = sum(1 for _ in stub.ModelStreamInfer(iter([request]), timeout=120))
    assert count == STREAMED_RESPONSES, f"{count} responses"
    return count


def _event_stream(target: Target) -> int:
    url = f"http://{target.http}/v2/models/burst/generate_stream"
    with httpx.stream("POST", url, json={"COUNT": STREAMED_RESPONSES}, timeout=120, trust_env=False) as answer:
        count = b"".join(answer.iter_raw()).count(b"data: ")
    assert count == STREAMED_RESPONSES, f"{count} events"
    return count


def _print_table(lines: list[dict[str, Any]]) -> None:
    """Medians over the rounds, Markdown."""
    print("| what | server | per s | p50 µs | p99 µs | server CPU µs each |\n|---|---|--:|--:|--:|--:|")
    keys = dict.fromkeys((line["what"], line["server"]) for line in lines)
    for what, server in keys:
        of = [line for line in lines if (line["what"], line["server"]) == (what, server)]
        cells = [
            f"{statistics.median(line[name] for line in of):,.0f}" if name in of[0] else ""
            for name in ("per_s", "p50_us", "p99_us", "server_cpu_us")
        ]
        print(f"| {what} | {server} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
