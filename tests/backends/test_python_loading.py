"""How a python model gets into its process: completed configuration, imports, reloads, python-based backends."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.backend_api import TritonError
from tests.helpers.python_host import Host
from tests.helpers.python_models import ECHO, ECHO_CONFIG, TEXT_CONFIG, answer_line, body, numbers, text, values
from tests.helpers.waiting import eventually


def test_auto_complete_config_completes_a_model_without_a_file(host: Host) -> None:
    rest = """
    @staticmethod
    def auto_complete_config(c):
        c.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [2]})
        c.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [2]})
        c.set_max_batch_size(4)
        c.set_dynamic_batching()
        return c
"""
    host.load("auto", "", ECHO + rest)
    config = host.server.model_config("auto")
    assert (config.max_batch_size, config.backend, config.HasField("dynamic_batching")) == (4, "python", True)
    assert values(host.infer("auto", numbers((1, 2))).one()) == {"Y": [[1, 2]]}


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("return 1", "must return a valid pb.ModelConfig object"),
        ("c.set_max_batch_size(2); return c", "configuration specified max_batch_size 8, but in auto-complete-config"),
        (
            'c.add_input({"name": "X", "data_type": "TYPE_INT32", "dims": [2]})',
            "configuration expects datatype TYPE_FP32 for input 'X', model provides TYPE_INT32",
        ),
        (
            'c.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [3]})',
            r"tensor 'X': the model expects dims \[3\] but the model configuration specifies dims \[2\]",
        ),
        (
            'c.add_output({"name": "Z"})',
            "output 'Z' in auto-complete-config function for model 'm' is missing 'data_type'",
        ),
        ('c.add_output({"name": "Z", "x": 1})', "contains property other than 'name', 'data_type' and 'dims'."),
        ('c.set_model_transaction_policy({"decoupled": True})', "trying to change decoupled property"),
    ],
)
def test_auto_complete_config_that_contradicts_the_file_fails_the_load(host: Host, lines: str, told: str) -> None:
    config = ECHO_CONFIG + "model_transaction_policy { decoupled: false }\n"
    rest = f"    @staticmethod\n    def auto_complete_config(c):\n        {lines}\n"
    with pytest.raises(TritonError, match=told):
        host.load("m", config, ECHO + rest)


def test_each_instance_has_a_module_and_an_object_of_its_own(host: Host) -> None:
    config = TEXT_CONFIG.replace("kind: KIND_CPU", "kind: KIND_CPU count: 2")
    rest = """
    def initialize(self, args):
        SEEN.append(args["model_instance_name"])
"""
    model = "SEEN = []\n" + body("time.sleep(0.05)\n" + answer_line("'|'.join(SEEN)"), rest=rest)
    host.load("m", config, model)
    answers = [host.infer("m", text("x")) for _ in range(2)]
    assert {values(answer.one())["R"][0] for answer in answers} == {b"m_0_0", b"m_0_1"}


def test_two_models_with_helpers_of_the_same_name_do_not_collide(host: Host) -> None:
    for name in ("one", "two"):
        folder = host.repository / name / "1"
        folder.mkdir(parents=True)
        (folder / "helper_of_model.py").write_text(f"NAME = {name!r}\n")
        host.load(name, TEXT_CONFIG, "import helper_of_model\n" + body(answer_line("helper_of_model.NAME")))
    for name in ("one", "two"):
        assert values(host.infer(name, text("x")).one())["R"] == [name.encode()]


def test_imports_beside_model_py_also_late_in_packages_and_in_threads(host: Host) -> None:
    execute = """
found = []
def look():
    from parts_of_model.inner import WHERE
    import parts_of_model.inner as again
    found.append(f"{WHERE} {again.WHERE} {parts_of_model.inner.WHERE}")
import parts_of_model.inner
t = threading.Thread(target=look)
t.start()
t.join()
"""
    for name in ("one", "two"):
        parts = host.repository / name / "1" / "parts_of_model"
        parts.mkdir(parents=True)
        (parts / "__init__.py").write_text("import beside_of_model\n")
        (parts / "inner.py").write_text("from beside_of_model import WHO\nfrom . import other\nWHERE = WHO + other.X\n")
        (parts / "other.py").write_text("X = '!'\n")
        (parts.parent.parent / "beside_of_model.py").write_text(f"WHO = {name!r}\n")
        host.load(name, TEXT_CONFIG, body(execute + answer_line("found[0]")))
    for name in ("one", "two"):
        assert values(host.infer(name, text("x")).one())["R"] == [f"{name}! {name}! {name}!".encode()]


def test_installed_modules_come_before_those_beside_model_py(host: Host) -> None:
    folder = host.repository / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "json.py").write_text("raise RuntimeError('shadowed')\n")
    host.load("m", TEXT_CONFIG, body(answer_line("json.dumps(1)")))
    assert values(host.infer("m", text("x")).one())["R"] == [b"1"]


def test_helper_that_fails_is_named_in_the_error(host: Host) -> None:
    folder = host.repository / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "broken_helper.py").write_text("\nraise KeyError('k')\n")
    with pytest.raises(TritonError) as caught:
        host.load("m", TEXT_CONFIG, "import broken_helper\n" + body(answer_line()))
    at = f"At:\n  {folder}/broken_helper.py(2): <module>\n  {folder}/model.py(1): <module>\n"
    assert f"KeyError: 'k'\n\n{at}" in str(caught.value)


def test_model_writes_no_bytecode_and_relative_imports_work(host: Host) -> None:
    folder = host.repository / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    host.load("m", TEXT_CONFIG, "from .beside import NAME\n" + body(answer_line("NAME")))
    assert values(host.infer("m", text("x")).one())["R"] == [b"beside"]
    assert not (folder / "__pycache__").exists()


def test_reload_after_a_change_runs_the_new_code_and_finalizes_the_old(host: Host, tmp_path: Path) -> None:
    trace = tmp_path / "finalized"
    rest = f"    def finalize(self):\n        open({str(trace)!r}, 'a').close()\n"
    folder = host.load("m", TEXT_CONFIG, body(answer_line('b"old"'), rest=rest))
    assert values(host.infer("m", text("x")).one())["R"] == [b"old"]
    (folder / "model.py").write_text(body(answer_line('b"new answer"'), rest=rest))
    host.server.load_model("m")
    assert values(host.infer("m", text("x")).one())["R"] == [b"new answer"]
    host.server.unload_model("m")
    assert host.server.stop(10.0)
    assert trace.exists()


def test_python_based_backend_serves_models_without_code(tmp_path: Path) -> None:
    backends = tmp_path / "backends"
    (backends / "mine").mkdir(parents=True)
    rest = "    def initialize(self, args):\n        self.where = args['model_repository']\n"
    code = body(answer_line("self.where + '|' + pb_utils.get_model_dir()"), rest=rest)
    (backends / "mine" / "model.py").write_text(code)
    repository = tmp_path / "repo"
    (repository / "m" / "1").mkdir(parents=True)
    (repository / "m" / "config.pbtxt").write_text(TEXT_CONFIG.replace('"python"', '"mine"'))
    host = Host(repository, backends)
    host.server.load_model("m")
    where = f"{repository / 'm'}|{repository / 'm' / '1'}"
    assert values(host.infer("m", text("x")).one())["R"] == [where.encode()]
    assert host.server.stop(10.0)


def test_classes_can_be_imported_from_the_module_that_triton_has_for_them(host: Host) -> None:
    code = """
import numpy as np
from c_python_backend_utils import (
    InferenceRequest, InferenceResponse, Logger, MemoryType, MetricFamily, MetricKind, Tensor, TritonModelException,
)
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.same = Tensor is pb_utils.Tensor and MetricFamily.COUNTER == MetricKind.COUNTER
        self.same = self.same and InferenceRequest is pb_utils.InferenceRequest and hasattr(
            MemoryType, "TRITONSERVER_MEMORY_GPU"
        )

    def execute(self, requests):
        return [InferenceResponse([Tensor("R", np.array([str(self.same)], dtype=object))])]
"""
    host.load("m", TEXT_CONFIG, code)
    assert values(host.infer("m", text("x")).one())["R"] == [b"True"]


WORKER = """
def work(tensor):
    try:
        pb_utils.is_model_ready("m")
    except RuntimeError as error:
        return f"{tensor.name()} {error}"
"""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "backend"), [("spawn", "python"), ("forkserver", "python"), ("spawn", "mine")])
def test_worker_processes_that_are_not_forked_import_the_model(tmp_path: Path, method: str, backend: str) -> None:
    rest = f"""
    def initialize(self, args):
        import multiprocessing
        with multiprocessing.get_context({method!r}).Pool(1) as pool:
            self.said = pool.map_async(work, [pb_utils.Tensor("X", np.zeros(1))]).get(60)[0]
"""
    code = body(answer_line("self.said"), rest=rest).replace("class Tr", f"{WORKER}\nclass Tr", 1)
    folder = tmp_path / "repo" / "m" / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(TEXT_CONFIG.replace('"python"', f'"{backend}"'))
    place = folder if backend == "python" else tmp_path / "backends" / backend
    place.mkdir(parents=True, exist_ok=True)
    (place / "model.py").write_text(code)
    host = Host(tmp_path / "repo", tmp_path / "backends")
    host.server.load_model("m")
    said = b"X pb_utils.is_model_ready works only in the process of a model instance"
    assert values(host.infer("m", text("x")).one())["R"] == [said]
    assert host.server.stop(10.0)


def test_an_unloaded_model_is_freed_without_the_garbage_collector(host: Host, no_garbage_collector: None) -> None:
    config = json_format.MessageToJson(text_format.Parse(ECHO_CONFIG, ModelConfig()))
    host.server.load_model("m", {"config": config, "file:1/model.py": ECHO.encode()})
    model = weakref.ref(host.server._versions.live_models()[0])
    directory = model().directory  # type: ignore[union-attr]
    host.server.unload_model("m")
    eventually(lambda: model() is None and not directory.exists())
