"""Outputs as plain values: the same tensors as a backend would have made, for every reader of a response."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest

from llmbackend.core.backend_api import JSON, JsonTensor, Outputs, layout_of, responses_together
from llmbackend.core.caching import pack, unpack
from llmbackend.core.messages import InferenceResponse, held_bytes, wake_receiver
from llmbackend.core.tensors import to_wire

VALUES: dict[str, tuple[str, Any]] = {
    "text": ("BYTES", "grüße"),
    "raw": ("BYTES", b"\xff"),
    "ids": ("INT32", [1, 2, 3]),
    "none": ("INT32", [[]]),
    "nested": ("FP32", [[[0.5, -1.0]]]),
    "json": (JSON, [{"7": {"logprob": None, "rank": 1}}]),
}


def outputs(*names: str) -> Outputs:
    chosen = names or tuple(VALUES)
    datatypes = tuple(VALUES[name][0] for name in chosen)
    return Outputs(layout_of(chosen, datatypes), tuple(VALUES[name][1] for name in chosen))


def test_values_become_the_tensors_that_they_stand_for() -> None:
    text, raw, ids, none, nested, json = found = outputs()
    assert [tensor.name for tensor in found] == list(VALUES) and len(found) == len(VALUES)
    assert (text.datatype, text.shape, text.data.tolist()) == ("BYTES", (1,), ["grüße".encode()])
    assert raw.data.tolist() == [b"\xff"]
    assert (ids.datatype, ids.shape, ids.data.dtype, ids.data.tolist()) == (
        "INT32",
        (3,),
        np.dtype(np.int32),
        [1, 2, 3],
    )
    assert (none.shape, none.data.dtype) == ((1, 0), np.dtype(np.int32))
    assert (nested.shape, nested.data.dtype) == ((1, 1, 2), np.dtype(np.float32))
    assert isinstance(json, JsonTensor) and json.value == VALUES["json"][1]
    assert json.datatype == "BYTES" and json.data.tolist() == [b'[{"7":{"logprob":null,"rank":1}}]']
    assert found[0] is text and list(found[1:3]) == [raw, ids]


def test_responses_of_a_stream_share_their_layout() -> None:
    assert outputs("text", "ids").layout is outputs("text", "ids").layout
    assert outputs("text").layout.is_text and not outputs("text", "ids").layout.is_text
    assert not outputs("json").layout.is_text
    left = outputs().without(frozenset({"raw", "json"}))
    assert left.named() == {name: value for name, (_, value) in VALUES.items() if name not in ("raw", "json")}
    assert [tensor.name for tensor in left] == list(left.layout.names)


def test_they_cross_processes_and_the_response_cache() -> None:
    response = InferenceResponse("model", 1, "id", outputs())
    crossed = pickle.loads(pickle.dumps(response))
    assert isinstance(crossed.outputs, Outputs) and crossed.outputs.layout is outputs().layout
    assert crossed.outputs.values == outputs().values
    cached, _ = unpack(pack(response))
    assert [(one.name, one.shape, to_wire(one)) for one in cached] == [
        (one.name, one.shape, to_wire(one)) for one in outputs()
    ]


def test_what_they_hold_is_counted_about_as_of_tensors() -> None:
    text = Outputs(layout_of(("text",), ("BYTES",)), ("x" * 5000,))
    assert held_bytes(text) == held_bytes(text.tensors)
    ids = Outputs(layout_of(("ids",), ("INT32",)), ([7] * 1000,))
    assert held_bytes(ids.tensors) <= held_bytes(ids) <= 2 * held_bytes(ids.tensors)
    logprobs = [{str(index): {"logprob": -1.5, "rank": index, "decoded_token": "x"} for index in range(20)}] * 50
    json = Outputs(layout_of(("logprobs",), (JSON,)), (logprobs,))
    assert held_bytes(json.tensors) <= held_bytes(json)


def test_receivers_are_woken_once_and_at_the_end() -> None:
    calls: list[str] = []

    def wake() -> None:
        calls.append("woken")

    wake_receiver(wake)
    assert calls == ["woken"]
    with responses_together():
        with responses_together():
            wake_receiver(wake)
        wake_receiver(wake)
        assert calls == ["woken"]
        other = threading.Thread(target=wake_receiver, args=(wake,))  # not its responses
        other.start()
        other.join()
        assert calls == ["woken"] * 2
    assert calls == ["woken"] * 3
    with pytest.raises(ZeroDivisionError), responses_together():
        wake_receiver(wake)
        raise ZeroDivisionError
    assert calls == ["woken"] * 4


def test_a_tensor_is_never_made_twice() -> None:
    found = outputs()
    assert all(first is second for first, second in zip(found, found, strict=True))
