"""A backend whose models act as requests tell them, modelled on those in the recorded transcripts; and the real host
with it.

`identity` (FP32 [-1,4]), `multi` (BYTES, INT32, optional BOOL; echoes what it was sent), `llm` (decoupled; the words of
text_input are commands: n=, sleep= in ms, kib= per token, err=, cont, code=, lastfinal, preerr, params) and `textid`
(BYTES and its length; the words fail, slow, halves and huge). `spare` is like identity and not loaded at the start;
`bad` can not be loaded.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmbackend.core.backend_api import (
    ErrorCode,
    ParameterValue,
    Request,
    ResponseFactory,
    ResponseFlag,
    Tensor,
    TritonError,
    cancelled,
    internal,
    invalid_argument,
)
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions

_FP32 = """max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: 4 } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 4 }"""
CONFIGS = {
    "bad": _FP32,
    "identity": _FP32,
    "spare": _FP32,
    "multi": """input { name: "S" data_type: TYPE_STRING dims: -1 }
        input { name: "I" data_type: TYPE_INT32 dims: [2, -1] }
        input { name: "B" data_type: TYPE_BOOL dims: 1 optional: true }
        output { name: "S" data_type: TYPE_STRING dims: -1 } output { name: "I" data_type: TYPE_INT32 dims: [2, -1] }
        output { name: "PARAMS" data_type: TYPE_STRING dims: 1 }""",
    "llm": """input { name: "text_input" data_type: TYPE_STRING dims: 1 }
        input { name: "stream" data_type: TYPE_BOOL dims: 1 optional: true }
        input { name: "max_tokens" data_type: TYPE_INT32 dims: 1 optional: true }
        output { name: "text_output" data_type: TYPE_STRING dims: -1 } model_transaction_policy { decoupled: true }""",
    "textid": """max_batch_size: 4 input { name: "text_input" data_type: TYPE_STRING dims: 1 }
        output { name: "text_output" data_type: TYPE_STRING dims: 1 }
        output { name: "n" data_type: TYPE_INT32 dims: 1 }""",
}
LOADED = ("identity", "multi", "llm", "textid")
BACKEND_FILE = """
from tests.helpers.kserve_scripted import model_initialize as TRITONBACKEND_ModelInitialize
from tests.helpers.kserve_scripted import model_instance_execute as TRITONBACKEND_ModelInstanceExecute
"""


class Record:
    """What the backend saw: requests that began and requests that were cancelled, by the client's id."""

    def __init__(self) -> None:
        self.began: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self.cancelled: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self.cancels: Counter[str] = Counter()


RECORD = Record()


def start_host(root: Path, **options: Any) -> InferenceServer:
    """A started host with these models, files under `root`; `options` are more of ServerOptions."""
    backend = root / "backends" / "scripted" / "backend.py"
    backend.parent.mkdir(parents=True)
    backend.write_text(BACKEND_FILE)
    for name, config in CONFIGS.items():
        (root / "models" / name / "1").mkdir(parents=True)
        (root / "models" / name / "config.pbtxt").write_text(f'backend: "scripted"\n{config}\n')
    server = InferenceServer(
        ServerOptions(
            model_repositories=[root / "models"],
            model_control_mode="explicit",
            startup_models=LOADED,
            backend_directory=root / "backends",
            **options,
        )
    )
    server.start()
    return server


def model_initialize(model: Any) -> None:
    if model.name == "bad":
        raise internal("weights missing")


def model_instance_execute(instance: Any, requests: Sequence[Request]) -> None:
    run = {"llm": _llm, "multi": _multi, "textid": _textid}.get(instance.model.name, _identity)
    for request in requests:
        factory = request.response_factory()
        stop = RECORD.cancelled[request.id] if request.id else threading.Event()
        request.on_cancel(partial(_on_cancel, request.id, stop))
        RECORD.began[request.id].set()
        call = _Call(request, factory, stop)
        now_ns = time.monotonic_ns()
        instance.report_statistics(request, True, now_ns, now_ns, now_ns, now_ns)
        request.release()
        threading.Thread(target=run, args=(call,), daemon=True).start()


def _on_cancel(request_id: str, stop: threading.Event) -> None:
    RECORD.cancels[request_id] += 1
    stop.set()


class _Call:
    """One request, copied out before its release, and the sending of its responses."""

    def __init__(self, request: Request, factory: ResponseFactory, stop: threading.Event) -> None:
        self.id = request.id
        self.inputs: Mapping[str, Tensor] = dict(request.inputs)
        self.wanted = list(request.requested_outputs)
        self.parameters = dict(request.parameters)
        self.about = {
            "corr": str(request.correlation_id),
            "priority": request.priority,
            "timeout": request.timeout_us,
            "flags": int(request.flags),
        }
        self.stop = stop
        self._factory = factory

    def values(self, name: str) -> Any:
        return self.inputs[name].data.tolist() if name in self.inputs else None

    def send(
        self, *outputs: Tensor, error: TritonError | None = None, final: bool = False, **parameters: ParameterValue
    ) -> None:
        response = self._factory.new_response()
        for name, value in parameters.items():
            response.set_parameter(name, value)
        for tensor in outputs:
            if tensor.name in self.wanted:
                response.add_output(tensor)
        response.send(ResponseFlag.FINAL if final else ResponseFlag.NONE, error)
        if final:
            self._factory.close()

    def finish(self) -> None:
        self._factory.send_flags(ResponseFlag.FINAL)
        self._factory.close()


def _identity(call: _Call) -> None:
    call.send(Tensor.of("OUTPUT0", call.inputs["INPUT0"].data), final=True)


def _textid(call: _Call) -> None:
    text = call.inputs["text_input"].data
    word = text.ravel()[0]
    if b"slow" in word:
        call.stop.wait(20)
        call.send(error=cancelled("slow request ended"), final=True)
    elif b"fail" in word:
        call.send(error=internal("model says no"), final=True)
    elif b"halves" in word:
        call.send(error=internal("half of a surrogate pair: \ud800"), final=True)
    elif b"huge" in word:
        call.send(Tensor.of("text_output", text), final=True, huge=1 << 70)
    else:
        length = np.array([[len(word)]], dtype=np.int32).repeat(text.shape[0], 0)
        call.send(Tensor.of("text_output", text), Tensor.of("n", length), final=True)


def _multi(call: _Call) -> None:
    info = {"params": call.parameters, "id": call.id, "B": call.values("B")} | call.about
    call.send(call.inputs["S"], call.inputs["I"], Tensor.text("PARAMS", json.dumps(info)), final=True)


def _llm(call: _Call) -> None:
    words = call.inputs["text_input"].data.ravel()[0].decode().split()
    option = dict([*word.split("="), "1"][:2] for word in words)
    if "preerr" in option:
        call.send(error=invalid_argument("early failure"), final=True)
    elif "params" in option:
        values = {name: call.values(name) for name in ("stream", "max_tokens")}
        info = {"params": call.parameters, "id": call.id} | values
        call.send(Tensor.text("text_output", json.dumps(info)), final=True)
    else:
        _tokens(call, option)


def _tokens(call: _Call, option: Mapping[str, str]) -> None:
    count, pause_s = int(option.get("n", 3)), float(option.get("sleep", 0)) / 1000
    padding = "." * 1024 * int(option.get("kib", 0))
    for index in range(count):
        if call.stop.wait(pause_s):
            call.send(error=cancelled("Client requested to stop"), final=True)
            return
        last = "lastfinal" in option and index == count - 1
        if index == int(option.get("err", -1)):
            last = "cont" not in option
            call.send(error=TritonError(f"boom at {index}", ErrorCode[option.get("code", "INTERNAL")]), final=last)
        else:
            call.send(Tensor.text("text_output", f" tok{index}{padding}"), final=last)
        if last:
            return
    call.finish()
