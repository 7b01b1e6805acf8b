"""The backend of docs/backend_authors.md, run as it stands there; what bundled backends have in common."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmbackend.core.backend_manager import ENTRY_POINT_GROUP, installed_backends
from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from tests.helpers.framework_host import WAIT_S, infer, texts

pytest.importorskip("onnxruntime")  # before any test: it keeps a file of its own open
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "backend_authors.md"


def test_the_guides_backend_serves_refuses_and_counts(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert code is not None
    backend = tmp_path / "backends" / "reverse" / "backend.py"
    backend.parent.mkdir(parents=True)
    backend.write_text(code[1])
    models = tmp_path / "models"
    for name, limit in (("backwards", ""), ("brief", "3"), ("broken", "many")):
        (models / name / "1").mkdir(parents=True)
        more = f'parameters {{ key: "max_characters" value {{ string_value: "{limit}" }} }}' if limit else ""
        (models / name / "config.pbtxt").write_text(f'backend: "reverse"\n{more}\n')
    server = InferenceServer(
        ServerOptions(
            model_repositories=[models], backend_directory=backend.parent.parent, model_control_mode="explicit"
        )
    )
    server.start()
    try:
        for name in ("backwards", "brief"):
            server.load_model(name)
        with pytest.raises(TritonError, match="'max_characters' is 'many', expected a number"):
            server.load_model("broken")
        assert infer(server, "backwards", TEXT=texts("hello"))["REVERSED"].tolist() == [b"olleh"]
        with pytest.raises(TritonError, match="TEXT has 5 characters, expected at most 3"):
            infer(server, "brief", TEXT=texts("hello"))
        counted = {item.name: item.inference_stats for item in server.model_statistics()}
        assert counted["backwards"].success.count == 1 and counted["brief"].fail.count == 1
    finally:
        assert server.stop(WAIT_S)


@pytest.mark.parametrize("name", installed_backends())
def test_each_bundled_backend_states_the_version_it_was_written_for(name: str) -> None:
    """Not the host's, which it would fit always."""
    module: Any = next(iter(entry_points(group=ENTRY_POINT_GROUP, name=name))).load()
    for version in ((2, 0), (1, 18)):
        with pytest.raises(TritonError, match=f"'{name}' was written for version 1.19") as refusal:
            module.TRITONBACKEND_Initialize(SimpleNamespace(name=name, api_version=version))
        assert refusal.value.code is ErrorCode.UNSUPPORTED
