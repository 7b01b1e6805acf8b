"""Models that are made of others: order of loading, what a missing or changed part means, what fits."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.config.model_config_rules import validate_scheduling
from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.lifecycle.ensembles import dependency_cycles, dependency_levels
from tests.helpers.core_host import STAGE, WAIT_S, Repository, send, serving, version_of, x
from tests.helpers.ensemble_host import AB_TO_Y, X_TO_Y, X_TO_YZ, chain, ensemble, part, parts, step, tensors
from tests.helpers.waiting import eventually


def states(server: InferenceServer) -> dict[str, str]:
    return {row.name: f"{row.state} {row.reason}".strip() for row in server.repository_index()}


def load_error(server: InferenceServer, name: str) -> TritonError:
    with pytest.raises(TritonError) as caught:
        server.load_model(name)
    return caught.value


def answers(server: InferenceServer, name: str = "e") -> list[float]:
    (response,) = send(server, name, x(1)).responses()
    assert response.error is None, response.error
    return [float(value) for value in response.outputs[0].data]


def initialized(name: str) -> int:
    return STAGE.events.count(f"initialize {name}")


# --- loading and unloading ------------------------------------------------------------------------------------------


def test_loading_an_ensemble_loads_what_it_is_made_of_first(repository: Repository) -> None:
    part(repository, "a", "add")
    part(repository, "b", "add")
    chain(repository, "inner", "a", "b")
    chain(repository, "outer", "b", "inner")
    with serving(repository) as server:
        server.load_model("outer")
        assert states(server) == dict.fromkeys(("a", "b", "inner", "outer"), "READY")
        assert initialized("a") == initialized("b") == 1
        assert answers(server, "outer") == [4]
        server.load_model("outer")  # nothing changed
        assert initialized("a") == initialized("b") == 1


def test_parts_load_side_by_side(repository: Repository) -> None:
    part(repository, "a", "add", initialize="wait")
    part(repository, "b", "add", initialize="wait")
    chain(repository, "e", "a", "b")
    with serving(repository) as server:
        loading = server.start_load("e")
        eventually(lambda: initialized("a") and initialized("b"))
        assert not loading.done() and states(server)["e"] == ""
        STAGE.open("initialize a")
        STAGE.open("initialize b")
        loading.result(WAIT_S)
        assert answers(server) == [3]


def test_unloading_an_ensemble_keeps_its_parts_unless_told_otherwise(repository: Repository) -> None:
    for name in ("a", "b", "c"):
        part(repository, name, "add")
    chain(repository, "inner", "b")
    chain(repository, "e", "a", "inner", "c")
    chain(repository, "other", "c")
    with serving(repository, "a", "other") as server:
        server.load_model("e")
        server.unload_model("e")
        eventually(lambda: states(server)["e"] == "UNAVAILABLE unloaded")
        assert states(server)["b"] == states(server)["inner"] == "READY"
        server.load_model("e")
        server.unload_model("e", unload_dependents=True)
        eventually(lambda: "READY" not in [states(server)[name] for name in ("e", "inner", "b")])
        # `a` was asked for by name, `c` is needed by another ensemble.
        assert states(server)["a"] == states(server)["c"] == states(server)["other"] == "READY"


def test_unloading_a_part_unloads_the_ensemble_and_loading_it_brings_the_ensemble_back(
    repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    part(repository, "a", "add")
    part(repository, "b", "add")
    chain(repository, "inner", "a")
    chain(repository, "e", "inner", "b")
    with serving(repository, "e") as server:
        server.unload_model("a")
        assert "ensemble e contains models that are not available or ambiguous: a" in caplog.text
        eventually(lambda: states(server)["e"] == states(server)["inner"] == "UNAVAILABLE unloaded")
        assert states(server)["b"] == "READY"
        with pytest.raises(TritonError, match="Request for unknown model: 'e' has no available versions"):
            send(server, "e", x(1))
        server.load_model("a")
        assert states(server)["e"] == states(server)["inner"] == "READY" and answers(server) == [3]
        # An ensemble that was unloaded by name stays away.
        server.unload_model("e")
        server.unload_model("a")
        server.load_model("a")
        eventually(lambda: states(server)["e"] == "UNAVAILABLE unloaded")
        assert states(server)["inner"] == "READY"


def test_a_changed_part_loads_the_ensemble_again(repository: Repository, caplog: pytest.LogCaptureFixture) -> None:
    part(repository, "a", "add")
    part(repository, "b", "add")
    chain(repository, "e", "a", "b")
    with serving(repository, "e") as server:
        before = version_of(server, "e")
        part(repository, "a", "add", config="# changed\n")
        server.load_model("a")
        assert version_of(server, "e") is not before and initialized("b") == 1 and answers(server) == [3]
        part(repository, "a", "tell", tensors("input", "X", data_type="TYPE_INT32") + tensors("output", "Y"))
        server.load_model("a")  # it loads, but the ensemble does not fit any more
        assert "inconsistent data type: TYPE_FP32 is inferred from model e while TYPE_INT32" in caplog.text
        eventually(lambda: states(server)["e"] == "UNAVAILABLE unloaded")
        part(repository, "a", "add")
        server.load_model("e")  # loads the changed part, too
        assert answers(server) == [3]


def test_a_changed_part_is_loaded_with_the_ensemble(repository: Repository) -> None:
    part(repository, "a", "add")
    chain(repository, "e", "a")
    with serving(repository, "e") as server:
        part(repository, "a", "tell")
        server.load_model("e")
        assert answers(server) == [1] and initialized("a") == 2


def test_ensembles_that_share_parts_can_be_loaded_at_once(repository: Repository) -> None:
    names = [f"e{index}" for index in range(6)]
    for name in ("a", "b", "c"):
        part(repository, name, "add")
    for index, name in enumerate(names):
        chain(repository, name, *(["a", "b", "c"] * 2)[index % 3 :], *names[index + 1 : index + 3])
    with serving(repository) as server, ThreadPoolExecutor(6) as pool:
        for _ in range(2):
            for future in [pool.submit(server.load_model, name) for name in names]:
                future.result(WAIT_S)
            assert set(states(server).values()) == {"READY"}
            for future in [pool.submit(server.unload_model, name, True) for name in reversed(names)]:
                future.result(WAIT_S)
            eventually(lambda: "READY" not in states(server).values())


def test_at_startup_every_model_is_tried_once_and_a_failure_names_the_part(
    repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    part(repository, "bad", "add", initialize="fail")
    part(repository, "good", "add")
    chain(repository, "e", "good", "bad")
    chain(repository, "fine", "good")
    with serving(repository, model_control_mode="none", exit_on_error=False) as server:
        assert initialized("bad") == initialized("good") == 1
        assert states(server)["fine"] == "READY" and states(server)["e"] == ""
        assert "ensemble 'e' depends on 'bad' which has no loaded version." in caplog.text
        assert not server.is_ready()


# --- what a client is told ------------------------------------------------------------------------------------------


def test_the_failure_of_a_part_is_the_failure_of_the_ensemble(repository: Repository) -> None:
    part(repository, "bad", "add", initialize="fail")
    chain(repository, "e", "bad")
    chain(repository, "outer", "e")
    with serving(repository) as server:
        error = load_error(server, "e")
        reason = (
            "ensemble 'e' depends on 'bad' which has no loaded version. Model 'bad' loading failed with error: "
            "version 1 is at UNAVAILABLE state: Internal: weights missing;"
        )
        assert error.code is ErrorCode.INVALID_ARG and error.message == f"load failed for model 'e': {reason}\n"
        assert load_error(server, "outer").message == (
            f"load failed for model 'outer': ensemble 'outer' depends on 'e' which is not valid. Model 'e' failed with "
            f"error: {reason}\n"
        )
        assert states(server) == {"bad": "UNAVAILABLE Internal: weights missing", "e": "", "outer": ""}
        part(repository, "bad", "add")
        server.load_model("bad")
        assert states(server) == {"bad": "READY", "e": "READY", "outer": "READY"}


def test_a_part_that_no_repository_has(repository: Repository) -> None:
    part(repository, "a", "add")
    chain(repository, "e", "a", "nosuch", "../etc")
    part(repository, "versioned", "add")
    pair = ({"X": "X"}, {"Y": "Y"})
    ensemble(repository, "old", step("versioned", *pair, version=3))
    with serving(repository) as server:
        assert load_error(server, "e").message == (
            "load failed for model 'e': ensemble e contains models that are not available or ambiguous: nosuch\n"
        )
        assert states(server)["a"] == "READY"  # as in Triton, which polls and loads what it finds
        assert load_error(server, "old").message == (
            "load failed for model 'old': ensemble 'old' depends on 'versioned' whose required version 3 is not "
            "loaded.\n"
        )


def test_dependency_cycles_are_refused(repository: Repository) -> None:
    part(repository, "a", "add")
    chain(repository, "self", "a", "self")
    chain(repository, "one", "two")
    chain(repository, "two", "three")
    chain(repository, "three", "a", "one")
    chain(repository, "tail", "one")
    prefix = "circular dependency between ensembles: "
    with serving(repository) as server:
        assert load_error(server, "self").message == (
            f"load failed for model 'self': {prefix}self -> ... -> self -> self\n"
        )
        assert (
            load_error(server, "one").message == f"load failed for model 'one': {prefix}three -> ... -> two -> three\n"
        )
        assert load_error(server, "tail").message == (
            "load failed for model 'tail': ensemble 'tail' depends on 'one' which is not valid. Model 'one' failed "
            f"with error: {prefix}three -> ... -> two -> three\n"
        )
        with ThreadPoolExecutor(3) as pool:
            for future in [pool.submit(load_error, server, name) for name in ("one", "two", "three")]:
                assert prefix in future.result(WAIT_S).message
        assert states(server)["a"] == "READY"


def test_an_ensemble_needs_no_backend_and_a_change_of_its_own_is_a_reload(repository: Repository) -> None:
    part(repository, "a", "add")
    chain(repository, "e", "a")
    with serving(repository, "e") as server:
        config = server.model_config("e")
        assert (config.backend, config.platform, len(config.instance_group)) == ("", "ensemble", 0)
        assert not config.HasField("optimization") and config.HasField("model_transaction_policy")
        assert server.model_metadata("e").platform == "ensemble" and server.model_is_ready("e") and server.is_ready()
        chain(repository, "e", "a", "a", config="# longer")
        server.load_model("e")
        assert answers(server) == [3] and initialized("a") == 1


# --- what fits ------------------------------------------------------------------------------------------------------

INT = tensors("input", "X", data_type="TYPE_INT32") + tensors("output", "Y")
PLAIN = ({"X": "X"}, {"Y": "Y"})
MISFITS = {
    "type": (
        [step("int", *PLAIN)],
        "in ensemble e, ensemble tensor X: inconsistent data type: TYPE_FP32 is inferred from model e while TYPE_INT32 "
        "is inferred from model int",
    ),
    "shape": (
        [step("two", {"X": "X"}, {"Y": "t"}), step("three", {"X": "t"}, {"Y": "Y"})],
        "in ensemble e, ensemble tensor t: inconsistent shape: [2] is inferred from model two while [3] is inferred "
        "from model three",
    ),
    "input": (
        [step("plain", {"X": "X", "W": "X"}, {"Y": "Y"})],
        "in ensemble e, ensemble tensor X is mapping to non-existing input W in model plain",
    ),
    "output": (
        [step("plain", {"X": "X"}, {"Y": "Y", "W": "w"}), step("plain", {"X": "w"}, {"Y": "v"})],
        "in ensemble e, ensemble tensor w is mapped from non-existing output W in model plain",
    ),
    "unmapped": (
        [step("sum", {"A": "X"}, {"Y": "Y"})],
        "in ensemble e, input B in model sum is not mapped to any ensemble tensors",
    ),
    "mixed": (
        [step("repeat", {"X": "X"}, {"Y": "t"}), step("sum", {"A": "t", "B": "X"}, {"Y": "Y"})],
        "in ensemble e, step of model 'e' receives inputs originated from different decoupled models",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_an_ensemble_that_does_not_fit_its_parts_is_refused(repository: Repository, case: str) -> None:
    part(repository, "plain", "add")
    part(repository, "int", "tell", INT)
    part(repository, "two", "add", tensors("input", "X") + tensors("output", "Y", dims="[ 2 ]"))
    part(repository, "three", "add", tensors("input", "X", dims="[ 3 ]") + tensors("output", "Y"))
    part(repository, "sum", "sum", AB_TO_Y)
    part(repository, "repeat", "repeat")
    steps, reason = MISFITS[case]
    outputs = tensors("output", "Y", *(["v"] if case == "output" else []))
    ensemble(repository, "e", *steps, io=tensors("input", "X") + outputs)
    with serving(repository) as server:
        error = load_error(server, "e")
        assert error.message == f"load failed for model 'e': {reason}\n" and error.code is ErrorCode.INVALID_ARG
        assert states(server)["e"] == ""


def test_batch_sizes_and_batch_dimensions_must_fit(repository: Repository) -> None:
    part(repository, "small", "add", config="max_batch_size: 2")
    dims = "[ -1, -1 ]"
    part(repository, "wide", "add", tensors("input", "X", dims=dims) + tensors("output", "Y", dims=dims))
    chain(repository, "e", "small", config="max_batch_size: 4")
    chain(repository, "fits", "small", "wide", "small", config="max_batch_size: 2")
    with serving(repository) as server:
        assert load_error(server, "e").message == (
            "load failed for model 'e': ensemble e allows maximum batch size 4, but it contains model small which only "
            "allows maximum batch size to be 2\n"
        )
        # The shape of a model that does not batch may hold the batch dimension.
        server.load_model("fits")
        assert server.model_metadata("fits").inputs[0].shape == (-1, -1)


@pytest.mark.parametrize(
    ("steps", "is_decoupled"),
    [
        ([step("repeat", {"X": "X"}, {"Y": "t"}), step("add", {"X": "t"}, {"Y": "Y"})], True),
        ([step("add", {"X": "X"}, {"Y": "t"}), step("add", {"X": "t"}, {"Y": "Y"})], False),
        ([step("both", {"X": "X"}, {"Y": "t", "Z": "u"}), step("sum", {"A": "t", "B": "u"}, {"Y": "Y"})], True),
    ],
)
def test_whether_an_ensemble_is_decoupled_follows_from_its_steps(
    repository: Repository, steps: list[str], is_decoupled: bool
) -> None:
    parts(repository, "repeat", "add")
    part(repository, "both", "repeat", X_TO_YZ)
    part(repository, "sum", "sum", AB_TO_Y)
    says = str(not is_decoupled).lower()
    ensemble(repository, "e", *steps, config=f"model_transaction_policy {{ decoupled: {says} }}")
    with serving(repository, "e") as server:
        assert server.model_config("e").model_transaction_policy.decoupled is is_decoupled


SCHEDULING = {
    "": "ensemble scheduling must be set for ensemble e whose platform is ensemble",
    "ensemble_scheduling {}": "must specify 'step' for ensemble 'e'",
    "ensemble_scheduling { step {} }": "must specify 'model_name' in step 0 of ensemble 'e'",
    'ensemble_scheduling { step { model_name: "a" } }': "must specify 'input_map' in step 0 of ensemble 'e'",
    f"ensemble_scheduling {{ step [ {step('a', {'X': 'X'}, {})} ] }}": (
        "must specify 'output_map' in step 0 of ensemble 'e'"
    ),
    f"ensemble_scheduling {{ step [ {step('a', *PLAIN)}, {step('a', *PLAIN)} ] }}": (
        "ensemble tensor 'Y' can appear in an output map only once for ensemble 'e' step 1"
    ),
    f"ensemble_scheduling {{ step [ {step('a', {'X': 'V'}, {'Y': 'Y'})} ] }}": (
        "ensemble input 'X' for ensemble e' is not used"
    ),
    f"ensemble_scheduling {{ step [ {step('a', {'X': 'X'}, {'Y': 'V'})} ] }}": (
        "ensemble output 'Y' for ensemble e' is not used"
    ),
    f"ensemble_scheduling {{ step [ {step('a', {'X': 'X', 'W': 'V'}, {'Y': 'Y'})} ] }}": (
        "output 'Y' for ensemble 'e' is not written"
    ),
    f"ensemble_scheduling {{ step [ {step('a', {'X': 'X'}, {'Y': 'Y', 'Z': 'V'})} ] }}": (
        "ensemble tensor 'V' is unused in ensemble 'e'"
    ),
    f"ensemble_scheduling {{ step [ {step('a', *PLAIN)} ] }} instance_group {{}}": (
        "instance group should not be specified for ensemble 'e'"
    ),
    f"ensemble_scheduling {{ step [ {step('a', *PLAIN)} ] }} optimization {{}}": (
        "optimization should not be specified for ensemble 'e'"
    ),
    f"ensemble_scheduling {{ step [ {step('a', *PLAIN)} ] }} model_warmup {{}}": (
        "model_warmup can not be specified for ensemble 'e'"
    ),
    f'ensemble_scheduling {{ step [ {step("a", *PLAIN)} ] }} platform: "onnxruntime_onnx"': (
        "ensemble scheduling cannot be set for model 'e' whose platform is not ensemble"
    ),
}


@pytest.mark.parametrize("text", SCHEDULING)
def test_a_flow_that_can_not_work_is_refused_before_anything_is_loaded(text: str) -> None:
    config = text_format.Parse(f'name: "e" {X_TO_Y} {text}', ModelConfig())
    config.platform = config.platform or "ensemble"
    with pytest.raises(TritonError) as caught:
        validate_scheduling(config)
    assert caught.value.status == f"Invalid argument: {SCHEDULING[text]}"


def test_a_flow_that_can_not_work_is_not_polled(repository: Repository, caplog: pytest.LogCaptureFixture) -> None:
    ensemble(repository, "e", step("a", {"X": "V"}, {"Y": "Y"}))
    with serving(repository) as server:
        assert load_error(server, "e").status == "Internal: failed to load 'e', failed to poll from model repository"
    assert any("is not used" in record.message for record in caplog.records if record.levelno == logging.ERROR)


# --- order ----------------------------------------------------------------------------------------------------------


def test_levels_put_every_model_after_its_parts() -> None:
    parts = {"d": ["b", "c"], "b": ["a"], "c": ["a", "x"], "p": ["q"], "q": ["p"], "r": ["q", "d"]}
    names = ["a", "b", "c", "d", "p", "q", "r"]
    assert dependency_levels(names, parts) == [["a"], ["b", "c"], ["d"], ["p", "q"], ["r"]]
    assert dependency_cycles(parts).keys() == {"p", "q"}


def test_threads_that_load_and_unload_parts_and_ensembles_end(repository: Repository) -> None:
    part(repository, "a", "add")
    part(repository, "b", "add")
    chain(repository, "e", "a", "b")
    chain(repository, "outer", "e", "a")

    def operate(server: InferenceServer, names: list[str]) -> None:
        for _ in range(6):
            for name in names:
                try:
                    server.unload_model(name)
                    server.load_model(name)
                except TritonError as error:
                    overtaken = error.message.startswith("failed to unload")  # another thread loaded it since
                    assert error.code is ErrorCode.INVALID_ARG or overtaken, error

    with serving(repository, "outer") as server:
        threads = [
            threading.Thread(target=operate, args=(server, names)) for names in (["a", "e"], ["outer", "b"], ["b", "a"])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        eventually(lambda: server.check() == [])
        server.load_model("outer")
        assert states(server) == dict.fromkeys(("a", "b", "e", "outer"), "READY") and answers(server, "outer") == [4]
