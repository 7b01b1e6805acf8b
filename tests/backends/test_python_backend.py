"""The python backend in a real host: a model.py written for Triton runs unchanged, its failures have Triton's texts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from llmbackend.core.backend_api import ErrorCode, ParameterValue, RequestFlag, TritonError
from llmbackend.core.tensors import CONFIG_TYPE_OF_DATATYPE, NUMPY_DTYPE, Tensor
from tests.helpers.python_host import Host
from tests.helpers.python_models import (
    DECOUPLED_CONFIG,
    ECHO,
    ECHO_CONFIG,
    TEXT_CONFIG,
    answer_line,
    body,
    numbers,
    text,
    values,
)


def test_batching_model_answers_each_request_and_counts_its_batch_dimension(host: Host) -> None:
    host.load("echo", ECHO_CONFIG, ECHO)
    response = host.infer("echo", numbers((1, 2), (3, 4)), request_id="r").one()
    assert values(response) == {"Y": [[1, 2], [3, 4]]} and response.request_id == "r"
    assert host.counts("echo") == (2, 1, 1, 0)


def test_initialize_gets_tritons_arguments(host: Host) -> None:
    rest = "    def initialize(self, args):\n        self.args = args\n"
    host.load("m", TEXT_CONFIG, body(answer_line("json.dumps(self.args)"), rest=rest))
    arguments = json.loads(values(host.infer("m", text("x")).one())["R"][0])  # type: ignore[arg-type]
    config = json.loads(arguments.pop("model_config"))
    assert arguments == {
        "model_instance_kind": "CPU",
        "model_instance_name": "m_0_0",
        "model_instance_device_id": "0",
        "model_repository": str(host.repository / "m"),
        "model_version": "1",
        "model_name": "m",
    }
    assert config["input"][0]["dims"] == [1] and config["max_batch_size"] == 0
    assert config["version_policy"] == {"latest": {"num_versions": 1}}


def test_request_shows_what_the_client_sent(host: Host) -> None:
    execute = """
r = requests[0]
o = pb_utils.get_input_tensor_by_name(r, "O")
seen = {"id": r.request_id(), "corr": r.correlation_id(), "flags": r.flags(), "params": json.loads(r.parameters()),
        "wanted": sorted(r.requested_output_names()), "o": o is None, "model": [r.model_name(), r.model_version()],
        "inputs": [(t.name(), t.shape(), t.triton_dtype(), t.is_cpu()) for t in r.inputs()],
        "cancelled": r.is_cancelled()}
return [pb_utils.InferenceResponse([pb_utils.Tensor("R", np.array([json.dumps(seen)], dtype=object)),
                                    pb_utils.Tensor("S", np.array([b"not asked for"], dtype=object))])]
"""
    host.load("m", TEXT_CONFIG, body(execute))
    parameters: dict[str, ParameterValue] = {"b": True, "a": 1, "s": "x"}
    flags = RequestFlag.SEQUENCE_START
    answers = host.infer(
        "m", text("x"), outputs=["R"], parameters=parameters, request_id="i", correlation_id=7, flags=flags
    )
    answer = values(answers.one())
    assert list(answer) == ["R"]
    seen = json.loads(answer["R"][0])  # type: ignore[arg-type]
    assert list(seen.pop("params").items()) == list(parameters.items())
    assert seen == {
        "id": "i",
        "corr": 7,
        "flags": 1,
        "wanted": ["R"],
        "o": True,
        "model": ["m", 1],
        "inputs": [["T", [1], 13, True]],
        "cancelled": False,
    }


def test_inputs_may_be_changed_in_place(host: Host) -> None:
    execute = """
x = pb_utils.get_input_tensor_by_name(requests[0], "X").as_numpy()
x += 1
return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])]
"""
    host.load("m", ECHO_CONFIG, body(execute))
    given = np.ones((1, 2), dtype=np.float32)
    given.setflags(write=False)
    assert values(host.infer("m", [Tensor.of("X", given)]).one()) == {"Y": [[2, 2]]}
    assert given.tolist() == [[1, 1]]


def test_error_of_initialize_has_tritons_text(host: Host) -> None:
    code = 'class TritonPythonModel:\n    def initialize(self, args):\n        raise RuntimeError("weights missing")\n'
    with pytest.raises(TritonError) as caught:
        host.load("bad", ECHO_CONFIG, code)
    path = host.repository / "bad" / "1" / "model.py"
    assert f"Internal: RuntimeError: weights missing\n\nAt:\n  {path}(3): initialize\n" in str(caught.value)


def test_error_of_the_module_itself_and_a_missing_class_are_told(host: Host) -> None:
    with pytest.raises(TritonError, match="ModuleNotFoundError: No module named 'no_such_module_anywhere'"):
        host.load("bad", ECHO_CONFIG, "import no_such_module_anywhere\n")
    with pytest.raises(TritonError, match="has no attribute 'TritonPythonModel'"):
        host.load("empty", ECHO_CONFIG, "x = 1\n")


def test_error_of_execute_has_tritons_text_and_the_model_goes_on(host: Host) -> None:
    code = body('if b"raise" in requests[0].inputs()[0].as_numpy()[0]:\n    raise ValueError("no")\n' + answer_line())
    path = host.load("m", TEXT_CONFIG, code) / "model.py"
    error = host.infer("m", text("raise")).one().error
    assert error is not None and error.code is ErrorCode.INTERNAL
    message = (
        f"Failed to process the request(s) for model 'm_0_0', message: ValueError: no\n\nAt:\n  {path}(6): execute\n"
    )
    assert str(error) == message
    assert host.infer("m", text("x")).one().error is None
    assert host.counts("m") == (1, 2, 1, 1)


def test_error_response_carries_the_models_code(host: Host) -> None:
    code = body(
        'return [pb_utils.InferenceResponse(error=pb_utils.TritonError("later", pb_utils.TritonError.UNAVAILABLE))]'
    )
    host.load("m", TEXT_CONFIG, code)
    error = host.infer("m", text("x")).one().error
    assert error is not None and (error.code, str(error)) == (ErrorCode.UNAVAILABLE, "later")
    assert host.counts("m") == (1, 1, 1, 0)


WRONG_USES = [
    ("return 5", "Expected a list in the execute return, found type '<class 'int'>'."),
    ("return None", "the backend of model 'm' ended the request without a response"),
    ("return [None]", "the backend of model 'm' ended the request without a response"),
    ("return []", "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0"),
    ("return ['x']", "Expected an 'InferenceResponse' object in the execute function return list, found type"),
    (
        'return [pb_utils.InferenceResponse(["x"])]',
        "output_tensors of an InferenceResponse must be Tensors, got str",
    ),
    ("pb_utils.load_model(model_name='x', files={'a': b''})", "files of load_model must be bytes under names"),
    ("requests[0].set_release_flags(3)", "Unable to set release flags. Unsupported flag provided: 3."),
    ("raise SystemExit(3)", "message: SystemExit: 3\n\nAt:\n"),
    ("pb_utils.nonsense", "AttributeError: pb_utils.nonsense is not supported"),
]


def test_a_model_without_execute_is_told_to_the_client(host: Host) -> None:
    path = host.load("m", TEXT_CONFIG, "class TritonPythonModel:\n    pass\n") / "model.py"
    error = host.infer("m", text("x")).one().error
    assert error is not None and f"Python model {path} does not implement `execute` method." in str(error)


def test_wrong_use_is_told_to_the_client(host: Host) -> None:
    lines = "".join(f"if text == {index}:\n    {execute}\n" for index, (execute, _) in enumerate(WRONG_USES))
    host.load("m", TEXT_CONFIG, body("text = int(requests[0].inputs()[0].as_numpy()[0])\n" + lines))
    for index, (_, told) in enumerate(WRONG_USES):
        error = host.infer("m", text(str(index))).one().error
        assert error is not None and told in str(error)


def test_decoupled_model_streams_after_execute_returned(host: Host) -> None:
    execute = """
def run(r):
    s = r.get_response_sender()
    for i in range(3):
        s.send(pb_utils.InferenceResponse([pb_utils.Tensor("R", np.array([b"%d" % i], dtype=object))]))
    s.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    try:
        s.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    except Exception as e:
        self.refused = str(e)
for r in requests:
    threading.Thread(target=run, args=(r,)).start()
"""
    host.load("m", DECOUPLED_CONFIG, body(execute))
    streams = [host.infer("m", text("x"), request_id=str(i)) for i in range(4)]
    for stream in streams:
        assert [values(response)["R"] for response in stream.all()] == [[b"0"], [b"1"], [b"2"]]
    host.wait_for_counts("m", (4, 4, 4, 0))


def test_decoupled_model_sees_cancellation(host: Host) -> None:
    execute = """
r = requests[0]
s = r.get_response_sender()
def run():
    s.send(pb_utils.InferenceResponse([pb_utils.Tensor("R", np.array([b"first"], dtype=object))]))
    while not (r.is_cancelled() and s.is_cancelled()):
        time.sleep(0.005)
    gone = pb_utils.InferenceResponse(error=pb_utils.TritonError("gone", pb_utils.TritonError.CANCELLED))
    s.send(gone, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
threading.Thread(target=run).start()
"""
    host.load("m", DECOUPLED_CONFIG, body(execute))
    answers = host.infer("m", text("x"))
    first, _ = answers.next()
    assert first is not None and values(first) == {"R": [b"first"]}
    answers.cancel()
    error = answers.one().error
    assert error is not None and error.code is ErrorCode.CANCELLED


def test_decoupled_model_that_raises_or_returns_something_ends_its_requests(host: Host) -> None:
    host.load("m", DECOUPLED_CONFIG, body('raise RuntimeError("early")'))
    error = host.infer("m", text("x")).one().error
    assert error is not None and "RuntimeError: early" in str(error)
    host.load("n", DECOUPLED_CONFIG, body("return []"))
    error = host.infer("n", text("x")).one().error
    assert error is not None and "is using the decoupled mode and the execute function must return None." in str(error)


def test_request_that_a_decoupled_model_drops_is_ended_with_an_error(host: Host) -> None:
    host.load("m", DECOUPLED_CONFIG, body("return None"))
    error = host.infer("m", text("x")).one().error
    assert error is not None and "ended the request without a response" in str(error)


def test_response_parameters_reach_the_client(host: Host) -> None:
    execute = 'return [pb_utils.InferenceResponse([], parameters={"k": 1, "s": "v", "b": True})]'
    host.load("m", TEXT_CONFIG, body(execute))
    assert dict(host.infer("m", text("x")).one().parameters) == {"k": 1, "s": "v", "b": True}


@pytest.mark.parametrize("config", [TEXT_CONFIG, DECOUPLED_CONFIG])
def test_async_execute(host: Host, config: str) -> None:
    send = """
import asyncio
await asyncio.sleep(0)
response = pb_utils.InferenceResponse([pb_utils.Tensor("R", np.array([b"a"], dtype=object))])
"""
    decoupled = "decoupled" in config
    tail = "requests[0].get_response_sender().send(response, flags=1)" if decoupled else "return [response]"
    host.load("m", config, body(send + tail, is_async=True))
    assert values(host.infer("m", text("x")).one()) == {"R": [b"a"]}
    for raised, told in (
        ('ValueError("oh")', "ValueError: oh\n\nAt:\n"),
        ("SystemExit(3)", "RuntimeError: SystemExit: 3"),
    ):
        host.load(told.partition(":")[0], config, body(f"raise {raised}", is_async=True))
        for _ in range(2):
            error = host.infer(told.partition(":")[0], text("x")).one().error
            assert error is not None and f"message: {told}" in str(error)


def test_non_decoupled_model_may_answer_through_its_sender_once(host: Host) -> None:
    execute = """
s = requests[0].get_response_sender()
r = pb_utils.InferenceResponse([pb_utils.Tensor("R", np.array([b"a"], dtype=object))])
s.send(r)
try:
    s.send(r)
except pb_utils.TritonModelException as e:
    assert "cannot send more than one response" in str(e)
s.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
return [None]
"""
    host.load("m", TEXT_CONFIG, body(execute))
    assert values(host.infer("m", text("x")).one()) == {"R": [b"a"]}


def test_custom_metrics_and_logger(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    rest = """
    def initialize(self, args):
        self.family = pb_utils.MetricFamily("my_total", "What I count.", pb_utils.MetricFamily.COUNTER)
        self.metric = self.family.Metric(labels={"model": args["model_name"]})
        pb_utils.Logger.log_warn("%s is up")
"""
    host.load("m", TEXT_CONFIG, body("self.metric.increment(2)\n" + answer_line(), rest=rest))
    host.infer("m", text("x")).one()
    assert host.server.metrics_registry.get_sample_value("my_total", {"model": "m"}) == 2
    (record,) = [record for record in caplog.records if record.getMessage() == "%s is up"]
    assert record.filename == "model.py"
    host.server.unload_model("m")
    assert host.server.stop(10.0)
    assert host.server.metrics_registry.get_sample_value("my_total", {"model": "m"}) is None


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 1_000, 20_000, 3_000_000])
def test_tensors_of_any_size_and_type_come_back_unchanged(host: Host, size: int) -> None:
    names = [*NUMPY_DTYPE]
    tensors = "".join(
        f'input [ {{ name: "I_{name}" data_type: {CONFIG_TYPE_OF_DATATYPE[name]} dims: [ -1 ] }} ]\n'
        f'output [ {{ name: "O_{name}" data_type: {CONFIG_TYPE_OF_DATATYPE[name]} dims: [ -1 ] }} ]\n'
        for name in names
    )
    execute = """
def same(t):
    name = t.name().replace("I_", "O_")
    if name == "O_BF16":  # numpy has no such type
        return pb_utils.Tensor.from_dlpack(name, t.to_dlpack())
    return pb_utils.Tensor(name, t.as_numpy())

return [pb_utils.InferenceResponse([same(t) for t in r.inputs()]) for r in requests]
"""
    host.load("m", f'backend: "python"\n{tensors}', body(execute))
    random = np.random.default_rng(size)
    inputs = []
    for name in names:
        dtype = NUMPY_DTYPE[name]
        count = max(size // dtype.itemsize, 1)
        raw = random.integers(0, 2 if name == "BOOL" else 100, size=min(count, 2_000) if name == "BYTES" else count)
        data = raw.astype(dtype)
        if name == "BYTES":
            data = np.array([str(item).encode() * 3 for item in raw], dtype=object)
        inputs.append(Tensor(f"I_{name}", name, data.shape, data))
    outputs = {tensor.name: tensor for tensor in host.infer("m", inputs).one().outputs}
    for tensor in inputs:
        output = outputs[tensor.name.replace("I_", "O_")]
        assert output.datatype == tensor.datatype and np.array_equal(output.data, tensor.data)


ITERATIVE_CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
sequence_batching { iterative_sequence: true max_sequence_idle_microseconds: 60000000 STRATEGY }
"""
# Counts each request down to 0, one execute at a time. Slots without a request get a null request, which has no id.
ITERATIVE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        responses = [self.step(r) for r in requests]
        return None if DECOUPLED else responses

    def step(self, r):
        left = self.left.pop(r.request_id(), int(r.inputs()[0].as_numpy()[0, 0])) - 1 if r.request_id() else 0
        response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[left]], dtype=np.int32))])
        if left:
            self.left[r.request_id()] = left
            r.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        if DECOUPLED:
            final = 0 if left else pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            r.get_response_sender().send(response, flags=final)
        return None if left else response
"""


@pytest.mark.parametrize("strategy", ["", "oldest { max_candidate_sequences: 4 }"])
@pytest.mark.parametrize("decoupled", [True, False])
def test_rescheduled_request_comes_back_until_it_is_done(host: Host, decoupled: bool, strategy: str) -> None:
    config = ITERATIVE_CONFIG.replace("STRATEGY", strategy)
    config += f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}\n"
    host.load("m", config, f"DECOUPLED = {decoupled}\n{ITERATIVE}")
    answers = {
        count: host.infer("m", [Tensor.of("IN", np.array([[count]], dtype=np.int32))], request_id=str(count))
        for count in (3, 1, 5, 2)
    }
    for count, answer in answers.items():
        found = [values(response)["OUT"] for response in answer.all()]
        assert found == ([[[left]] for left in reversed(range(count))] if decoupled else [[[0]]])
