"""A model of a real server that repeats, piece by piece, the user's last message; it continues an answer with which the
chat ends.

Used by tests of the web pages, which need texts that no model writes. The piece `§` stands for a pause of a quarter of
a second.
"""

from __future__ import annotations

from pathlib import Path

NAME = "echo"
_CONFIG = """
backend: "python"
input [
  { name: "messages" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true },
  { name: "return_num_output_tokens" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "return_num_input_tokens" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ 1 ] },
  { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ 1 ] }
]
model_transaction_policy { decoupled: true }
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
_CODE = """
import json, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

PIECE_CHARACTERS = 40


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            messages = json.loads(pb_utils.get_input_tensor_by_name(request, "messages").as_numpy().ravel()[0])
            messages = messages["messages"] if isinstance(messages, dict) else messages
            begun = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
            said = str(messages[-1]["content"])[len(begun) :]
            threading.Thread(target=answer, args=(request.get_response_sender(), said), daemon=True).start()


def answer(sender, said):
    pieces = [said[i : i + PIECE_CHARACTERS] for i in range(0, len(said), PIECE_CHARACTERS)]
    for piece in pieces:
        if sender.is_cancelled():
            break
        time.sleep(0.25 * piece.count("\\u00a7"))
        sender.send(pb_utils.InferenceResponse([
            pb_utils.Tensor("text_output", np.array([piece.encode()], dtype=object)),
            pb_utils.Tensor("num_output_tokens", np.array([1], dtype=np.uint32)),
            pb_utils.Tensor("num_input_tokens", np.array([1], dtype=np.uint32)),
        ]))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def write_echo_model(repository: Path) -> None:
    version = repository / NAME / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(_CONFIG)
    (version / "model.py").write_text(_CODE)
