"""What `import llmbackend` offers: cheap until it is used, and typed."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from glob import glob
from pathlib import Path

import pytest

import llmbackend
from llmbackend import SamplingParams
from llmbackend.adapter.schemas.sampling import ACCEPTED
from llmbackend.adapter.structured_outputs import constraint, reasoning

IMPORTED = "import llmbackend, json, sys; dir(llmbackend); print(json.dumps(sorted(sys.modules)))"
NOT_OFFERED = {
    *constraint.FIELDS,  # the former names of structured_outputs
    *reasoning.FIELDS,  # what the OpenAI frontend knows of the model's reasoning
}


def test_the_import_alone_imports_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=60, check=True)
    modules = set(json.loads(done.stdout))
    assert {name for name in modules if name.startswith("llmbackend")} == {"llmbackend"}
    assert not modules & {"numpy", "msgspec", "asyncio", "grpc"}


def test_each_offered_name_exists_and_is_in_the_stub() -> None:
    stub = ast.parse(Path(llmbackend.__file__).with_suffix(".pyi").read_text())
    imported = [alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted([*imported, "__version__"], key=str) == sorted(llmbackend.__all__)
    assert all(getattr(llmbackend, name) is not None for name in llmbackend.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        llmbackend.Motor  # type: ignore[attr-defined]  # noqa: B018


def test_every_file_of_the_package_is_in_its_wheel() -> None:
    package = Path(llmbackend.__file__).parent
    patterns = tomllib.loads((package.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    installed = {name for one in patterns["llmbackend"] for name in glob(one, root_dir=package, recursive=True)}
    files = (path.relative_to(package) for path in package.rglob("*") if path.is_file())
    others = {str(path) for path in files if path.suffix not in (".py", ".pyc", ".so", ".h", ".cpp")}
    assert others - installed == set()
    assert "demo_repository/demo/1/model.safetensors" in installed


def test_sampling_params_are_those_of_a_server() -> None:
    assert set(SamplingParams.__struct_fields__) == set(ACCEPTED) - NOT_OFFERED | {"structured_outputs"}
