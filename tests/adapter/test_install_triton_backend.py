"""`llmbackend install-triton-backend`: what it puts there, what that imports, and that engines run in another Python.

That it works inside NVIDIA's server is shown against a real one, in tests/real_triton.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

import llmbackend
from llmbackend.adapter.inside_triton.install import install
from llmbackend.adapter.text.tokenizer_files import convert, download, run_in
from llmbackend.cli.main import app
from llmbackend.core.backend_api import TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from tests.helpers.llm_host import MODEL, llm_host, write_model

OTHER_PYTHON = next(
    str(path) for path in sorted(Path(sys.executable).parent.glob("python3*")) if str(path) != sys.executable
)
"""The same environment by another name: it counts as another interpreter."""
HEAVY = ("torch", "transformers", "grpc", "starlette", "uvicorn", "typer", "orjson", "prometheus_client", "safetensors")
PB_UTILS = """
class TritonModelException(Exception): pass
class MetricFamily: COUNTER, GAUGE = 1, 2
class Logger: pass
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("backends"))


def test_the_command_installs_and_says_where(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["install-triton-backend", str(tmp_path / "b"), "--name", "vllm"])
    assert result.exit_code == 0, result.output
    assert result.output.split() == ["installed", "in", str(tmp_path / "b" / "vllm")]
    facts = json.loads((tmp_path / "b" / "vllm" / "installed.json").read_text())
    assert (facts["llmbackend"], facts["engine_python"]) == (llmbackend.__version__, sys.executable)
    (tmp_path / "file").touch()
    refused = CliRunner().invoke(app, ["install-triton-backend", str(tmp_path / "file")])
    assert refused.exit_code == 1 and "install-triton-backend:" in refused.output


def test_a_new_installation_replaces_the_old_one_whole(tmp_path: Path) -> None:
    target = install(tmp_path, engine_python="/opt/engine/bin/python")
    (target / "code" / "leftover.py").touch()
    assert install(tmp_path) == target
    assert not (target / "code" / "leftover.py").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["llm"]


@pytest.mark.slow
def test_the_stubs_imports_are_light_and_come_from_the_installation(installed: Path, tmp_path: Path) -> None:
    """In an interpreter that sees numpy, the standard library and nothing else of this environment."""
    numpy_only = tmp_path / "site"
    numpy_only.mkdir()
    import numpy

    for name in ("numpy", "numpy.libs"):
        (numpy_only / name).symlink_to(Path(numpy.__file__).parents[1] / name)
    (numpy_only / "triton_python_backend_utils.py").write_text(PB_UTILS)
    program = f"""
import sys
sys.path[:0] = [{str(numpy_only)!r}]
sys.path.append({str(installed)!r})
import model
assert model.TritonPythonModel.execute
heavy = sorted({set(HEAVY)!r} & set(sys.modules))
assert not heavy, heavy
outside = sorted(name for name, module in sys.modules.items()
    if "site-packages" in (getattr(module, "__file__", None) or "") and not name.startswith("numpy"))
assert not outside, outside
import llmbackend, os
try:
    model.TritonPythonModel().initialize({{}})
except Exception as error:  # this environment has numpy 2
    assert "install 'numpy<2' there" in str(error), error
print(llmbackend.__file__, os.environ["LLMBACKEND_ENGINE_PYTHON"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    base = Path(sys.base_prefix) / "bin" / "python{}.{}".format(*sys.version_info[:2])
    done = subprocess.run([str(base), "-S", "-E", "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(installed / "code" / "llmbackend" / "__init__.py"), sys.executable]


def test_another_python_version_is_told_what_to_do(installed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "llm"
    copy.mkdir()
    (copy / "model.py").write_text((installed / "model.py").read_text())
    facts = json.loads((installed / "installed.json").read_text())
    (copy / "installed.json").write_text(json.dumps({**facts, "python": "3.99"}))
    done = subprocess.run([sys.executable, str(copy / "model.py")], capture_output=True, text=True)
    assert done.returncode
    assert "was installed for Python 3.99, but this stub runs Python" in done.stderr
    assert "-m pip install --no-deps --upgrade --target" in done.stderr


@pytest.mark.slow
def test_an_engine_runs_in_another_python_with_this_very_code(tmp_path: Path) -> None:
    with llm_host(tmp_path, transport="process", engine_python=OTHER_PYTHON) as host:
        commands = [
            Path(f"/proc/{pid}/cmdline").read_text()
            for task in Path("/proc/self/task").iterdir()
            for pid in (task / "children").read_text().split()
        ]
        assert any(one.startswith(OTHER_PYTHON) and str(Path(llmbackend.__file__).parent) in one for one in commands)
        assert host.infer(text_input="hi", sampling={"max_tokens": 3}).error is None


def test_an_engine_python_that_does_not_exist_is_a_load_error(tmp_path: Path) -> None:
    write_model(tmp_path, transport="process", engine_python="/nowhere/python")
    server = InferenceServer(ServerOptions(model_repositories=(tmp_path,), model_control_mode="explicit"))
    server.start()
    with pytest.raises(TritonError, match=r"the engine process could not be started.*/nowhere/python"):
        server.load_model(MODEL)
    assert server.stop(10)


@pytest.mark.slow
def test_a_library_that_this_environment_lacks_is_asked_of_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = Path(__file__).parents[2] / "model_repository" / "demo" / "1"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((demo / name).read_text())
    assert '"model"' in run_in(OTHER_PYTHON, convert, str(tmp_path), "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE"):
        run_in(OTHER_PYTHON, download, "no-such/model")


@pytest.mark.parametrize("value", ["true", "false"])
def test_the_stub_reads_its_own_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """The adapter, which has no use for it, would report that it has no effect."""
    stub = ModuleType("triton_python_backend_utils")
    exec(PB_UTILS, stub.__dict__)
    name = "llmbackend.adapter.inside_triton"
    assert not any(module.startswith(f"{name}.triton") for module in sys.modules)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stub)
    model_module = importlib.import_module(f"{name}.triton_python_model")
    monkeypatch.setattr(model_module, "_check_numpy", lambda: None)
    monkeypatch.setattr(model_module, "attach_log_handler", logging.NullHandler)
    seen: list[Any] = []
    monkeypatch.setattr(
        model_module.entry_points, "TRITONBACKEND_ModelInitialize", lambda model: seen.append(model.config)
    )
    monkeypatch.setattr(model_module.entry_points, "TRITONBACKEND_ModelInstanceInitialize", lambda instance: None)
    config = {
        "backend": "llm",
        "parameters": {"ENABLE_VLLM_HEALTH_CHECK": {"string_value": value}, "model": {"string_value": "mock"}},
    }
    arguments = {
        "model_name": "m",
        "model_version": "1",
        "model_repository": str(tmp_path),
        "model_config": json.dumps(config),
    }
    instance = {"model_instance_name": "m_0", "model_instance_kind": "CPU", "model_instance_device_id": "0"}
    one = model_module.TritonPythonModel()
    one.initialize(arguments | instance)
    one.finalize()
    for module in ("triton_python_model", "host", "metrics"):
        del sys.modules[f"{name}.{module}"]
    assert one._unloads_when_unhealthy == (value == "true")
    assert list(seen[0].parameters) == ["model"]
