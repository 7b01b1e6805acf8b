"""The servers and the models that are compared: the command line of each server for a model and a kind of weights.

Used by the campaign. Independent of loads. Invariants: the flags are those recommended by the server's own
documentation for many streams, and each server may run as many concurrently as the largest load has; a server has the
kinds of a model for which there is a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..entries import OURS
from ..environments import LLAMA_CPP_PYTHON, VLLM_VERSION, Environments

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
"""Of all models, whose own templates have no tools. Calls are in Hermes' format."""
SERVED_NAME = "bench"
STREAMS = 64
CONTEXT_TOKENS = 2048
Kind = Literal["bfloat16", "8 bits", "4 bits"]
KINDS: tuple[Kind, ...] = ("8 bits", "bfloat16", "4 bits")


@dataclass(frozen=True)
class ServedModel:
    """files: the endings of its names in models.py. requests_divisor: of the numbers of requests, for a slow model."""

    name: str
    files: tuple[str, ...]
    requests_divisor: int


CHECKPOINT, W8A8, F16, Q8_0, Q4_0 = "", "-w8a8", "-f16.gguf", "-q8_0.gguf", "-q4_0.gguf"
ALL_FILES = (CHECKPOINT, W8A8, F16, Q8_0, Q4_0)
MODELS: Sequence[ServedModel] = (
    ServedModel("smollm2", ALL_FILES, 1),
    ServedModel("qwen2.5-0.5b-shape", ALL_FILES, 2),
    ServedModel("qwen3-1.7b-shape", ALL_FILES, 2),
    ServedModel("moe-3b-shape", (CHECKPOINT, Q8_0, Q4_0), 2),
    ServedModel("llama3-8b-shape", (Q4_0,), 4),
)


@dataclass(frozen=True)
class Contender:
    """files: what it serves for each kind of weights. options: its own for that kind."""

    name: str
    environment: str
    version: str
    files: dict[Kind, str]
    options: dict[Kind, tuple[str, ...]]
    command: Callable[[Environments, Path, int], list[str]]

    def kinds(self, model: ServedModel) -> list[Kind]:
        return [kind for kind in KINDS if self.files.get(kind) in model.files]

    def words(self, environments: Environments, model: Path, port: int, kind: Kind) -> list[str]:
        return [*self.command(environments, model, port), *self.options.get(kind, ())]


def _common(model: Path, port: int) -> list[str]:
    """Of ours and vLLM, which have the same flags."""
    flags = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_NAME]
    flags += ["--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(STREAMS)]
    flags += ["--chat-template", str(CHAT_TEMPLATE), "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    return [str(model), *flags]


def _short_json(**config: str) -> list[str]:
    """Without whitespace that the schema does not need, which random weights may go on with."""
    return ["--structured-outputs-config", json.dumps(config | {"disable_any_whitespace": True})]


def _ours(environments: Environments, model: Path, port: int) -> list[str]:
    return [str(environments.python("ours")), "-m", "llmbackend.cli", "serve", *_common(model, port), *_short_json()]


def _vllm(environments: Environments, model: Path, port: int) -> list[str]:
    """xgrammar is its default, but must be named to have short JSON."""
    command = [str(environments.folder("vllm") / "bin" / "vllm"), "serve", *_common(model, port)]
    return [*command, *_short_json(backend="xgrammar")]


def _llama_server(environments: Environments, model: Path, port: int) -> list[str]:
    command = [str(environments.llama_cpp_binaries / "llama-server"), "--model", str(model), "--alias", SERVED_NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), "--threads", str(os.cpu_count() or 1)]
    command += ["--chat-template-file", str(CHAT_TEMPLATE)]
    return [*command, "--parallel", str(STREAMS), "--ctx-size", str(STREAMS * 1024), "--no-kv-unified"]


CONTENDERS: Sequence[Contender] = (
    Contender(
        name=OURS,
        environment="ours",
        version="0.1.0",
        files={"bfloat16": CHECKPOINT, "8 bits": CHECKPOINT, "4 bits": Q4_0},
        options={"8 bits": ("--quantization", "int8")},
        command=_ours,
    ),
    Contender(
        name="vLLM",
        environment="vllm",
        version=f"{VLLM_VERSION} (CPU)",
        files={"bfloat16": CHECKPOINT, "8 bits": W8A8},
        options={},
        command=_vllm,
    ),
    Contender(
        name="llama.cpp",
        environment="llama-server",
        version=f"llama-server of {LLAMA_CPP_PYTHON.replace('==', ' ')}",
        files={"bfloat16": F16, "8 bits": Q8_0, "4 bits": Q4_0},
        options={},
        command=_llama_server,
    ),
)
