"""The backend of docs/compiled_backends.md, compiled and run as it stands there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.core_host import Repository, send, serving, x

PAGE = Path(__file__).resolve().parents[3] / "docs" / "compiled_backends.md"
INCLUDE = Path(__file__).parent / "include"


def test_the_pages_backend_doubles(repository: Repository, tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    code = re.search(r"```c\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    source = tmp_path / "double.c"
    source.write_text(code[1])
    library = repository.backends / "double" / "libtriton_double.so"
    library.parent.mkdir()
    command = ["cc", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{INCLUDE}", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    repository.model("m", "double")
    with serving(repository, "m") as server:
        (response,) = send(server, "m", x(1.5, -2)).responses()
        assert response.error is None and response.outputs[0].data.tolist() == [3, -4]
