"""Models of the python backend that answer a text with a text, each instance in a process of its own."""

from __future__ import annotations

from llmbackend.core.messages import InferenceResponse
from llmbackend.core.tensors import Tensor

CONFIG = """
backend: "python"
input [ { name: "T" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "R" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU count: COUNT } ]
"""
HEAD = """
import ctypes, json, os, signal, subprocess, sys, threading, time, numpy as np
import triton_python_backend_utils as pb_utils

def text_of(request):
    return pb_utils.get_input_tensor_by_name(request, "T").as_numpy()[0].decode()

def response(text):
    return pb_utils.InferenceResponse([pb_utils.Tensor("R", np.array([str(text)], dtype=object))])
"""
DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }\n"


def body(execute: str, rest: str = "") -> str:
    lines = "".join(f"        {line}\n" for line in execute.strip("\n").splitlines())
    return f"{HEAD}\nclass TritonPythonModel:\n    def execute(self, requests):\n{lines}{rest}"


def answering(value: str, rest: str = "") -> str:
    return body(f"return [response({value}) for r in requests]", rest)


def config(template: str = CONFIG, count: int = 1) -> str:
    return template.replace("COUNT", str(count))


def text(value: str) -> list[Tensor]:
    return [Tensor.text("T", value)]


def said(response: InferenceResponse) -> str:
    assert response.error is None, response.error
    word: bytes = response.outputs[0].data.tolist()[0]
    return word.decode()
