"""Starts a real server on free ports with the bundled demo model and uses every protocol with real clients.

Part of `make smoke`, CI, and `make wheel-check`, which starts an installed server. The server can import only the
packages that `make serve` installs; with `--fresh` it runs in a copy of the checkout in which nothing has been
installed (`make smoke-fresh`). Prints one line per check and `smoke: N passed, M failed`; exits with 1 if anything
failed, or if the log contains a warning, an error or a traceback. The server is a child process and is ended with
SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as aio_client
import tritonclient.http as http_client

if __name__ == "__main__":  # run as a file: the other tools are found, too
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.serving_packages import only_serving

ROOT = Path(__file__).resolve().parent.parent
COMPLAINT = re.compile(r"[WE]\d{4} |Warning: |Traceback |\w*(Warning|Error): ")
"""A line of the log that a healthy server does not write."""
MODEL = "demo"
QUESTION = "Who are you?"


@dataclass(frozen=True)
class Server:
    http: str
    grpc: str
    metrics: str
    log: list[str]
    """Lines of its standard error, so far."""


Check = Callable[[Server], None]


def text_tensor(module: Any, name: str, text: str) -> Any:
    tensor = module.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=object))
    return tensor


def bool_tensor(module: Any, name: str, value: bool) -> Any:
    tensor = module.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value]))
    return tensor


def chat_inputs(module: Any) -> list[Any]:
    return [
        text_tensor(module, "messages", json.dumps([{"role": "user", "content": QUESTION}])),
        text_tensor(module, "sampling_parameters", json.dumps({"temperature": 0, "max_tokens": 48})),
        bool_tensor(module, "stream", True),
    ]


def curl(*arguments: str) -> str:
    run = subprocess.run(["curl", "-sS", "-m", "60", *arguments], capture_output=True, text=True, check=True)
    return run.stdout


def http_health(server: Server) -> None:
    client = http_client.InferenceServerClient(server.http)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)


def http_metadata(server: Server) -> None:
    client = http_client.InferenceServerClient(server.http)
    assert client.get_server_metadata()["name"] == "triton"
    names = {tensor["name"] for tensor in client.get_model_metadata(MODEL)["inputs"]}
    assert {"text_input", "messages", "stream", "sampling_parameters"} <= names
    assert client.get_model_config(MODEL)["model_transaction_policy"]["decoupled"] is True
    assert {row["name"]: row["state"] for row in client.get_model_repository_index()}[MODEL] == "READY"


def curl_generate(server: Server) -> None:
    body = {"text_input": "Hello", "parameters": {"max_tokens": 8, "temperature": 0}}
    answer = json.loads(curl(f"http://{server.http}/v2/models/{MODEL}/generate", "-d", json.dumps(body)))
    assert answer["model_name"] == MODEL and answer["text_output"]


def curl_generate_stream(server: Server) -> None:
    body = {
        "messages": json.dumps([{"role": "user", "content": QUESTION}]),
        "stream": True,
        "max_tokens": 48,
        "temperature": 0,
    }
    lines = curl("-N", f"http://{server.http}/v2/models/{MODEL}/generate_stream", "-d", json.dumps(body)).splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert len(events) > 1 and "".join(event["text_output"] for event in events).strip()


def http_refuses_decoupled_infer(server: Server) -> None:
    client = http_client.InferenceServerClient(server.http)
    try:
        client.infer(MODEL, [text_tensor(http_client, "text_input", "x")])
    except http_client.InferenceServerException as error:
        assert "decoupled" in str(error)
    else:
        raise AssertionError("infer on a decoupled model must be refused")


def http_bad_sampling(server: Server) -> None:
    body = json.dumps({"text_input": "x", "temperature": -1})
    answer = curl("-w", "%{http_code}", f"http://{server.http}/v2/models/{MODEL}/generate", "-d", body)
    assert answer.endswith("400") and "temperature" in answer, answer


def grpc_health(server: Server) -> None:
    client = grpc_client.InferenceServerClient(server.grpc)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)
    assert client.get_model_metadata(MODEL).name == MODEL


def grpc_stream(server: Server) -> None:
    client, results = grpc_client.InferenceServerClient(server.grpc), queue.Queue[Any]()
    client.start_stream(callback=lambda result, error: results.put((result, error)))
    client.async_stream_infer(MODEL, chat_inputs(grpc_client), request_id="1", enable_empty_final_response=True)
    text, final = "", False
    while not final:
        result, error = results.get(timeout=60)
        assert error is None, error
        final = result.get_response().parameters["triton_final_response"].bool_param
        output = result.as_numpy("text_output")
        text += output[0].decode() if output is not None else ""
    client.stop_stream()
    assert text.strip()


def grpc_aio_stream(server: Server) -> None:
    asyncio.run(_grpc_aio_stream(server))


async def _grpc_aio_stream(server: Server) -> None:
    async with aio_client.InferenceServerClient(server.grpc) as client:

        async def requests() -> Any:
            yield {"model_name": MODEL, "inputs": chat_inputs(grpc_client), "request_id": "aio"}

        pieces = []
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            pieces.append(result.as_numpy("text_output")[0].decode())
    assert "".join(pieces).strip()


def openai_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0)


def openai_models(server: Server) -> None:
    assert MODEL in [model.id for model in openai_client(server).models.list()]


def openai_chat(server: Server) -> None:
    answer = openai_client(server).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=48
    )
    assert answer.choices[0].message.content and answer.usage is not None and answer.usage.completion_tokens > 0


def openai_chat_stream_equals_whole(server: Server) -> None:
    arguments: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 48,
    }
    whole = openai_client(server).chat.completions.create(**arguments).choices[0].message.content
    stream = openai_client(server).chat.completions.create(**arguments, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole


def openai_completion(server: Server) -> None:
    answer = openai_client(server).completions.create(model=MODEL, prompt="Triton is", max_tokens=8, temperature=0)
    assert answer.choices[0].finish_reason in ("stop", "length")


def openai_error(server: Server) -> None:
    try:
        openai_client(server).chat.completions.create(model="nosuch", messages=[{"role": "user", "content": "x"}])
    except openai.NotFoundError as error:
        assert "nosuch" in str(error)
    else:
        raise AssertionError("an unknown model must be refused")


def metrics(server: Server) -> None:
    text = curl(f"http://{server.metrics}/metrics")
    for name in ("nv_inference_request_success", "vllm:generation_tokens_total"):
        match = re.search(rf'^{name}\{{[^}}]*model="{MODEL}"[^}}]*\}} ([0-9.e+]+)', text, re.MULTILINE)
        assert match and float(match[1]) > 0, f"{name} missing or zero"


def root(server: Server) -> None:
    assert "/v2/models/{model}/generate" in curl(f"http://{server.http}/")


def log_has_no_complaints(server: Server) -> None:
    complaints = [line for line in server.log if COMPLAINT.match(line)]
    assert not complaints, complaints


CHECKS: list[Check] = [
    root,
    http_health,
    http_metadata,
    curl_generate,
    curl_generate_stream,
    http_refuses_decoupled_infer,
    http_bad_sampling,
    grpc_health,
    grpc_stream,
    grpc_aio_stream,
    openai_models,
    openai_chat,
    openai_chat_stream_equals_whole,
    openai_completion,
    openai_error,
    metrics,
    log_has_no_complaints,
]


def start_server(
    llmbackend: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[subprocess.Popen[str], Server]:
    """Starts `llmbackend serve` with the arguments; reads the addresses from what it prints.

    llmbackend: the command
    """
    command = [*llmbackend, "serve", *arguments]
    for protocol in ("http", "grpc", "metrics"):
        command += [f"--{protocol}-address", "127.0.0.1", f"--{protocol}-port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**environment, "NO_COLOR": "1"}
    )
    assert process.stdout is not None
    log: list[str] = []
    threading.Thread(target=_pass_on, args=(process.stderr, log), daemon=True).start()
    found: dict[str, str] = {}
    for line in process.stdout:
        print(f"  {line}", end="")
        if match := re.match(r"(http|grpc|metrics)\s+\S*?([0-9.]+:\d+)", line):
            found[match[1]] = match[2]
        if len(found) == 3:
            return process, Server(**found, log=log)
    raise SystemExit(f"the server ended with exit code {process.wait()} before it was ready")


def _pass_on(lines: Iterable[str], log: list[str]) -> None:
    """Shows the lines as they come, and keeps them in `log`."""
    for line in lines:
        log.append(line)
        print(line, end="", file=sys.stderr, flush=True)


def run_check(check: Check, server: Server) -> bool:
    began_s = time.monotonic()
    try:
        check(server)
    except Exception:
        print(f"FAIL {check.__name__}")
        traceback.print_exc()
        return False
    print(f"ok   {check.__name__} ({time.monotonic() - began_s:.2f} s)")
    return True


def stops_cleanly(process: subprocess.Popen[str]) -> bool:
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    print(f"{'ok  ' if code == 0 else 'FAIL'} SIGTERM drains, exit code {code}")
    return code == 0


def serves(process: subprocess.Popen[str], server: Server) -> bool:
    """Runs all checks, ends the server, and prints how many passed. True: all."""
    try:
        results = [run_check(check, server) for check in CHECKS]
    finally:
        results_stop = stops_cleanly(process)
    results.append(results_stop)
    print(f"smoke: {sum(results)} passed, {len(results) - sum(results)} failed")
    return all(results)


def fresh_copy(folder: Path) -> list[str]:
    """Installs a copy of this checkout in `folder` as `make serve` does; returns the command there."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.rstrip("\0").split("\0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "VENV")}
    subprocess.run(["make", "-C", str(folder), ".venv/.serve"], env=variables, check=True)
    return [str(folder / ".venv" / "bin" / "llmbackend")]


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="llmbackend-smoke-") as home:  # without packed weights of an earlier start
        if "--fresh" in sys.argv[1:]:
            checkout = Path(home) / "copy"
            command = fresh_copy(checkout)
            variables = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        else:
            command, checkout, variables = [sys.executable, "-m", "llmbackend.cli"], ROOT, only_serving()
        arguments = ["--model-repository", str(checkout / "model_repository")]
        return 0 if serves(*start_server(command, arguments, {**variables, "HOME": home})) else 1


if __name__ == "__main__":
    sys.exit(main())
