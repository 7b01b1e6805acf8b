"""Finding, binding, initialising and finalising backends."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from llmbackend.core.backend_manager import LoadedBackend, find_backend
from tests.helpers.core_backends import load_error
from tests.helpers.core_host import ECHO_BACKEND, STAGE, Client, Repository, noting_backend, send, serving

NAMING_BACKEND = """
from tests.helpers.core_host import STAGE
def TRITONBACKEND_Initialize(backend):
    STAGE.note(WHO + " " + backend.name)
def TRITONBACKEND_ModelInstanceExecute(instance, requests): pass
"""


def test_version_directory_comes_before_model_before_backend_directory(repository: Repository) -> None:
    model = repository.model("m", "where")
    places = {
        "version": model / "1" / "backend.py",
        "model": model / "backend.py",
        "backend": repository.backend("where", ""),
    }
    for who, path in places.items():
        path.write_text(f"WHO = {who!r}\n{NAMING_BACKEND}")
    with serving(repository) as server:
        for who, path in places.items():
            server.load_model("m")
            assert STAGE.events[-1] == f"{who} where"
            path.unlink()
            server.unload_model("m")


def test_a_file_named_after_the_backend_is_found_too(repository: Repository) -> None:
    repository.backend("echo", ECHO_BACKEND, file="triton_echo.py")
    repository.model("m", "echo")
    with serving(repository, "m") as server:
        assert send(server, "m").responses()[0].error is None


def test_runtime_names_another_file(repository: Repository) -> None:
    repository.backend("echo", ECHO_BACKEND, file="other.py")
    repository.model("m", "echo", 'runtime: "other.py"')
    with serving(repository, "m") as server:
        assert server.model_is_ready("m")


def test_a_backend_is_refused_by_a_host_of_another_version(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check = "from llmbackend.core.backend_api import check_api_version\n"
    check += "def TRITONBACKEND_Initialize(backend): check_api_version(backend, (1, 19))\n"
    repository.backend("checked", check + ECHO_BACKEND)
    repository.model("m", "checked")
    monkeypatch.setattr(LoadedBackend, "api_version", (2, 0))
    with serving(repository) as server, caplog.at_level(logging.INFO):
        assert (
            "Unsupported: triton backend API version does not support this backend: 'checked' was written for version "
            "1.19, this server has 2.0"
        ) in load_error(server, "m")
        assert "Triton TRITONBACKEND API version: 2.0" in caplog.text
        assert "'checked' TRITONBACKEND API version: 1.19" in caplog.text
        monkeypatch.setattr(LoadedBackend, "api_version", (1, 20))
        server.load_model("m")
        server.unload_model("m")


def test_a_missing_backend_is_reported_with_the_text_of_triton(repository: Repository) -> None:
    model = repository.model("m", "nope")
    with serving(repository) as server:
        assert load_error(server, "m") == (
            "load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: unable to find backend "
            "library for backend 'nope', try specifying runtime on the model configuration.;\n"
        )
        repository.model("m", "nope", 'runtime: "lib.py"')
        paths = f"'{model / '1'}' '{model}' '{repository.backends / 'nope'}' "
        assert f"unable to find backend library 'lib.py' for model 'm', searched: {paths};" in load_error(server, "m")
        repository.model("m", "pytorch", 'runtime: "model.py"')
        file = repository.backends / "pytorch" / "model.py"
        told = f"unable to find Python backend based backend library 'model.py' for model 'm', searched: '{file}';"
        assert told in load_error(server, "m")


def test_models_of_vllm_may_name_the_runtime_that_triton_shows() -> None:
    found = find_backend("vllm", "m", Path("m/1"), None, "model.py")
    assert (found.settings_name, found.file) == ("vllm", None)


@pytest.mark.parametrize("config", ['runtime: "../../evil.py"', 'runtime: "/tmp/evil.py"'])
def test_a_runtime_must_not_leave_its_directory(repository: Repository, config: str) -> None:
    repository.model("m", "echo", config)
    with serving(repository) as server:
        assert "escapes backend directory" in load_error(server, "m")


def test_a_backend_name_must_not_leave_the_backend_directory(repository: Repository) -> None:
    repository.model("m", "../models/m")
    with serving(repository) as server:
        assert "escapes backend directory" in load_error(server, "m")


def test_a_backend_may_import_its_neighbours(repository: Repository) -> None:
    repository.backend("split", "from .helper import TRITONBACKEND_ModelInstanceExecute")
    repository.backend("split", ECHO_BACKEND, file="helper.py")
    repository.model("m", "split")
    with serving(repository, "m") as server:
        assert send(server, "m").responses()[0].error is None


def test_execute_is_required_and_nothing_else_is(repository: Repository) -> None:
    repository.backend("empty", "def TRITONBACKEND_Initialize(backend): pass")
    repository.model("m", "empty")
    with serving(repository) as server:
        assert "unable to find required entrypoint 'TRITONBACKEND_ModelInstanceExecute'" in load_error(server, "m")


def test_a_module_that_fails_to_import_is_a_load_error(repository: Repository) -> None:
    repository.backend("broken", "import no_such_module_anywhere")
    repository.model("m", "broken")
    with serving(repository) as server:
        assert "unable to load backend library: ModuleNotFoundError" in load_error(server, "m")


def test_a_backend_is_initialised_once_and_finalised_at_stop(repository: Repository) -> None:
    repository.backend("b", noting_backend())
    repository.model("m1", "b")
    repository.model("m2", "b")
    with serving(repository, "m1", "m2") as server:
        server.unload_model("m1")
        server.unload_model("m2")
    assert STAGE.events.count("Initialize") == 1
    assert STAGE.events[-1] == "Finalize" and STAGE.events.count("Finalize") == 1


def test_finalize_follows_a_failed_initialize_which_is_tried_again(repository: Repository) -> None:
    path = repository.backend("b", noting_backend("Initialize"))
    repository.model("m", "b")
    with serving(repository) as server:
        assert "Internal: no Initialize;" in load_error(server, "m")
        assert STAGE.events == ["Initialize", "Finalize"]
        path.write_text(noting_backend())
        server.load_model("m")
        assert STAGE.events[2:4] == ["Initialize", "ModelInitialize"]


def test_finalize_follows_a_failed_model_initialize(repository: Repository) -> None:
    repository.backend("b", noting_backend("ModelInitialize"))
    repository.model("m", "b")
    with serving(repository) as server:
        assert "Internal: no ModelInitialize;" in load_error(server, "m")
        assert STAGE.events == ["Initialize", "ModelInitialize", "ModelFinalize"]


def test_all_instances_are_made_and_finalised_when_some_fail(repository: Repository) -> None:
    repository.backend("b", noting_backend("InstanceInitialize m_0_0", "InstanceInitialize m_0_1"))
    repository.model("m", "b", "instance_group { count: 3 }")
    with serving(repository) as server:
        assert "Internal: no InstanceInitialize m_0_1;" in load_error(server, "m")  # the last error wins
        names = ["m_0_0", "m_0_1", "m_0_2"]
        assert STAGE.events[2:] == [
            *(f"InstanceInitialize {name}" for name in names),
            *(f"InstanceFinalize {name}" for name in names),
            "ModelFinalize",
        ]


def test_model_finalize_follows_an_invalid_auto_completed_config(repository: Repository) -> None:
    repository.backend(
        "b",
        """
        from tests.helpers.core_host import STAGE
        def TRITONBACKEND_ModelInitialize(model):
            config = model.config
            config.input.add(name="X")
            model.set_config(config)
        def TRITONBACKEND_ModelFinalize(model): STAGE.note("ModelFinalize")
        def TRITONBACKEND_ModelInstanceExecute(instance, requests): pass
        """,
    )
    repository.model("m", "b", io="")
    with serving(repository) as server:
        assert "model input 'X' must specify 'data_type' for m" in load_error(server, "m")
        assert STAGE.events == ["ModelFinalize"]


def test_attributes_give_groups_to_models_without_any(repository: Repository) -> None:
    source = ECHO_BACKEND + (
        "\nfrom llmbackend.core.backend_api import InstanceGroupKind\n"
        "def TRITONBACKEND_GetBackendAttribute(backend, attributes):\n"
        "    attributes.preferred_groups.append((InstanceGroupKind.MODEL, 2))\n"
    )
    repository.backend("b", source)
    repository.model("m", "b")
    repository.model("own", "b", "instance_group { kind: KIND_CPU }")
    with serving(repository, "m", "own") as server:
        (group,) = server.model_config("m").instance_group
        assert (group.name, group.count, group.Kind.Name(group.kind)) == ("m", 2, "KIND_MODEL")
        assert server.model_config("own").instance_group[0].count == 1


def test_an_error_of_get_backend_attribute_is_ignored(repository: Repository) -> None:
    repository.backend("b", ECHO_BACKEND + "\ndef TRITONBACKEND_GetBackendAttribute(backend, attributes): 1 / 0\n")
    repository.model("m", "b")
    with serving(repository, "m") as server:
        assert server.model_is_ready("m")


def test_backend_config_merges_global_then_own_settings_then_defaults(repository: Repository) -> None:
    repository.backend(
        "b",
        ECHO_BACKEND
        + "\ndef TRITONBACKEND_Initialize(b):\n"
        + "    from tests.helpers.core_host import STAGE\n    STAGE.kept.append(b)\n",
    )
    repository.model("m", "b")
    settings = {"": {"a": "1", "b": "1"}, "b": {"b": "2"}, "other": {"c": "3"}}
    with serving(repository, "m", backend_config=settings):
        (backend,) = STAGE.kept
        config = dict(backend.config)
        assert {key: config.get(key) for key in "abc"} == {"a": "1", "b": "2", "c": None}
        assert config["default-max-batch-size"] == "4" and config["auto-complete-config"] == "true"
        assert config["backend-directory"] == str(repository.backends)
        assert backend.directory == repository.backends / "b"


def test_a_python_based_backend_is_served_by_the_python_backend_under_its_own_name(repository: Repository) -> None:
    repository.backend("mine", "", file="model.py")
    repository.backend("python", f"WHO = 'python'\n{NAMING_BACKEND}", file="triton_python.py")
    repository.model("m", "mine")
    with serving(repository, "m") as server:
        assert STAGE.events == ["python mine"]
        assert server.model_config("m").runtime == "model.py"


def test_a_python_based_backend_may_have_an_environment_for_its_models(repository: Repository) -> None:
    repository.backend("mine", "", file="model.py")
    repository.backend("python", f"WHO = 'python'\n{NAMING_BACKEND}", file="triton_python.py")
    environment = repository.backend("mine", "", file="pb_exec_env_model.py.tar.gz")
    repository.backend("python", "", file="pb_exec_env_model.py.tar.gz")
    own = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/own" } }'
    repository.model("m", "mine")
    repository.model("own", "mine", own)
    repository.model("plain", "python")
    with serving(repository, "m", "own", "plain") as server:
        found = [server.model_config(name).parameters for name in ("m", "own", "plain")]
    assert found[0]["EXECUTION_ENV_PATH"].string_value == str(environment)
    assert found[1]["EXECUTION_ENV_PATH"].string_value == "/own" and not found[2]


def test_an_installed_backend_is_found_by_its_entry_point(repository: Repository) -> None:
    (repository.models / "m" / "1").mkdir(parents=True)
    (repository.models / "m" / "1" / "model.py").write_text(
        "class TritonPythonModel:\n    def execute(self, requests): return []\n"
    )
    with serving(repository, "m") as server:  # no config.pbtxt: a model.py means the backend `python`
        assert server.model_config("m").backend == "python"


def test_initialize_is_serial_across_models(repository: Repository) -> None:
    inside = threading.Lock()
    for name in ("b1", "b2", "b3"):
        repository.backend(
            name,
            ECHO_BACKEND
            + """
def TRITONBACKEND_Initialize(backend):
    from tests.helpers import core_host
    (lock,) = core_host.STAGE.kept
    assert lock.acquire(blocking=False), "two backends initialise at once"
    time.sleep(0.02)
    lock.release()
""",
        )
        repository.model(f"m-{name}", name)
    STAGE.kept.append(inside)
    with serving(repository, "*") as server:
        assert server.is_ready()


def test_metric_families_of_backends(repository: Repository) -> None:
    repository.backend(
        "b",
        ECHO_BACKEND
        + """
from llmbackend.core.backend_api import MetricKind, TritonError, ErrorCode
def TRITONBACKEND_Initialize(backend):
    tokens = backend.metric_family(MetricKind.COUNTER, "vllm:prompt_tokens_total", "Tokens.", ["model"])
    tokens.increment(5, model="m")
    assert backend.metric_family(MetricKind.COUNTER, "vllm:prompt_tokens_total", "Tokens.", ["model"]) is tokens
    try:
        backend.metric_family(MetricKind.GAUGE, "vllm:prompt_tokens_total", "Tokens.", ["model"])
    except TritonError as error:
        assert error.code is ErrorCode.ALREADY_EXISTS
    else:
        raise AssertionError("the kind changed")
    backend.metric_family(MetricKind.COUNTER, "plain", "No suffix.").increment()
    ttft = backend.metric_family(MetricKind.HISTOGRAM, "ttft", "s", ["model"], [0.1, 1, float("inf")])
    for value in (0.1, 0.3, 7):
        ttft.observe(value, model="m")
    gauge = backend.metric_family(MetricKind.GAUGE, "running", "n", ["model"])
    gauge.set(3, model="gone")
    gauge.set(2, model="m")
    gauge.remove(model="gone")
    for wrong in (
        lambda: tokens.increment(-1, model="m"), lambda: tokens.increment(1), lambda: gauge.observe(1, model="m"),
        lambda: backend.metric_family(MetricKind.GAUGE, "labels", "n", ["a-b"]),
        lambda: backend.metric_family(MetricKind.HISTOGRAM, "buckets", "n", ["a"], [1, 1]),
    ):
        try:
            wrong()
        except TritonError as error:
            assert error.code is ErrorCode.INVALID_ARG
        else:
            raise AssertionError("accepted")
""",
    )
    repository.model("m", "b")
    from llmbackend.frontends.operations.probes import render

    with serving(repository, "m") as server:
        text = render(server.metrics_registry).decode()
    assert '# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total{model="m"} 5\n' in text
    assert "# TYPE plain counter\nplain 1\n" in text
    assert '# TYPE running gauge\nrunning{model="m"} 2\n' in text and "gone" not in text
    assert (
        'ttft_count{model="m"} 3\nttft_sum{model="m"} 7.4\nttft_bucket{model="m",le="0.1"} 1\n'
        'ttft_bucket{model="m",le="1"} 2\nttft_bucket{model="m",le="+Inf"} 3\n'
    ) in text


def test_execute_that_raises_answers_every_request_with_its_error(repository: Repository) -> None:
    repository.backend("b", "def TRITONBACKEND_ModelInstanceExecute(instance, requests): raise ValueError('oh')")
    repository.model("m", "b")
    with serving(repository, "m") as server:
        clients: list[Client] = [send(server, "m", id=str(index)) for index in range(3)]
        assert {client.error().status for client in clients} == {"Internal: ValueError: oh"}
        assert server.model_statistics("m")[0].inference_stats.fail.count == 3
