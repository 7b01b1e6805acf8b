"""Business logic scripting: a model that runs inferences on other models, and loads and unloads them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmbackend.core.backend_api import ErrorCode
from llmbackend.core.messages import NO_TENANT, InferenceRequest, Tenant
from llmbackend.core.tensors import Tensor
from tests.helpers.python_host import BACKENDS, Answers, Host
from tests.helpers.python_text_models import DECOUPLED, HEAD, answering, body, config, said, text
from tests.helpers.waiting import eventually

# Answers what it was asked; the words "error", "unavailable" and "wait" do what they say.
SERVANT = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(r) for r in requests]

    def answer(self, r):
        text = text_of(r)
        if text == "error":
            raise ValueError("servant can not")
        if text == "unavailable":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("later", pb_utils.TritonError.UNAVAILABLE))
        if text == "wait":
            while not r.is_cancelled():
                time.sleep(0.005)
            open(os.environ["BLS_TOLD"], "a").close()
        seen = {"text": text, "id": r.request_id(), "corr": r.correlation_id(), "flags": r.flags(),
                "timeout": r.timeout(), "params": json.loads(r.parameters()),
                "wanted": list(r.requested_output_names())}
        return pb_utils.InferenceResponse([pb_utils.Tensor("R", np.array([json.dumps(seen)], dtype=object))],
                                          parameters={"from": "servant"})
"""
)
if BACKENDS:  # NVIDIA's is of a release before the parameters of responses
    SERVANT = SERVANT.replace('parameters={"from": "servant"}', "")
# "3" sends three responses and an empty last one; "forever" streams until it is cancelled.
STREAMER = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            threading.Thread(target=self.run, args=(r, text_of(r))).start()

    def run(self, r, text):
        sender, count = r.get_response_sender(), 0
        while not r.is_cancelled() if text == "forever" else count < int(text):
            sender.send(response(count))
            count += 1
            time.sleep(0.002)
        if r.is_cancelled():
            open(os.environ["BLS_TOLD"], "a").close()
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
)
ASK = """
def ask(text, model="servant", **fields):
    t = pb_utils.Tensor("T", np.array([text], dtype=object))
    return pb_utils.InferenceRequest(model_name=model, requested_output_names=["R"], inputs=[t], **fields)

def words(response):
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return pb_utils.get_output_tensor_by_name(response, "R").as_numpy()[0].decode()
"""


def master(execute: str, *, is_async: bool = False, rest: str = "") -> str:
    code = body(execute, rest).replace("\nclass", f"{ASK}\nclass", 1)
    return code.replace("    def execute", "    async def execute", 1) if is_async else code


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that a servant makes when it saw its cancellation."""
    path = tmp_path / "told"
    monkeypatch.setenv("BLS_TOLD", str(path))
    return path


@pytest.fixture
def host(tmp_path: Path, told: Path) -> Iterator[Host]:
    made = Host(tmp_path / "repo")
    yield made
    eventually(lambda: made.server.check() == [])
    assert made.server.stop(10.0)


def run(host: Host, execute: str, **options: Any) -> str:
    """What a model with that execute answers, beside a servant and a streamer."""
    host.load("servant", config(), SERVANT)
    host.load("streamer", config(DECOUPLED), STREAMER)
    host.load("master", config(), master(execute, **options))
    return said(host.infer("master", text("x")).one())


def test_exec_hands_over_every_field_of_a_request_and_its_response(host: Host) -> None:
    execute = """
r = ask("hi", request_id="i", correlation_id="c", flags=1, timeout=5_000_000, parameters={"a": 1, "b": True, "s": "x"},
        model_version=1, preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 0),
        trace=requests[0].trace()).exec()
return [response(json.dumps([words(r), r.parameters(), len(r.output_tensors())]))]
"""
    answer, parameters, count = json.loads(run(host, execute))
    assert json.loads(answer) == {
        "text": "hi",
        "id": "i",
        "corr": "c",
        "flags": 1,
        "timeout": 5_000_000,
        "params": {"a": 1, "b": True, "s": "x"},
        "wanted": ["R"],
    }
    assert (json.loads(parameters), count) == ({"from": "servant"}, 1)
    assert host.counts("servant") == (1, 1, 1, 0)


def test_names_may_be_bytes_as_a_tensor_holds_them(host: Host) -> None:
    execute = """
name = pb_utils.get_input_tensor_by_name(requests[0], "T").as_numpy()[0]
t = pb_utils.Tensor(b"T", np.array(["hi"], dtype=object))
r = pb_utils.InferenceRequest(model_name=name, requested_output_names=[b"R"], inputs=[t], request_id=b"i").exec()
seen = [json.loads(words(r))["id"], pb_utils.is_model_ready(name, b"1"), pb_utils.is_model_ready(b"no-" + name)]
pb_utils.unload_model(name)
while pb_utils.is_model_ready(name):
    time.sleep(0.01)
code = CODE
made = {"backend": "python", "input": [{"name": "T", "data_type": "TYPE_STRING", "dims": [1]}],
        "output": [{"name": "R", "data_type": "TYPE_STRING", "dims": [1]}]}
pb_utils.load_model(name, json.dumps(made).encode(), {b"file:1/model.py": code})
r = pb_utils.InferenceRequest(model_name=name, requested_output_names=[b"R"], inputs=[t]).exec()
return [response(json.dumps([*seen, words(r)]))]
"""
    host.load("servant", config(), SERVANT)
    host.load("master", config(), master(execute.replace("CODE", repr(answering("'made'")))))
    assert json.loads(said(host.infer("master", text("servant")).one())) == ["i", True, False, "made"]


def test_exec_tells_errors_as_a_response_with_their_code(host: Host) -> None:
    execute = """
def error(request, **options):
    r = request.exec(**options)
    assert r.has_error() and not r.output_tensors()
    return [r.error().code(), r.error().message()]
bad = pb_utils.InferenceRequest(model_name="servant", requested_output_names=["R"], inputs=[])
seen = [error(ask("error")), error(ask("unavailable")), error(ask("x", model="nobody")),
        error(ask("1", model="streamer")), error(bad)]
return [response(json.dumps(seen))]
"""
    raised, later, nobody, decoupled, bad = json.loads(run(host, execute))
    assert raised[0] == 1 and "servant can not" in raised[1]
    assert later == [4, "later"]
    assert nobody == [1, "Failed for execute the inference request. Model 'nobody' is not ready."]
    assert decoupled[1].startswith(
        "Model streamer is using the decoupled. The current BLS request call doesn't support"
    )
    assert bad[0] == 3 and "expected 1 inputs but got 0" in bad[1]


def test_exec_of_a_decoupled_model_iterates_its_responses_up_to_an_empty_last_one(host: Host) -> None:
    execute = """
found = []
for r in ask("3", model="streamer").exec(decoupled=True):
    found.append([t.as_numpy()[0].decode() for t in r.output_tensors()])
one = [words(r) for r in ask("hi").exec(decoupled=True)]
refused = [r.error().message() for r in ask("x", model="nobody").exec(decoupled=True)]
return [response(json.dumps([found, len(one), refused]))]
"""
    found, one, refused = json.loads(run(host, execute))
    assert found == [["0"], ["1"], ["2"], []] and one == 1
    assert refused == ["Failed for execute the inference request. Model 'nobody' is not ready."]


def test_decoupled_master_passes_a_stream_on_from_its_own_thread(host: Host) -> None:
    execute = """
def run(sender):
    for r in ask("5", model="streamer").exec(decoupled=True):
        if r.output_tensors():
            sender.send(response("m" + words(r)))
    sender.send(flags=1)
for r in requests:
    threading.Thread(target=run, args=(r.get_response_sender(),)).start()
"""
    host.load("streamer", config(DECOUPLED), STREAMER)
    host.load("master", config(DECOUPLED), master(execute))
    streams = [host.infer("master", text("x")) for _ in range(4)]
    for stream in streams:
        assert [said(response) for response in stream.all()] == ["m0", "m1", "m2", "m3", "m4"]


def test_async_exec_runs_requests_side_by_side(host: Host) -> None:
    execute = """
import asyncio
waits = [ask(str(i)).async_exec() for i in range(3)] + [ask("error").async_exec()]
answers = await asyncio.gather(*waits)
streams = await asyncio.gather(*(ask("2", model="streamer").async_exec(decoupled=True) for _ in range(2)))
counts = [len([r for r in stream if r.output_tensors()]) for stream in streams]
return [response(json.dumps([[json.loads(words(a))["text"] for a in answers[:3]], answers[3].has_error(), counts]))]
"""
    assert json.loads(run(host, execute, is_async=True)) == [["0", "1", "2"], True, [2, 2]]


def test_four_awaited_streams_wait_side_by_side(host: Host) -> None:
    together = """
class TritonPythonModel:
    def initialize(self, args):
        self.all_are_here = threading.Barrier(4)

    def execute(self, requests):
        for r in requests:
            threading.Thread(target=self.run, args=(r.get_response_sender(),)).start()

    def run(self, sender):
        self.all_are_here.wait(15)
        sender.send(response("together"))
        sender.send(flags=1)
"""
    host.load("together", config(DECOUPLED), HEAD + together)
    execute = """
for r in requests:
    sender = r.get_response_sender()
    for answer in await ask("x", model="together").async_exec(decoupled=True):
        if answer.output_tensors():
            sender.send(response(words(answer)))
    sender.send(flags=1)
"""
    host.load("master", config(DECOUPLED), master(execute, is_async=True))
    streams = [host.infer("master", text("x")) for _ in range(4)]
    assert [[said(response) for response in stream.all()] for stream in streams] == [["together"]] * 4


def test_async_for_lets_other_coroutines_run_between_two_responses(host: Host) -> None:
    gated = """
class TritonPythonModel:
    gate = threading.Event()

    def execute(self, requests):
        for r in requests:
            threading.Thread(target=self.run, args=(r.get_response_sender(), text_of(r))).start()

    def run(self, sender, text):
        if text == "open":
            self.gate.set()
        else:
            sender.send(response("first"))
            assert self.gate.wait(15)
        sender.send(response("last"), flags=1)
"""
    host.load("gated", config(DECOUPLED), HEAD + gated)
    execute = """
import asyncio
seen = []

async def walk():
    async for answer in await ask("x", model="gated").async_exec(decoupled=True):
        seen.append(words(answer))

async def open_gate():
    while not seen:
        await asyncio.sleep(0.01)
    await ask("open", model="gated").async_exec(decoupled=True)

await asyncio.gather(walk(), open_gate())
return [response(json.dumps(seen))]
"""
    assert json.loads(run(host, execute, is_async=True)) == ["first", "last"]


def test_a_stream_can_be_walked_again_from_where_it_was_left_and_from_its_start(host: Host) -> None:
    execute = """
import itertools
stream = ask("3", model="streamer").exec(decoupled=True)
one = lambda r: words(r) if r.output_tensors() else ""
seen = [[one(next(stream))], [one(r) for r in itertools.islice(stream, 1)], [one(r) for r in stream]]
try:
    next(stream)
except StopIteration:
    seen += [[one(r) for r in stream], [one(next(iter(stream)))], [one(r) for r in stream]]
return [response(json.dumps(seen))]
"""
    whole = ["0", "1", "2", ""]
    assert json.loads(run(host, execute)) == [["0"], ["1"], ["2", ""], whole, ["0"], whole[1:]]


POOL = """
    def initialize(self, args):
        import multiprocessing
        self.before = multiprocessing.get_context("fork").Pool(2)
"""


WORK = """
def work(n):
    pb_utils.Logger.log_info(f"worker {n}")
    parts = [words(r) for r in ask("2", model="streamer").exec(decoupled=True) if r.output_tensors()]
    return [json.loads(words(ask(str(n)).exec()))["text"], parts, pb_utils.is_model_ready("nobody"), os.getpid()]
"""


def test_worker_processes_call_models_as_the_model_does(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    execute = """
import multiprocessing
with multiprocessing.get_context("fork").Pool(3) as inside:
    seen = [self.before.map(work, range(6)), inside.map(work, range(6))]
seen[1][0][0] = words(ask("again", model="servant").exec()) and "again"
return [response(json.dumps([[row[:3] for row in rows] for rows in seen]
                            + [os.getpid() in [row[3] for rows in seen for row in rows]]))]
"""
    code = master(execute, rest=POOL).replace("\nclass", WORK + "\nclass", 1)
    host.load("servant", config(), SERVANT)
    host.load("streamer", config(DECOUPLED), STREAMER)
    host.load("master", config(), code)
    with caplog.at_level("INFO"):
        before, inside, is_own = json.loads(said(host.infer("master", text("x")).one()))
    rows = [[str(n), ["0", "1"], False] for n in range(6)]
    assert before == rows and inside == [["again", *rows[0][1:]], *rows[1:]] and not is_own
    assert sum(record.getMessage() == "worker 5" for record in caplog.records) == 2


def test_what_a_worker_process_asks_ends_with_it(host: Host, told: Path) -> None:
    execute = """
pid = os.fork()
if pid == 0:
    threading.Thread(target=ask("wait").exec).start()
    time.sleep(0.3)
    os._exit(0)
os.waitpid(pid, 0)
return [response("gone")]
"""
    assert run(host, execute) == "gone"
    eventually(told.exists)


def test_a_worker_process_can_not_answer_for_the_model(host: Host) -> None:
    execute = """
import multiprocessing
sender, answers = requests[0].get_response_sender(), multiprocessing.get_context("fork").SimpleQueue()
pid = os.fork()
if pid == 0:
    try:
        sender.send(response("from the fork"))
    except OSError as e:
        answers.put(str(e))
    os._exit(0)
os.waitpid(pid, 0)
sender.send(response(answers.get()))
"""
    assert run(host, execute) == "a response must be sent by the model instance's process, not by its child"


def test_cancelled_await_cancels_the_inference(host: Host, told: Path) -> None:
    execute = """
import asyncio
try:
    await asyncio.wait_for(ask("wait").async_exec(), 0.1)
except asyncio.TimeoutError:
    return [response("timed out")]
"""
    assert run(host, execute, is_async=True) == "timed out"
    eventually(told.exists)


@pytest.mark.parametrize("how", ["stream.cancel(); rest = [r for r in stream]", "del stream"])
def test_stream_that_is_cancelled_or_dropped_stops_the_other_model(host: Host, told: Path, how: str) -> None:
    execute = f"""
stream = ask("forever", model="streamer").exec(decoupled=True)
first = words(next(stream))
{how}
return [response(first)]
"""
    assert run(host, execute) == "0"
    eventually(told.exists)


def test_inferences_of_a_process_that_dies_are_cancelled(host: Host, told: Path) -> None:
    host.load("servant", config(), SERVANT)
    host.load("master", config(), master("threading.Timer(0.1, os._exit, (1,)).start()\nask('wait').exec()"))
    error = host.infer("master", text("x")).one().error
    assert error is not None and "is not healthy" in str(error)
    eventually(told.exists)


def test_large_tensors_pass_between_models(host: Host) -> None:
    execute = """
r = ask("y" * 2_000_000).exec()
return [response(len(json.loads(words(r))["text"]))]
"""
    assert run(host, execute) == "2000000"


def test_bls_is_for_execute_alone(host: Host) -> None:
    rest = """
    def initialize(self, args):
        try:
            ask("x").exec()
        except pb_utils.TritonModelException as e:
            self.refused = str(e)
"""
    assert run(host, "return [response(self.refused)]", rest=rest) == (
        "BLS is only supported during the 'execute' function."
    )


def test_request_that_is_rescheduled_by_a_model_without_iterative_sequences_gets_an_error(host: Host) -> None:
    execute = "requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)\nreturn [None]"
    host.load("m", config(), body(execute))
    error = host.infer("m", text("x")).one().error
    assert error is not None and error.code is ErrorCode.INVALID_ARG and "RESCHEDULE" in str(error)


def test_model_loads_asks_for_and_unloads_other_models(host: Host) -> None:
    host.load("servant", config(), SERVANT)
    host.server.unload_model("servant")
    eventually(lambda: not host.server.model_is_ready("servant"))
    execute = """
seen = [pb_utils.is_model_ready("servant"), pb_utils.is_model_ready("nobody")]
pb_utils.load_model("servant")
seen += [pb_utils.is_model_ready("servant", "1"), pb_utils.is_model_ready("servant", "7"), words(ask("x").exec()) != ""]
try:
    pb_utils.load_model(model_name="nobody")
except pb_utils.TritonModelException as e:
    seen.append(str(e))
made = {"backend": "python", "input": [{"name": "T", "data_type": "TYPE_STRING", "dims": [1]}],
        "output": [{"name": "R", "data_type": "TYPE_STRING", "dims": [1]}]}
code = CODE
pb_utils.load_model(model_name="made", config=json.dumps(made), files={"file:1/model.py": code.encode()})
seen.append(words(ask("x", model="made").exec()))
pb_utils.unload_model("made", unload_dependents=True)
while pb_utils.is_model_ready("made"):
    time.sleep(0.01)
return [response(json.dumps(seen))]
"""
    host.load("master", config(), master(execute.replace("CODE", repr(answering("'made'")))))
    *seen, failed, made = json.loads(said(host.infer("master", text("x")).one()))
    assert seen == [False, False, True, False, True]
    assert failed == "failed to load 'nobody', failed to poll from model repository" and made == "made"


def test_queue_timeout_of_an_inner_request_is_an_error_response(host: Host) -> None:
    batching = """
dynamic_batching { default_queue_policy { allow_timeout_override: true timeout_action: REJECT
                                          default_timeout_microseconds: 60000000 } }
"""
    host.load("slow", config() + batching, body("time.sleep(0.3)\nreturn [response(1) for r in requests]"))
    execute = """
import asyncio
first = ask("x", model="slow").async_exec()
await asyncio.sleep(0.1)
late = await ask("x", model="slow", timeout=1000).async_exec()
return [response(json.dumps([late.error().message(), (await first).has_error()]))]
"""
    assert json.loads(run(host, execute, is_async=True)) == ["Request timeout expired", False]


def test_float_tensors_of_another_models_response_can_be_answered_as_they_are(host: Host) -> None:
    numbers = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
    double = (
        "return [pb_utils.InferenceResponse([pb_utils.Tensor('Y', r.inputs()[0].as_numpy() * 2)]) for r in requests]"
    )
    twice = """
answers = []
for r in requests:
    inner = pb_utils.InferenceRequest(model_name="double", requested_output_names=["Y"], inputs=r.inputs()).exec()
    answers.append(pb_utils.InferenceResponse(inner.output_tensors()))
return answers
"""
    host.load("double", numbers, body(double))
    host.load("twice", numbers, body(twice))
    for size in (3, 100_000):
        given = np.arange(size, dtype=np.float32)
        (output,) = host.infer("twice", [Tensor.of("X", given)]).one().outputs
        assert np.array_equal(output.data, given * 2)


# --- on behalf of tenants----------------------------------------------------------------------------------------------

ALICE, BOB = Tenant("alice", cache_name="alice"), Tenant("bob", is_operator=True, cache_name="bob")
ALICES, BOBS = ["alice", False, "alice"], ["bob", True, "bob"]
WHOSE = body("return [response(json.dumps(r._tenant)) for r in requests]")
BATCHING = """
max_batch_size: 2
dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 20000000 }
"""


def ask_for(host: Host, tenant: Tenant, words: str = "x", *, batches: bool = False) -> Answers:
    tensor = Tensor.text("T", words)
    if batches:
        tensor = Tensor("T", "BYTES", (1, 1), tensor.data.reshape(1, 1))
    answers = Answers()
    request = InferenceRequest("master", inputs=(tensor,), tenant=tenant)
    answers.handle = host.server.infer_async(request, answers)
    return answers


@pytest.mark.parametrize(
    ("execute", "is_async"),
    [
        ("return [response(words(ask('x').exec())) for r in requests]", False),
        ("return [response(words(await ask('x').async_exec())) for r in requests]", True),
        ("return [response(words(ask('x', trace=r.trace()).exec())) for r in requests]", False),
        (
            IN_A_THREAD := """
told = []
thread = threading.Thread(target=lambda: told.append(words(ask('x').exec())))
thread.start(), thread.join()
return [response(told[0])]
""",
            False,
        ),
    ],
)
def test_what_a_model_asks_for_a_request_is_asked_for_its_client(host: Host, execute: str, is_async: bool) -> None:
    host.load("servant", config(), WHOSE)
    host.load("master", config(), master(execute, is_async=is_async))
    for tenant, told in ((ALICE, ALICES), (BOB, BOBS), (NO_TENANT, None), (ALICE, ALICES)):
        assert json.loads(said(ask_for(host, tenant).one())) == told


def test_coroutines_of_a_decoupled_model_keep_their_clients_apart(host: Host) -> None:
    """Both run at the same time, and each goes on after its execute call."""
    execute = """
sender, word = requests[0].get_response_sender(), text_of(requests[0])
while not os.path.exists(os.environ["BLS_TOLD"]):
    await asyncio.sleep(0.005)
sender.send(response(word + words(await ask('x').async_exec())), flags=1)
"""
    host.load("servant", config(), WHOSE)
    host.load("master", config(DECOUPLED), "import asyncio\n" + master(execute, is_async=True))
    clients = [ask_for(host, ALICE, "a"), ask_for(host, BOB, "b"), ask_for(host, NO_TENANT, "n")]
    Path(os.environ["BLS_TOLD"]).touch()
    assert [said(client.one()) for client in clients] == [
        f"a{json.dumps(ALICES)}",
        f"b{json.dumps(BOBS)}",
        "nnull",
    ]


def test_a_batch_of_several_clients_asks_for_no_tenant_unless_it_names_one(host: Host) -> None:
    execute = """
return [response(json.dumps([words(ask('x').exec()), words(ask('x', trace=r.trace()).exec())])) for r in requests]
"""
    batching = config().replace('backend: "python"', f'backend: "python"{BATCHING}')
    host.load("servant", config(), WHOSE)
    host.load("master", batching, master(execute).replace("as_numpy()[0]", "as_numpy().ravel()[0]"))
    clients = [ask_for(host, ALICE, batches=True), ask_for(host, BOB, batches=True)]
    unsaid, explicit = zip(*(map(json.loads, json.loads(said(client.one()))) for client in clients), strict=True)
    assert list(explicit) == [ALICES, BOBS]
    names = {name for key_name, _, cache_name in unsaid for name in (key_name, cache_name)}
    assert len(names) == 2 and all(name.startswith("#") for name in names), "two calls, and neither shares anything"
    assert not any(is_operator for _, is_operator, _ in unsaid)
    same = [ask_for(host, ALICE, batches=True), ask_for(host, ALICE, batches=True)]
    assert [json.loads(json.loads(said(client.one()))[0]) for client in same] == [ALICES, ALICES]


def test_what_a_model_asks_outside_of_any_request_is_nobodys(host: Host) -> None:
    rest = """
    def initialize(self, arguments):
        self.told = []
        threading.Thread(target=self.ask_later).start()

    def ask_later(self):
        while not self.told:
            try:
                self.told.append(words(ask('x').exec()))
            except pb_utils.TritonModelException:  # initialize is not over
                time.sleep(0.005)
"""
    execute = "while not self.told:\n            time.sleep(0.005)\nreturn [response(self.told[0])]"
    host.load("servant", config(), WHOSE)
    host.load("master", config(), master(execute, rest=rest))
    eventually(lambda: host.counts("servant")[0] == 1)
    assert json.loads(said(ask_for(host, ALICE).one())) is None
