"""Each checkpoint in the form an engine reads, made when it is missing.

For: the runner. Does not know: what is measured. Invariant: a model that exists is complete; it is written under
another name first.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .checkpoints import SHAPES
from .environments import Environments


class Models:
    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        self.folder = environments.scratch / "models"

    def path(self, name: str) -> Path:
        """`name`: a shape, and what was made of it (`-w8a8`, `-openvino-int8`, `-q8_0.gguf`)."""
        target = self.folder / name
        if not target.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            shape = next(shape for shape in SHAPES if name.startswith(shape))
            part = self.folder / f"part-{name}"
            shutil.rmtree(part, ignore_errors=True)
            self._make(shape, name.removeprefix(shape).removeprefix("-"), part)
            part.rename(target)
        return target

    def _make(self, shape: str, form: str, target: Path) -> None:
        ours = [sys.executable, "-m"]
        if not form:
            self._run([*ours, "benchmarks.checkpoints", shape, target])
        elif form == "w8a8":
            self._run([*ours, "benchmarks.checkpoints", "--w8a8", self.path(shape), target])
        elif form.startswith("openvino-"):
            program = self._environments.folder("openvino") / "bin" / "optimum-cli"
            task = ["--task", "text-generation-with-past", "--weight-format", form.removeprefix("openvino-")]
            self._run([program, "export", "openvino", "--model", self.path(shape), *task, target])
        else:
            (source,) = self._environments.llama_cpp_source.glob("llama_cpp_python-*/vendor/llama.cpp")
            packages = next(self._environments.folder("llama.cpp").glob("lib/python*/site-packages"))
            kind = form.removesuffix(".gguf")
            self._run([*ours, "benchmarks.gguf", source, packages, self.path(shape), target, kind])

    def _run(self, command: Sequence[str | Path]) -> None:
        with (self._environments.logs / "models.log").open("a") as log:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
