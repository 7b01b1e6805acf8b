"""Cases with concurrent requests: batches, queues, cancellation; and finally, the statistics over all cases.

Used by the command. Independent of which answer is right. Invariant: what is compared does not depend on which of
several equal requests came first.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from tritonclient.grpc import service_pb2 as pb

from .case import TIMEOUT_S, Case, Server, shown_http, shown_message
from .cases import MODELS, request, tensor, text_request

TIMES = re.compile(r'"(ns|last_inference)": \d+')
DURATIONS = ("_duration", "_utilization", "_memory_", "_pinned_", "energy", "power", "load_duration")


def cases_together() -> Iterator[Case]:
    yield Case("four requests make one batch", lambda server: _at_once(server, "batches", [_row(1)] * 4))
    yield Case("two of two rows make one batch", lambda server: _at_once(server, "batches", [_row(2)] * 2))
    yield Case("rows of other widths do not mix", lambda server: _at_once(server, "batches", [_row(1, 1), _row(1, 2)]))
    yield Case("a full queue refuses", _full_queue)
    yield Case("a request that waits too long is refused", _late_in_queue)
    yield Case("the better priority is served first", _priorities)
    yield Case("a stream that its client cancels", _cancelled_stream)
    yield Case("an event stream that its client leaves", _left_events)


def cases_at_the_end() -> Iterator[Case]:
    for model in MODELS:
        yield Case(f"statistics of {model}", _statistics(model))
    yield Case("statistics over gRPC", _grpc_statistics)
    yield Case("metrics", _metrics)
    for model in ("cached", "text", "matrix"):
        yield Case(f"unload {model}", _unloaded(model))
        yield Case(f"infer {model} afterwards", _after_unload(model))
    yield Case("the index afterwards", _index_afterwards)


def _index_afterwards(server: Server) -> str:
    """When nothing is unloading any more."""
    deadline_s = time.monotonic() + 20
    while "UNLOADING" in (answer := server.http.post("/v2/repository/index", content=b"")).text:
        assert time.monotonic() < deadline_s, answer.text
        time.sleep(0.1)
    return shown_http(answer)


def _row(rows: int, width: int = 1) -> dict[str, Any]:
    return {"inputs": [tensor("X", "FP32", (rows, width), [1.0] * rows * width)]}


def _infer(server: Server, model: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(
        f"http://{server.http_address}/v2/models/{model}/infer", json=body, timeout=TIMEOUT_S, trust_env=False
    )


def _at_once(server: Server, model: str, bodies: list[dict[str, Any]]) -> str:
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: _infer(server, model, body), bodies))
    return "\n---\n".join(shown_http(answer) for answer in answers)


def _wait(wait_ms: int, **parameters: Any) -> dict[str, Any]:
    return {"inputs": [tensor("WAIT_MS", "INT32", (1, 1), [wait_ms])], "parameters": parameters}


def _behind_a_long_one(server: Server, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    """The bodies, sent while an instance is busy with a request of a second, a little apart."""
    with ThreadPoolExecutor(len(bodies) + 1) as pool:
        long = pool.submit(_infer, server, "queued", _wait(1000))
        time.sleep(0.3)
        answers = []
        for body in bodies:
            answers.append(pool.submit(_infer, server, "queued", body))
            time.sleep(0.05)
        return [long.result(), *(answer.result() for answer in answers)]


def _full_queue(server: Server) -> str:
    answers = _behind_a_long_one(server, [_wait(0)] * 4)
    return "\n".join(sorted(f"{answer.status_code} {answer.json().get('error', '')}" for answer in answers))


def _late_in_queue(server: Server) -> str:
    answers = _behind_a_long_one(server, [_wait(0, timeout=100000)])
    return "\n".join(f"{answer.status_code} {answer.json().get('error', '')}" for answer in answers)


def _priorities(server: Server) -> str:
    answers = _behind_a_long_one(server, [_wait(0, priority=2), _wait(0, priority=1)])
    first, low, high = (answer.json()["outputs"][0]["data"][0] for answer in answers)
    return f"low {low - first}, high {high - first}"


def _cancelled_stream(server: Server) -> str:
    before = _cancelled(server)
    message = text_request("repeat", "until", 1, id="c")
    call = server.grpc.ModelStreamInfer(iter([message]), timeout=TIMEOUT_S)
    for _, _ in zip(range(3), call, strict=False):
        pass
    call.cancel()
    return f"{_cancelled_later(server) - before} cancelled"


def _left_events(server: Server) -> str:
    before = _cancelled(server)
    url = f"http://{server.http_address}/v2/models/repeat/generate_stream"
    with httpx.stream("POST", url, json={"text_input": "until"}, timeout=TIMEOUT_S, trust_env=False) as answer:
        next(answer.iter_lines())
    return f"{_cancelled_later(server) - before} cancelled"


def _cancelled(server: Server) -> int:
    answer = server.http.post("/v2/models/repeat/generate", json={"text_input": "cancelled?"})
    return int(answer.json()["text_output"])


def _cancelled_later(server: Server) -> int:
    """Asked once, so that both servers count as many requests."""
    time.sleep(1)
    return _cancelled(server)


# --- what was counted ---------------------------------------------------------------------------------------------


def _statistics(model: str) -> Callable[[Server], str]:
    def send(server: Server) -> str:
        answer = server.http.get(f"/v2/models/{model}/stats")
        return TIMES.sub(r'"\1": 0', f"{answer.status_code}\n{_by_key(answer.text)}")

    return send


def _by_key(text: str) -> str:
    return json.dumps(json.loads(text), sort_keys=True)


def _grpc_statistics(server: Server) -> str:
    answer = server.grpc.ModelStatistics(pb.ModelStatisticsRequest(name="identity"), timeout=TIMEOUT_S)
    return re.sub(r"\b(ns|last_inference): \d+ ?", "", shown_message(answer))


def _metrics(server: Server) -> str:
    """Names, types, labels, and the values of what is counted."""
    lines = []
    for line in server.metrics.get("/metrics").text.splitlines():
        name = line.split("{")[0].split(" ")[-1 if line.startswith("#") else 0]
        if line.startswith("# TYPE nv_"):
            lines.append(line)
        elif line.startswith("nv_"):
            key, _, value = line.rpartition(" ")
            is_measured = any(part in name for part in DURATIONS) or "gpu" in name
            lines.append(key if is_measured else f"{key} {float(value):g}")
    return "\n".join(sorted(lines))


def _unloaded(model: str) -> Callable[[Server], str]:
    def send(server: Server) -> str:
        answer = server.http.post(f"/v2/repository/models/{model}/unload", json={})
        gone = threading.Event()
        deadline_s = time.monotonic() + 10
        while server.http.get(f"/v2/models/{model}/ready").status_code == 200 and time.monotonic() < deadline_s:
            gone.wait(0.05)
        return shown_http(answer)

    return send


def _after_unload(model: str) -> Callable[[Server], str]:
    def send(server: Server) -> str:
        lines = [shown_http(server.http.post(f"/v2/models/{model}/infer", json={"inputs": []}))]
        lines.append(shown_http(server.http.get(f"/v2/models/{model}/stats")))
        message = request(model, [])
        lines.append("\n".join(shown_message(part) for part in server.grpc.ModelStreamInfer(iter([message]))))
        return "\n".join(lines)

    return send
