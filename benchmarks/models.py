"""Each checkpoint in the format that an engine reads, created if missing.

Used by the runner. Independent of what is measured. Invariant: a model that exists is complete; it is written under
another name first.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import safe_open

from llmbackend.gguf.header import Header, read_header
from tools.real_models import NAMES, make

from . import random_gguf
from .checkpoints import SHAPES, write_tokenizer
from .environments import Environments
from .quantise_gguf import KINDS

REAL_GGUF = {"smollm2": "q4_1.gguf", "gemma3-270m": "q4_k_m.gguf"}
"""The files that real checkpoints are made of."""
RANDOM_GGUF = tuple(random_gguf.SHAPES)
"""Their files are written with random blocks, not from a checkpoint."""
OPENVINO_INT4 = ("--sym", "--group-size", "128", "--group-size-fallback", "adjust")
EMBEDDINGS = "token_embd.weight"
TOKENIZER = "tokenizer"


class Models:
    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        self.folder = environments.scratch / "models"

    def path(self, name: str) -> Path:
        """`name`: a shape or a real model, and what was made of it (`-w8a8`, `-openvino-int8`, `-q8_0.gguf`)."""
        target = self.folder / name
        if not target.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            model = next(model for model in (*SHAPES, *NAMES, *RANDOM_GGUF) if name.startswith(model))
            form = name.removeprefix(model).removeprefix("-")
            if model in NAMES and form in ("", REAL_GGUF[model]):
                real = make(model, Path(sys.prefix) / "real_models")
                return real.with_suffix(".gguf") if form else real
            part = self.folder / f"part-{name}"
            shutil.rmtree(part, ignore_errors=True)
            self._make(model, form, part)
            part.rename(target)
        return target

    def tokenizer(self, model: str) -> Path:
        """A folder with it: the checkpoint, where there is one."""
        return self.path(model if model in (*SHAPES, *NAMES) else f"{model}-{TOKENIZER}")

    def _make(self, shape: str, form: str, target: Path) -> None:
        ours = [sys.executable, "-m"]
        if not form and shape not in SHAPES:
            raise ValueError(f"{shape} has no checkpoint, only GGUF files")
        if not form:
            self._run([*ours, "benchmarks.checkpoints", shape, target])
        elif form == "w8a8":
            self._run([*ours, "benchmarks.checkpoints", "--w8a8", self.path(shape), target])
        elif form.startswith("openvino-"):
            program = self._environments.folder("openvino") / "bin" / "optimum-cli"
            kind = form.removeprefix("openvino-")
            task = ["--task", "text-generation-with-past", "--weight-format", kind]
            task += OPENVINO_INT4 if kind == "int4" else []
            self._run([program, "export", "openvino", "--model", self.path(shape), *task, target])
        elif form == TOKENIZER:
            write_tokenizer(target, random_gguf.SHAPES[shape].vocabulary)
        else:
            self._make_gguf(shape, form.removesuffix(".gguf"), target)

    def _make_gguf(self, shape: str, kind: str, target: Path) -> None:
        ours = [sys.executable, "-m"]
        self._environments.install("llama.cpp")
        if shape in RANDOM_GGUF:
            self._run([*ours, "benchmarks.random_gguf", shape, target, kind])
        elif kind in KINDS:
            source = self.path(f"{shape}-f16.gguf")
            self._run([*ours, "benchmarks.quantise_gguf", source, target, kind], self._environments.llama_cpp_environ())
        else:
            source = self._environments.llama_cpp_source / "vendor" / "llama.cpp"
            packages = next(self._environments.folder("llama.cpp").glob("lib/python*/site-packages"))
            self._run([*ours, "benchmarks.gguf", source, packages, self.path(shape), target, kind])

    def _run(self, command: Sequence[str | Path], environ: Mapping[str, str] | None = None) -> None:
        with (self._environments.logs / "models.log").open("a") as log:
            subprocess.run(
                command, check=True, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(environ or {})}
            )


def model_bytes(path: Path) -> int:
    """On disk."""
    return sum(file.stat().st_size for file in _files(path))


def bytes_per_token(path: Path) -> int:
    """What one stream reads for each token: the weights without a table of embeddings that is not also the head, and of
    experts the chosen ones."""
    if path.suffix == ".gguf":
        header = read_header(path)
        left_out = EMBEDDINGS if "output.weight" in header.tensors else ""
        return sum(_read_bytes(name, header) for name in header.tensors if name != left_out)
    weights = [file for file in _files(path) if file.suffix == ".safetensors" or file.name == "openvino_model.bin"]
    return sum(file.stat().st_size for file in weights) - _bytes_of_other_experts(path)


def _read_bytes(name: str, header: Header) -> int:
    """Of experts, those that a token has."""
    size_bytes, fields = header.tensors[name].size_bytes, header.fields
    if "_exps." not in name:
        return size_bytes
    architecture = fields["general.architecture"]
    chosen, count = (int(fields[f"{architecture}.expert_{part}"]) for part in ("used_count", "count"))
    return size_bytes * chosen // count


def _bytes_of_other_experts(directory: Path) -> int:
    """Of a checkpoint's experts in bfloat16 that a token does not have."""
    config = json.loads((directory / "config.json").read_text())
    count, chosen = (config.get(name, 0) for name in ("num_local_experts", "num_experts_per_tok"))
    if not count:
        return 0
    numbers = 0
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            names = [name for name in tensors.keys() if ".experts." in name]  # noqa: SIM118
            numbers += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    return int(2 * numbers * (count - chosen) // count)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
