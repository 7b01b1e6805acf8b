"""Ensembles for tests: a backend whose models act according to their parameter `do`, and ensemble configurations.

`add` (X → Y = X + 1), `sum` (A, B → Y), `split` (X → Y, Z = -Y), `repeat` (decoupled: one response for each value of
X), `gate` (as `add`, once the test opens the gate of the model's name; gives up when it is cancelled), `late` (as
`add`; the value 0 waits for the gate), `block` (waits for the gate inside of Execute; Y = X), `fail`,
`silent` (no response), `twice` (two responses), `picky` (Y = X, but not 3), `drop` (X → Y, leaves Z out), `tell` (keeps
what it was sent in STAGE.kept; Y = X).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.helpers.core_host import Repository

BACKEND = """
import threading, time
import numpy as np
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import ErrorCode, ResponseFlag, SendPolicy, Tensor, TritonError, cancelled

FINAL = ResponseFlag.FINAL

def TRITONBACKEND_Initialize(backend):
    if backend.name == "patient_parts":
        backend.send_policy = SendPolicy.BLOCKING

def TRITONBACKEND_ModelInitialize(model):
    STAGE.note("initialize " + model.name)
    word = model.config.parameters["initialize"].string_value
    if word == "fail":
        raise TritonError("weights missing")
    if word == "wait":
        STAGE.wait("initialize " + model.name)

def TRITONBACKEND_ModelFinalize(model):
    STAGE.note("finalize " + model.name)

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    action = globals()["do_" + instance.model.config.parameters["do"].string_value]
    for request in requests:
        start = time.monotonic_ns()
        STAGE.note("execute " + instance.model.name)
        if action(instance, request) == "held":
            continue
        instance.report_statistics(request, True, start, start + 1000, start + 3000, start + 6000)
        instance.report_batch_statistics(1, start, start, start, start)
        request.release()

def answer(request, *outputs, flags=FINAL, error=None, **parameters):
    response = request.new_response()
    for name, array in outputs:
        response.add_output(Tensor.of(name, array))
    for name, value in parameters.items():
        response.set_parameter(name, value)
    response.send(flags, error)

def do_add(instance, request):
    answer(request, ("Y", request.inputs["X"].data + 1))

def do_sum(instance, request):
    tensors = [tensor.data for tensor in request.inputs.values()]
    answer(request, ("Y", sum(tensors[1:], tensors[0])))

def do_split(instance, request):
    x = request.inputs["X"].data
    answer(request, ("Y", x + 1), ("Z", -x))

def do_late(instance, request):
    # The value 0 waits for the gate, the others do not.
    if not request.inputs["X"].data.any():
        STAGE.wait(instance.model.name)
    answer(request, ("Y", request.inputs["X"].data + 1))

def do_picky(instance, request):
    if request.inputs["X"].data[0] == 3:
        answer(request, error=TritonError("not that one", ErrorCode.INVALID_ARG))
    else:
        answer(request, ("Y", request.inputs["X"].data))

def do_twice(instance, request):
    answer(request, ("Y", request.inputs["X"].data), flags=ResponseFlag.NONE)
    answer(request, ("Y", request.inputs["X"].data))

def do_drop(instance, request):
    answer(request, ("Y", request.inputs["X"].data))

def do_repeat(instance, request):
    for value in request.inputs["X"].data.ravel():
        if request.is_cancelled:
            STAGE.note("repeat stopped")
            break
        answer(request, ("Y", np.array([value], np.float32)), flags=ResponseFlag.NONE)
        STAGE.note("sent %d" % value)
    factory = request.response_factory()
    factory.send_flags(FINAL)
    factory.close()

def do_fail(instance, request):
    answer(request, error=TritonError("no such luck", ErrorCode.UNAVAILABLE))

def do_silent(instance, request):
    factory = request.response_factory()
    factory.send_flags(FINAL)
    factory.close()

def do_tell(instance, request):
    STAGE.kept.append({
        "model": instance.model.name, "version": instance.model.version, "id": request.id,
        "parameters": dict(request.parameters), "priority": request.priority, "timeout_us": request.timeout_us,
        "correlation_id": request.correlation_id, "flags": request.flags, "inputs": sorted(request.inputs),
        "shapes": {name: tensor.shape for name, tensor in request.inputs.items()},
        "outputs": list(request.requested_outputs), "tenant": request.tenant,
    })
    told = instance.model.config.parameters["sequence"].string_value
    more = {"sequence_id": int(told), "sequence_start": True} if told else {}
    answer(request, ("Y", next(iter(request.inputs.values())).data), **more)

def do_block(instance, request):
    STAGE.wait(instance.model.name)
    answer(request, ("Y", request.inputs["X"].data))

def do_gate(instance, request):
    stop = threading.Event()
    name = instance.model.name
    request.on_cancel(lambda: (STAGE.note("cancel " + name), stop.set(), STAGE.open(name)))
    def finish():
        STAGE.wait(instance.model.name)
        if stop.is_set():
            answer(request, error=cancelled("stopped"))
        else:
            answer(request, ("Y", request.inputs["X"].data + 1))
        now = time.monotonic_ns()
        instance.report_statistics(request, not stop.is_set(), now, now, now, now)
        request.release()
    threading.Thread(target=finish, daemon=True).start()
    return "held"
"""


def tensors(kind: str, *names: str, dims: str = "[ -1 ]", data_type: str = "TYPE_FP32", more: str = "") -> str:
    """`kind` is input or output."""
    return "".join(f'{kind} {{ name: "{name}" data_type: {data_type} dims: {dims} {more} }}\n' for name in names)


X_TO_Y = tensors("input", "X") + tensors("output", "Y")
AB_TO_Y = tensors("input", "A", "B") + tensors("output", "Y")
X_TO_YZ = tensors("input", "X") + tensors("output", "Y", "Z")


def part(
    repository: Repository,
    name: str,
    do: str,
    io: str = X_TO_Y,
    config: str = "",
    versions: tuple[int, ...] = (1,),
    is_patient: bool = False,
    **parameters: str,
) -> Path:
    """A composing model. `is_patient`: its backend may be blocked in a send."""
    backend = "patient_parts" if is_patient else "parts"
    if not (repository.backends / backend).exists():
        repository.backend(backend, BACKEND)
    if do == "repeat":
        config += "model_transaction_policy { decoupled: true }"
    for key, value in {"do": do, **parameters}.items():
        config += f' parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
    return repository.model(name, backend, config, versions, io)


def parts(repository: Repository, *names: str) -> None:
    """Composing models that do what their names say."""
    for name in names:
        part(repository, name, name)


def step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str], version: int = -1) -> str:
    maps = [("input_map", inputs), ("output_map", outputs)]
    text = " ".join(
        f'{field} {{ key: "{key}" value: "{value}" }}' for field, pairs in maps for key, value in pairs.items()
    )
    return f'{{ model_name: "{model}" model_version: {version} {text} }}'


def ensemble(
    repository: Repository, name: str, *steps: str, io: str = X_TO_Y, config: str = "", scheduling: str = ""
) -> Path:
    directory = repository.models / name
    (directory / "1").mkdir(parents=True, exist_ok=True)
    (directory / "config.pbtxt").write_text(
        f'platform: "ensemble"\n{io}\n{config}\nensemble_scheduling {{ {scheduling} step [ {", ".join(steps)} ] }}\n'
    )
    return directory


def chain(repository: Repository, name: str, *models: str, **options: str) -> Path:
    """X → first model → … → Y."""
    names = ["X", *(f"t{index}" for index in range(1, len(models))), "Y"]
    steps = [step(model, {"X": names[index]}, {"Y": names[index + 1]}) for index, model in enumerate(models)]
    return ensemble(repository, name, *steps, **options)
